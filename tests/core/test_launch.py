"""launch(): joining a job, leaving it, and how the failure of one rank ends all of them."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import nanopar_core as core
from nanopar_core import testing

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AGENT = "TORCHELASTIC_USE_AGENT_STORE"

FORKSERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, AGENT):
        monkeypatch.delenv(name, raising=False)


# --------------------------------------------------------------------------------------------- ranks as processes


def rank_process(
    rank: int, size: int, port: int, agent: bool, folder: str, body: Callable[..., None], who: int
) -> None:
    """One rank as torchrun would start it, its stderr in a file."""
    descriptor = os.open(os.path.join(folder, f"{rank}.err"), os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    names = (rank, size, rank, size, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(ENVIRONMENT, names, strict=True)})
    if agent:
        os.environ[AGENT] = "True"
    torch.set_num_threads(1)
    with core.launch(device="cpu", timeout_s=60) as world:
        axis = core.Mesh(dp=world.size).dp
        core.barrier(axis)  # all are there
        body(world, axis, who)


@dataclass
class Ended:
    """How the ranks ended: exit statuses, what they printed on stderr, and how long it took."""

    statuses: list[int | None]
    stderr: list[str]
    seconds: float


def free_port() -> int:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def start(tmp_path: Path, body: Callable[..., None], who: int, size: int = 2, agent: bool = True) -> Ended:
    """Run ``body`` on ranks of their own, which nobody ends but themselves; ``who`` is the rank that misbehaves."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if agent else None
    port = free_port() if store is None else store.port
    started = time.monotonic()
    ranks = [
        FORKSERVER.Process(target=rank_process, args=(rank, size, port, agent, str(tmp_path), body, who))
        for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=30)
        stderr = [(tmp_path / f"{rank}.err").read_text() for rank in range(size)]
        return Ended([process.exitcode for process in ranks], stderr, time.monotonic() - started)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def then_reduce(axis: core.Axis) -> None:
    for _ in range(3):
        core.all_reduce(torch.ones(2), axis)


def raises(world: core.World, axis: core.Axis, who: int) -> None:
    if world.rank == who:
        raise ValueError("the fault\nin two lines")
    then_reduce(axis)


def raises_while_others_compute(world: core.World, axis: core.Axis, who: int) -> None:
    if world.rank == who:
        raise ValueError("the fault")
    while True:
        sum(range(1000))


def raises_late_while_others_have_failed(world: core.World, axis: core.Axis, who: int) -> None:
    if world.rank == who:
        raise ValueError("the fault")
    try:
        then_reduce(axis)
    except RuntimeError:
        raise OSError("an echo") from None


def exits(world: core.World, axis: core.Axis, who: int) -> None:
    if world.rank == who:
        sys.exit(3)
    then_reduce(axis)


def interrupted(world: core.World, axis: core.Axis, who: int) -> None:
    if world.rank == who:
        raise KeyboardInterrupt
    then_reduce(axis)


def killed(world: core.World, axis: core.Axis, who: int) -> None:
    if world.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    then_reduce(axis)


def fine(world: core.World, axis: core.Axis, who: int) -> None:
    then_reduce(axis)
    if world.rank == who:
        time.sleep(0.3)  # the others leave first
        sys.exit(0)


