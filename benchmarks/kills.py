"""Kill ranks at random moments and see the run resume by itself: ``python benchmarks/kills.py --times 100``.

Each time torchrun trains a small model on two ranks with a checkpoint at every other step, and kill -9 ends one or two
ranks, drawn at random, at random moments: while torch is imported, in a step, while a checkpoint is written. torchrun
starts the ranks anew (``--max-restarts``), ``resume=auto`` takes the newest whole checkpoint. The run must end with
status 0 and the losses of an uninterrupted run, to the last bit, and every directory that is called a checkpoint must
be one.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nanopar_core import checkpoint
from nanopar_sft import metrics
from nanopar_sft.checkpoints import all_checkpoints

RUN = (
    "--steps 8 --train-rows 48 --batch-size 8 --layers 1 --warmup 0 --plot false --eval-rows 2 --max-new-tokens 0 "
    "--save-every 2 --resume auto --zero 2 --timeout-s 60"
)
RESTARTS = 5
KILLS = 2  # in one run


@dataclass
class Outcome:
    """What became of one run.

    Attributes:
        kills: ranks that were killed.
        problem: what is wrong, or nothing.
    """

    kills: int
    problem: str


def start(folder: Path) -> subprocess.Popen[str]:
    """Two ranks under torchrun."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(RESTARTS)]
    command = [sys.executable, "-m", *launcher, "-m", "nanopar_sft", "train", *RUN.split(), "--output-dir", str(folder)]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment, start_new_session=True)


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """The processes that train now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if parent == run.pid:
            found.append(int(path.parent.name))
    return found


def losses_of(folder: Path) -> list[float]:
    """By step."""
    return [record["loss"] for record in metrics.read(folder / metrics.METRICS)]


def kill_once(folder: Path, expected: list[float], duration_s: float, seed: int, limit_s: float = 240.0) -> Outcome:
    """One run with kills."""
    rng = random.Random(seed)
    moments = sorted(rng.uniform(0.1, 1.0) * duration_s for _ in range(rng.randint(1, KILLS)))
    run, began, kills = start(folder), time.monotonic(), 0
    try:
        while run.poll() is None:
            if time.monotonic() - began > limit_s:
                return Outcome(kills, f"still running after {limit_s:g} s")
            if moments and time.monotonic() - began > moments[0] and (ranks := ranks_of(run)):
                moments.pop(0)
                try:
                    os.kill(rng.choice(ranks), signal.SIGKILL)
                    kills += 1
                except ProcessLookupError:
                    pass
            time.sleep(0.02)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    if run.returncode:
        return Outcome(kills, f"exit status {run.returncode}")
    if losses_of(folder) != expected:
        return Outcome(kills, f"losses {losses_of(folder)} instead of {expected}")
    found = all_checkpoints(folder)
    try:
        for path in found:
            checkpoint.verify(path)
    except ValueError as error:
        return Outcome(kills, str(error))
    return Outcome(kills, "" if len(found) == len(expected) // 2 else f"only {len(found)} checkpoints")


def uninterrupted(folder: Path) -> tuple[list[float], float]:
    """Losses, and how long the run takes."""
    began = time.monotonic()
    run = start(folder)
    if run.wait(timeout=240):
        raise RuntimeError((folder.parent / f"{folder.name}.log").read_text())
    return losses_of(folder), time.monotonic() - began


def main(arguments: list[str] | None = None) -> int:
    """Report how many runs ended as they should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=100, help="runs [100]")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments [0]")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        expected, duration_s = uninterrupted(Path(folder) / "whole")
        kills, untouched, failed = 0, 0, 0
        for number in range(options.times):
            outcome = kill_once(Path(folder) / str(number), expected, duration_s, options.seed + number)
            kills += outcome.kills
            untouched += not outcome.kills
            if outcome.problem:
                failed += 1
                print(f"run {number}: {outcome.problem}", flush=True)
                print((Path(folder) / f"{number}.log").read_text()[-3000:], flush=True)
            shutil.rmtree(Path(folder) / str(number), ignore_errors=True)
    spared = f", {untouched} of them too late to be killed" if untouched else ""
    print(f"{options.times} runs{spared}, {kills} ranks killed: {options.times - failed} ended as if nobody had been")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
