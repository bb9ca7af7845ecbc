"""The command ``trace`` on two ranks: the table, the totals, and the timeline files."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_trace_of_two_ranks(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    arguments = "trace --nproc 2 --layers 1 --train-rows 32 --batch-size 8 --microbatches 2 --output-dir out"
    command = [sys.executable, "-m", "nanopar_sft", *arguments.split()]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    by_op = {row[0]: row for row in rows}
    # No-sync holds the first micro-batch back: one reduction of the one bucket, and one exchange of two float64.
    assert by_op["all_reduce"][1:4] == ["dp", "gradients", "1"]
    assert by_op["all_gather"][1:] == ["dp", "metrics", "1", "32", "32"]
    bucket = int(by_op["all_reduce"][4].replace(",", ""))
    assert by_op["all"][3:] == ["2", f"{bucket + 32:,}", f"{bucket + 32:,}"]
    for rank in range(2):
        events = json.loads((tmp_path / "out" / "trace" / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert names.count("nanopar all_reduce dp gradients") == 1
        assert any(name.startswith("gloo:") for name in names)  # while it runs
        assert any("aten::mm" in name for name in names)  # beside the computation
