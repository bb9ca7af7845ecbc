"""The benchmark of collectives: every row is there and its bytes are the necessary ones; times are not judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "collectives.py"
OPS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/io")


def sent(op: str, ranks: int, whole: float) -> float:
    """What a rank must send at least, the source for broadcast."""
    part = whole / ranks
    return {"all_reduce": 2 * (whole - part), "broadcast": (ranks - 1) * whole}.get(op, whole - part)


def bench(*arguments: object) -> str:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout


def test_all_rows_with_the_bytes_of_the_model(tmp_path: Path) -> None:
    printed = bench("--ranks", 2, 4, "--mib", 0.25, 0.5, "--repeats", 1, "--output", tmp_path)
    assert printed == (tmp_path / "collectives.md").read_text()
    report = json.loads((tmp_path / "collectives.json").read_text())
    assert "benchmarks/collectives.py --ranks 2 4" in report["command"]
    assert set(report["versions"]) == {"python", "torch", "nanopar-core"}
    assert report["machine"]["cores"] >= 1
    rows = report["rows"]
    expected = [(n, d, m, op) for n in (2, 4) for d in ("fp32", "bf16") for m in (0.25, 0.5) for op in OPS]
    assert [(row["ranks"], row["dtype"], row["mib"], row["op"]) for row in rows] == expected
    for row, line in zip(rows, printed.splitlines()[2:], strict=True):
        assert [cell.strip() for cell in line.strip("|").split("|")][1:3] == [row["op"], row["dtype"]]
        necessary = sent(row["op"], row["ranks"], row["mib"] * 2**20)
        assert row["model_sent"] == necessary
        assert row["ours_sent"] == pytest.approx(necessary, rel=0.05)
        if row["op"] != "broadcast":  # gloo's reduce_scatter is an all-reduce underneath
            factor = 2 if row["op"] == "reduce_scatter" else 1
            assert row["torch_sent"] == pytest.approx(factor * necessary, rel=0.05)
        assert min(row["ours_ms"], row["torch_ms"], row["memcpy_ms"]) > 0.0


def test_parts_of_unequal_length(tmp_path: Path) -> None:
    bench("--ranks", 2, "--dtypes", "bf16", "--mib", 0.25, "--repeats", 1, "--odd", "--output", tmp_path)
    rows = json.loads((tmp_path / "collectives.json").read_text())["rows"]
    assert [row["op"] for row in rows] == OPS
    assert [row["op"] for row in rows if row["torch_ms"] is None] == ["reduce_scatter", "all_gather"]  # gloo refuses
    for row in rows:
        assert row["mib"] == 0.25 - 2 / 2**20
        assert row["ours_sent"] == pytest.approx(sent(row["op"], 2, 2**18), rel=0.05)
