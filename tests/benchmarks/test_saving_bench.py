"""The benchmark of saving runs; times are not judged."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "saving.py"


def test_stall_and_copy_are_measured() -> None:
    command = [sys.executable, str(PROGRAM), "--width", "32", "--layers", "3", "--times", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "MiB a rank: stall" in done.stdout
    assert "stall / copy: " in done.stdout
