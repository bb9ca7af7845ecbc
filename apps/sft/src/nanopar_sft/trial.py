"""One candidate in processes of its own, seen from the command: start, watch, collect, and end it where it hangs.

    compare --Popen--> python -m nanopar_sft.measure NAME FOLDER --launcher--> ranks
            <--------- FOLDER/progress (is it alive?), rank-N.json, error-N.txt, log.txt (what it printed)

Nothing survives a candidate: no memory, no group, no thread. None can hang the command: a collective that a rank missed
fails after ``timeout_s``, and processes that do nothing for that long (and a little more) are killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nanopar_sft.config import Config
from nanopar_sft.measure import CONFIG, PROGRESS, Report

POLL_S = 0.2
GRACE_S = 30.0  # beyond timeout_s, so that the ranks can say themselves what is wrong


class TrialError(Exception):
    """A candidate did not come to its end; the message says why, ``log`` is what its processes printed."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def run_trial(name: str, config: Config, on_progress: Callable[[int], None]) -> list[Report]:
    """Measure one candidate (or the reference) and return what its ranks saw.

    Args:
        name: as ``measure`` understands it.
        config: what to measure, and how often.
        on_progress: told the number of things done, now and then.

    Raises:
        TrialError: it failed, or hung.
    """
    with tempfile.TemporaryDirectory(prefix="nanopar-compare-") as scratch:
        folder = Path(scratch)
        config.save(folder / CONFIG)
        log = folder / "log.txt"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "nanopar_sft.measure", name, str(folder), str(os.getpid())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                hung = _watch(process, folder / PROGRESS, config.timeout_s + GRACE_S, on_progress)
            finally:
                if process.poll() is None:
                    process.kill()  # its ranks end with it
                    process.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        if hung:
            raise TrialError(f"nothing happened for {config.timeout_s + GRACE_S:g} s, so it was ended", text)
        if process.returncode:
            raise TrialError(_reason(folder, text, process.returncode), text)
        return [Report.read(file) for file in sorted(folder.glob("rank-*.json"))]


def _watch(process: subprocess.Popen[bytes], progress: Path, patience_s: float, tell: Callable[[int], None]) -> bool:
    """Wait for the end; True where nothing has happened for too long."""
    done, changed = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_S)
        now = progress.stat().st_size if progress.exists() else 0
        if now != done:
            done, changed = now, time.monotonic()
            tell(done)
        elif time.monotonic() - changed > patience_s:
            return True
    return False


def _reason(folder: Path, log: str, status: int) -> str:
    """One line: the error of the rank that failed first, else the exit status and the last line that was printed."""
    errors = sorted(folder.glob("error-*.txt"), key=lambda file: file.stat().st_mtime_ns)
    if errors:
        rank = errors[0].stem.removeprefix("error-")
        return f"rank {rank}: {' '.join(errors[0].read_text(encoding='utf-8').split())}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ending = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{ending}; the last it printed: {lines[-1]}" if lines else ending
