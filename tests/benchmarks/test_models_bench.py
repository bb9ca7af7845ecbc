"""The benchmark of models: every row is there and says what it measured; times are not judged."""

import dataclasses
import json
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "models.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/cpuinfo")
pytest.importorskip("transformers")


BENCH = runpy.run_path(str(PROGRAM))


def bench(dtype: str, folder: Path) -> str:
    arguments = ["--dtypes", dtype, "--models", "nano", "--threads", "1", "--pairs", "2", "--no-compile"]
    command = [sys.executable, str(PROGRAM), *arguments, "--output", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=140).stdout


def test_a_row_is_measured_and_the_other_stays(tmp_path: Path) -> None:
    sides = {
        side: BENCH["Side"]([2.0, 4.0], [seconds] * 2, 0.5) for side, seconds in (("ours", 1.0), ("transformers", 3.0))
    }
    tried = {"eager": 5.0, "batched_mm": "not run", "grouped_mm": 3.0}
    earlier = BENCH["Row"]("nano", "fp32", 1, "2026-01-01 00:00", 0.0, "grouped_mm", tried, sides, None)
    BENCH["write"]([earlier], tmp_path)
    printed = bench("bf16", tmp_path)
    assert printed == (tmp_path / "models.md").read_text()
    report = json.loads((tmp_path / "models.json").read_text())
    assert report["command"].startswith("hatch run bench:models --dtypes bf16 --models nano")
    assert set(report["versions"]) == {"python", "torch", "transformers", "nanopar-models"}
    assert report["machine"]["cores"] >= 1
    first, row = report["rows"]
    assert first == dataclasses.asdict(earlier)
    assert (row["model"], row["dtype"], row["threads"]) == ("nano", "bf16", 1)
    assert set(row["tried"]) == {"eager", "batched_mm", "grouped_mm"}
    figures = {name: seconds for name, seconds in row["tried"].items() if isinstance(seconds, float)}
    assert row["peer"] == min(figures, key=figures.__getitem__)
    assert set(row["sides"]) == {"ours", "transformers"}
    for side in row["sides"].values():
        assert len(side["wall_s"]) == len(side["cpu_s"]) == 2
        assert min(side["wall_s"]) >= 0.9 * min(side["cpu_s"]) > 0  # one thread
        assert 0.1 < side["other_share"] < 0.95
    ours, theirs = (statistics.median(row["sides"][side]["cpu_s"]) for side in ("ours", "transformers"))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:4]]
    assert lines[0][:10] == [
        *("nano", "fp32", "1", "grouped_mm", "3000 (2000-4000)", "3000 (2000-4000)"),
        *("1000 (1000-1000)", "3000 (3000-3000)", "1.00", "3.00"),
    ]
    assert lines[1][:4] == ["nano", "bf16", "1", row["peer"]]
    assert lines[1][9] == f"{theirs / ours:.2f}"
