"""The benchmark of pipelines runs and writes what it measured; times are not judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


def test_plan_and_measured_run_are_written(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--schedules", "1f1b", "--microbatches", "3", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    [row] = json.loads((tmp_path / "pipeline.json").read_text())["rows"]
    assert row["schedule"] == "1f1b"
    assert row["measured_ms"] > 0
    assert row["quotient"] == pytest.approx(row["measured_ms"] / row["planned_ms"])
    assert "| 1f1b     |             3 |" in (tmp_path / "pipeline.md").read_text()
    picture = (tmp_path / "pipeline.svg").read_text()
    assert picture.count("<title>") == 2 * 2 * 2 * 3, "plan and run of two ranks, a forward and a backward of each"
    assert "rank 1 planned" in picture
    assert "rank 1 measured" in picture
