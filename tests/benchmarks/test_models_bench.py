"""The benchmark of models: every row is there and says what it measured; times are not judged."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "models.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/cpuinfo")
pytest.importorskip("transformers")


def bench(dtype: str, folder: Path) -> str:
    arguments = ["--dtypes", dtype, "--models", "nano", "--threads", "1", "--pairs", "2", "--no-compile"]
    command = [sys.executable, str(PROGRAM), *arguments, "--output", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=140).stdout


def test_a_row_of_each_dtype(tmp_path: Path) -> None:
    bench("fp32", tmp_path)
    printed = bench("bf16", tmp_path)  # the row of the first run stays
    assert printed == (tmp_path / "models.md").read_text()
    report = json.loads((tmp_path / "models.json").read_text())
    assert report["command"].startswith("hatch run bench:models --dtypes bf16 --models nano")
    assert set(report["versions"]) == {"python", "torch", "transformers", "nanopar-models"}
    assert report["machine"]["cores"] >= 1
    rows = report["rows"]
    assert [(row["model"], row["dtype"], row["threads"]) for row in rows] == [("nano", "fp32", 1), ("nano", "bf16", 1)]
    for row, line in zip(rows, printed.splitlines()[2:4], strict=True):
        assert set(row["tried"]) == {"eager", "batched_mm", "grouped_mm"}
        figures = {name: seconds for name, seconds in row["tried"].items() if isinstance(seconds, float)}
        assert row["peer"] == min(figures, key=figures.__getitem__)
        assert set(row["sides"]) == {"ours", "transformers"}
        for side in row["sides"].values():
            assert len(side["wall_s"]) == len(side["cpu_s"]) == 2
            assert min(side["wall_s"]) >= 0.9 * min(side["cpu_s"]) > 0  # one thread
            assert 0.1 < side["other_share"] < 0.95
        ours, theirs = (statistics.median(row["sides"][side]["cpu_s"]) for side in ("ours", "transformers"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:4] == ["nano", row["dtype"], "1", row["peer"]]
        assert cells[9] == f"{theirs / ours:.2f}"
