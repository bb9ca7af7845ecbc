"""Starting ranks: what they get, how their end is passed on, and that none of them is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched through /proc")

# One rank: says who it is, then does what the test asks of rank 1, while rank 0 waits.
RANK = """
import os, pathlib, signal, sys, time
from nanopar_sft import launcher

launcher.end_with_launcher()
behaviour, folder = sys.argv[1:]
rank = os.environ["RANK"]
said = [str(os.getpid()), os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"]]
said.append(os.environ["MALLOC_MMAP_MAX_"])
pathlib.Path(folder, rank + ".part").write_text(" ".join(said))
os.rename(os.path.join(folder, rank + ".part"), os.path.join(folder, rank))
while len([name for name in os.listdir(folder) if name in "01"]) < 2:
    time.sleep(0.01)
if behaviour == "fine":
    sys.exit(0)
if rank == "1" and behaviour == "bad input":
    sys.exit(2)
if rank == "1" and behaviour == "raises":
    raise RuntimeError("the fault of rank 1")
if rank == "1" and behaviour == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""
PARENT = "import sys; from nanopar_sft import launcher; sys.exit(launcher.launch(2, sys.argv[1:], module='one_rank'))"


class Started:
    """A launcher with two ranks in a process of its own."""

    def __init__(self, tmp_path: Path, behaviour: str, environment: dict[str, str]) -> None:
        self.folder = tmp_path / "ranks"
        self.folder.mkdir()
        (tmp_path / "one_rank.py").write_text(RANK)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path), **environment}
        self.tmp_path = tmp_path
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, behaviour, str(self.folder)],
            env={name: value for name, value in environment.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def facts(self) -> list[list[str]]:
        """What both ranks said, once they have: pid, world size, local rank, threads."""
        files = [self.folder / "0", self.folder / "1"]
        wait_until(lambda: all(file.exists() for file in files))
        return [file.read_text().split() for file in files]

    def finish(self) -> tuple[int, str]:
        """Exit status and standard error of the launcher; fails if a rank outlives it."""
        pids = [int(fact[0]) for fact in self.facts()]
        out, err = self.process.communicate(timeout=60)
        assert out == ""
        wait_until(lambda: not any(map(running, pids)))
        return self.process.returncode, err


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Started]:
    return lambda behaviour, **environment: Started(tmp_path, behaviour, environment)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_ranks_that_end_well(start: Callable[..., Started]) -> None:
    run = start("fine", OMP_NUM_THREADS="")
    facts = run.facts()
    assert [fact[1:3] for fact in facts] == [["2", "0"], ["2", "1"]]
    cores = len(os.sched_getaffinity(0))
    assert {fact[3] for fact in facts} == {str(max(1, cores // 2))}
    assert {fact[4] for fact in facts} == {"0"}  # malloc keeps freed memory
    assert run.finish() == (0, "")
    assert not list(run.tmp_path.glob("nanopar-sft-*"))  # torchrun's folder of logs is gone


def test_bad_input_in_one_rank(start: Callable[..., Started]) -> None:
    run = start("bad input", OMP_NUM_THREADS="7", MALLOC_MMAP_MAX_="65536")
    assert {tuple(fact[3:]) for fact in run.facts()} == {("7", "65536")}  # what the user has set stays
    assert run.finish() == (2, "")


def test_an_error_in_one_rank(start: Callable[..., Started]) -> None:
    status, err = start("raises").finish()
    assert status == 1
    assert err.count("Traceback") == 1
    assert err.splitlines()[-1] == "RuntimeError: the fault of rank 1"


def test_a_rank_that_is_killed(start: Callable[..., Started]) -> None:
    assert start("killed").finish() == (1, "nanopar-sft: rank 1 was killed by SIGKILL\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_rank_outlives_the_launcher(start: Callable[..., Started], number: signal.Signals, status: int) -> None:
    run = start("wait")
    assert all(running(int(fact[0])) for fact in run.facts())
    run.process.send_signal(number)
    assert run.finish() == (status, "")