@pytest.mark.parametrize("agent", [True, False], ids=["torchrun's store", "rank 0's store"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_raises_ends_all_and_is_the_only_one_with_a_traceback(
    tmp_path: Path, who: int, agent: bool
) -> None:
    ended = start(tmp_path, raises, who, agent=agent)
    assert ended.statuses == [1, 1]
    assert ended.seconds < 15
    assert ended.stderr[who].count("Traceback") == 1
    assert "ValueError: the fault\nin two lines" in ended.stderr[who]
    other = ended.stderr[1 - who]
    if agent or who == 1:  # a store that rank 0 holds ends with rank 0, and its last word may be lost
        assert "Traceback" not in other
        assert f"rank {1 - who} stops because rank {who} failed: ValueError: the fault\n" in other


def test_among_four_ranks_only_one_prints_a_traceback(tmp_path: Path) -> None:
    ended = start(tmp_path, raises_late_while_others_have_failed, 2, size=4)
    assert ended.statuses == [1] * 4
    for rank, stderr in enumerate(ended.stderr):
        assert ("Traceback" in stderr) == (rank == 2)
        assert ("stops because rank 2 failed: ValueError: the fault" in stderr) == (rank != 2)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_computes_is_ended_by_the_watching_thread(tmp_path: Path, who: int) -> None:
    ended = start(tmp_path, raises_while_others_compute, who)
    assert ended.statuses == [1, 1]
    assert ended.seconds < 15
    assert ended.stderr[who].count("Traceback") == 1
    assert f"rank {1 - who} stops because rank {who} failed: ValueError: the fault" in ended.stderr[1 - who]
    assert "Traceback" not in ended.stderr[1 - who]


def test_an_exit_with_a_status_ends_the_others(tmp_path: Path) -> None:
    ended = start(tmp_path, exits, 1)
    assert ended.statuses == [1, 3]
    assert ended.seconds < 15
    assert "rank 0 stops because rank 1 failed: it exited with status 3" in ended.stderr[0]
    assert "Traceback" not in "".join(ended.stderr)


def test_an_interrupted_rank_counts_as_the_one_that_failed(tmp_path: Path) -> None:
    ended = start(tmp_path, interrupted, 1)
    assert ended.statuses == [1, 1]
    assert "rank 0 stops because rank 1 failed: KeyboardInterrupt" in ended.stderr[0]
    assert "Traceback" not in ended.stderr[0]


@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_rank_ends_the_others(tmp_path: Path, who: int) -> None:
    ended = start(tmp_path, killed, who)
    assert ended.statuses[who] == -signal.SIGKILL
    assert ended.statuses[1 - who] == 1
    assert ended.seconds < 15
    assert ended.stderr[who] == ""


@pytest.mark.parametrize("agent", [True, False], ids=["torchrun's store", "rank 0's store"])
def test_leaving_in_peace_is_silent(tmp_path: Path, agent: bool) -> None:
    ended = start(tmp_path, fine, 0, agent=agent)  # rank 0, which may hold the store, leaves last
    assert ended.statuses == [0, 0]
    assert [text for text in ended.stderr if "Traceback" in text or "stops" in text] == []


SCRIPT = """
import torch, nanopar_core as core
with core.launch(device="cpu", timeout_s=60) as world:
    mesh = core.Mesh(dp=world.size)
    core.barrier(mesh.dp)
    if world.rank == 1:
        raise ValueError("the fault of rank 1")
    core.all_reduce(torch.ones(2), mesh.dp)
"""


def test_under_torchrun_only_the_failed_rank_prints_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    ranks = [line for line in ended.stderr.splitlines() if line.startswith("[rank")]
    assert sum("Traceback" in line for line in ranks) == 1
    assert "[rank1]: ValueError: the fault of rank 1" in ranks
    assert not any(line.startswith("[rank0]") for line in ranks)


# ------------------------------------------------------------------------------------------------- several launches


def launch_three_times(rank: int, size: int, port: int, folder: str) -> None:
    names = (rank, size, rank, size, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(ENVIRONMENT, names, strict=True)})
    os.environ[AGENT] = "True"
    sums = []
    for turn in range(3):
        with core.launch(device="cpu", timeout_s=20) as world:
            mesh = core.Mesh(dp=world.size)
            turned = mesh.subset([1, 0], "turned")
            assert turned is not None
            sums.append(int(core.all_reduce(torch.tensor([turn + rank]), mesh.dp).item()))
            sums.append(int(core.all_reduce(torch.tensor([turn + rank]), turned).item()))
    Path(folder, str(rank)).write_text(str(sums))


def test_one_process_may_launch_several_times(tmp_path: Path) -> None:
    """torch names its groups from zero again, so a second job must not find the keys of the first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [FORKSERVER.Process(target=launch_three_times, args=(r, 2, store.port, str(tmp_path))) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=30)
        process.kill()
        process.join()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[1, 1, 3, 3, 5, 5]"] * 2


# ------------------------------------------------------------------------------------------------------ one process


@pytest.fixture
def threads_end() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 3
    while any(thread.name == "nanopar-alarm" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_plain_process(threads_end: None) -> None:
    for _ in range(2):
        with core.launch(device="cpu") as world:
            assert world == core.World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
            assert dist.is_initialized()
            assert dist.get_backend() == "gloo"
            assert core.all_reduce(torch.ones(2), core.Mesh(always_communicate=True).dp).tolist() == [1.0, 1.0]
        assert not dist.is_initialized()


def test_an_exception_in_one_process_passes_through(threads_end: None) -> None:
    with pytest.raises(KeyError, match="mine"), core.launch(device="cpu"):
        raise KeyError("mine")
    assert not dist.is_initialized()
    with pytest.raises(SystemExit), core.launch(device="cpu"):
        sys.exit(2)
    assert not dist.is_initialized()


def test_a_group_that_exists_is_refused() -> None:
    with core.launch(device="cpu"):
        with pytest.raises(RuntimeError, match=r"use nanopar_core\.Mesh on it"), core.launch(device="cpu"):
            pass
        assert dist.is_initialized()  # the outer one is unharmed


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "two"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
    ],
)
def test_an_incomplete_environment_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message), core.launch(device="cpu"):
        pass
    assert not dist.is_initialized()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'cpu' or 'cuda', not 'tpu'"), core.launch(device="tpu"):
        pass


@pytest.mark.parametrize("local_size", ["4", None])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, local_size: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    if local_size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    with pytest.raises(ValueError, match="4 ranks on this machine but 2 GPUs: start at most 2 or use device='cpu'"):
        core.launch().__enter__()
    assert not dist.is_initialized()


# ------------------------------------------------------------------------------------------- what every rank is given


def given() -> dict[str, Any]:
    world_options = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    return {
        "torch": torch.rand(3).tolist(),
        "python": random.random(),
        "seed": torch.initial_seed(),
        "timeout": world_options._timeout,
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
    }


def test_ranks_have_equal_seeds_and_the_time_out_asked_for() -> None:
    first, second = testing.run(2, given, timeout_s=55.0)
    assert (first["rank"], second["rank"], first["size"]) == (0, 1, 2)
    assert first["timeout"] == timedelta(seconds=55)
    random.seed(0)
    torch.manual_seed(0)
    for seen in (first, second):
        assert seen["seed"] == 0
    assert first["torch"] == second["torch"] == torch.rand(3).tolist()
    assert first["python"] == second["python"] == random.random()


def test_another_seed() -> None:
    with core.launch(device="cpu", seed=11):
        drawn = torch.rand(2).tolist(), random.random()
    torch.manual_seed(11)
    random.seed(11)
    assert drawn == (torch.rand(2).tolist(), random.random())
