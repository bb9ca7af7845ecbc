"""What happens to a run happens to real processes: they are killed, told to stop, cut off, and find the disk full."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks import kills

import nanopar_core as core
from nanopar_core import checkpoint
from nanopar_core.testing import run as run_ranks
from nanopar_sft import metrics
from nanopar_sft.checkpoints import all_checkpoints

pytestmark = pytest.mark.long

SMALL = [
    *("--train-rows", "48", "--batch-size", "8", "--layers", "1", "--warmup", "0", "--plot", "false"),
    *("--eval-rows", "2", "--max-new-tokens", "0"),
]
TIMEOUT_S = 8
TWO_HOSTS = Path(__file__).parents[3] / "shared" / "tools" / "two_hosts.sh"


def train(folder: Path, *arguments: str, limit_bytes: int | None = None, steps: int = 4) -> subprocess.Popen[str]:
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    command = [sys.executable, "-m", "nanopar_sft", "train", *SMALL, "--steps", str(steps), *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [*command, "--output-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=limit,  # noqa: PLW1509 - one thread here
    )


def finish(run: subprocess.Popen[str], status: int = 0) -> str:
    """What a run said on stderr, once it has ended with this status."""
    _, said = run.communicate(timeout=100)
    assert run.returncode == status, said
    return said


def test_runs_whose_ranks_are_killed_resume_by_themselves(tmp_path: Path) -> None:
    """Three of what ``benchmarks/kills.py`` does a hundred times."""
    expected, duration_s = kills.uninterrupted(tmp_path / "whole")
    assert len(expected) == 8
    for number in range(3):
        outcome = kills.kill_once(tmp_path / str(number), expected, duration_s, seed=number)
        assert not outcome.problem, (outcome.problem, (tmp_path / f"{number}.log").read_text()[-3000:])


def out_of_memory() -> None:
    axis = core.Mesh(dp=2).dp
    if axis.rank == 1:
        torch.empty(2**55, dtype=torch.uint8)
    core.barrier(axis)


def test_a_rank_that_is_out_of_memory_ends_all() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="memory") as caught:
        run_ranks(2, out_of_memory, timeout_s=60)
    assert time.monotonic() - began < 30
    assert "raised on rank 1 of 2" in caught.value.__notes__[-1]


def test_sigterm_saves_and_ends_and_the_run_goes_on(tmp_path: Path) -> None:
    run = train(tmp_path, "--nproc", "2", "--tp", "2", steps=100_000)
    deadline = time.monotonic() + 100
    while len(metrics.read(tmp_path / metrics.METRICS)) < 2:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[1]
        time.sleep(0.2)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    [path] = all_checkpoints(tmp_path)
    checkpoint.verify(path)
    step = checkpoint.read_extra(path)["step"]
    assert f"stopped by SIGTERM after step {step}; go on with --resume auto" in said
    again = train(tmp_path, "--resume", "auto", steps=step + 1)
    finish(again)
    assert metrics.read(tmp_path / metrics.METRICS)[-1]["step"] == step + 1


def test_a_full_disk_ends_no_training_and_spoils_no_checkpoint(tmp_path: Path) -> None:
    first = train(tmp_path, "--save-every", "2", steps=2)
    finish(first)
    shutil.rmtree(tmp_path / "checkpoints" / "step-000004", ignore_errors=True)
    run = train(tmp_path, "--save-every", "2", "--resume", "auto", limit_bytes=400_000)  # of a file
    _, said = run.communicate(timeout=100)
    assert "WARNING: checkpoint" in said, said
    assert "step-000004 was not written: rank 0:" in said
    assert "training goes on, earlier checkpoints are as they were" in said
    assert metrics.read(tmp_path / metrics.METRICS)[-1]["step"] == 4, "trained to the end"
    assert run.returncode == 1, "the model itself could not be saved"
    assert "was not written" in said.splitlines()[-1] or "File too large" in said
    [path] = all_checkpoints(tmp_path)
    checkpoint.verify(path)


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("a file where the directory should be")
    run = train(tmp_path / "out", "--save-every", "2", "--nproc", "2")
    _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert "WARNING: checkpoint" in said
    assert "Not a directory" in said
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path) -> None:
    first = train(tmp_path, "--save-every", "2")
    finish(first)
    newest, older = all_checkpoints(tmp_path)
    file = next(newest.glob("rank-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1  # one bit, which no size tells
    file.write_bytes(data)
    again = train(tmp_path, "--resume", "auto", steps=5)
    _, said = again.communicate(timeout=100)
    assert again.returncode == 0, said
    assert f"WARNING: passed over: checkpoint {newest} is damaged: {file.name} is not what was written" in said
    assert f"resumed from {older} after step 2" in said
    assert [record["step"] for record in metrics.read(tmp_path / metrics.METRICS)] == [1, 2, 3, 4, 5]


needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or not TWO_HOSTS.is_file(),
    reason="two hosts on one machine need root, iproute2 and ../shared/tools/two_hosts.sh",
)


@needs_hosts
def test_a_link_between_two_hosts_is_cut_and_the_run_goes_on_later(tmp_path: Path) -> None:
    """Both sides end within the time-out, saying who is missing; then two hosts go on, and then one host alone."""
    environment = {**os.environ, "NETNS_PREFIX": f"f{os.getpid() % 100000}", "PORT": "29655"}
    environment |= {"LOGA": str(tmp_path / "a.log"), "LOGB": str(tmp_path / "b.log")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

    def hosts(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", str(TWO_HOSTS), *arguments], env=environment, stdout=subprocess.DEVNULL)

    def run(steps: int) -> subprocess.Popen[bytes]:
        out = (
            "--output-dir",
            str(tmp_path / "out"),
            "--save-every",
            "2",
            "--resume",
            "auto",
            "--timeout-s",
            str(TIMEOUT_S),
        )
        return hosts("torchrun", "-m", "nanopar_sft", "train", *SMALL, "--steps", str(steps), *out)

    def steps() -> int:
        return len(metrics.read(tmp_path / "out" / metrics.METRICS))

    try:
        assert hosts("up").wait() == 0
        first = run(100_000)
        deadline = time.monotonic() + 100
        while steps() < 4:
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "a.log").read_text()
            time.sleep(0.2)
        assert hosts("cut").wait() == 0
        began, said = time.monotonic(), ["", ""]
        while not all(f"[rank{rank}]: RuntimeError" in text for rank, text in enumerate(said)):
            assert time.monotonic() - began < TIMEOUT_S + 40, said
            said = [(tmp_path / name).read_text() for name in ("a.log", "b.log")]
            time.sleep(0.2)
        assert re.search(r"rank 1: (gave no sign: dead, or stopped|#\d+ all_reduce)", said[0]), said[0]
        assert "no word from the other ranks: the machine that holds the job's store, or the link to it" in said[1]
        assert hosts("down").wait() == 0  # the agents of torchrun wait longer
        first.wait(timeout=30)
        assert hosts("up").wait() == 0
        before = steps() + 1
        assert run(before).wait(timeout=120) == 0, (tmp_path / "a.log").read_text()
        alone = train(tmp_path / "out", "--resume", "auto", steps=before + 1)  # fewer hosts
        finish(alone)
        assert json.loads((tmp_path / "out" / metrics.METRICS).read_text().splitlines()[-1])["step"] == before + 1
    finally:
        hosts("down").wait()
