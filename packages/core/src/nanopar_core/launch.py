"""``launch()``: from torchrun's environment (or none) to a process group and back, whatever happens in between.

    rank 1 raises --> writes its name into the job's store (first one wins) --> its groups end --> traceback, status 1
    other ranks   --> their collectives break, or the watching thread reads the store --> one line, status 1
    all ranks     --> leave in the store at which collective they are --> below rank 1's traceback

So all ranks end within seconds, and only the rank that failed prints a traceback. The watching thread matters where a
rank would not notice by itself: it computes, or waits for a third rank.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from nanopar_core.debug import Comparison
from nanopar_core.flight_recorder import FlightRecorder
from nanopar_core.ledger import observing

GRACE_S = 3.0  # how long a rank may take to end by itself after a failure elsewhere or its own
POLL_S = 0.5
STORE_S = 5.0  # a store that does not answer for so long is gone
END_S = 20.0  # a rank that has failed ends at the latest after this, whatever blocks
POSITIONS_S = 1.5  # how long a failed rank waits for the others to say where they are

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all of the job: ``rank`` of ``size``, ``local_rank`` on its machine, and its device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device


class PeerFailure(SystemExit):
    """Ends this rank with status 1 because another rank failed first; the message says which and why."""

    def __init__(self, message: str) -> None:
        super().__init__(1)
        self.message = message


@contextmanager
def launch(
    *,
    timeout_s: float = 300.0,
    seed: int = 0,
    device: str | None = None,
    debug: bool | None = None,
    debug_timeout_s: float = 10.0,
) -> Iterator[World]:
    """Join the job that torchrun describes in the environment, or be a job of one process.

    Sets the device and the seeds of Python and torch (the same on every rank), makes the process group (gloo for CPU
    tensors, NCCL for CUDA tensors) and destroys it at the end, when all ranks have come to their end. When a rank fails
    all ranks end within seconds with a non-zero status, and that rank's traceback is the only one.

    Args:
        timeout_s: seconds after which a collective that does not finish raises, in the world and in every mesh axis.
        seed: for ``random`` and ``torch``.
        device: "cpu" or "cuda"; by default CUDA where a GPU exists.
        debug: compare every collective over its ranks before it is issued (see debug.py); by default where the
            environment has ``NANOPAR_DEBUG=1``.
        debug_timeout_s: in debug mode, seconds after which a rank that does not come to a collective is named.

    Raises:
        ValueError: more ranks on this machine than GPUs, or an incomplete environment.
        RuntimeError: a process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group exists already: use nanopar_core.Mesh on it, without launch()")
    world = _world_from_environment(device)
    random.seed(seed)
    torch.manual_seed(seed)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    store = _own_store(world, timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    recorder = FlightRecorder()
    alarm = _Alarm(world, store, recorder) if world.size > 1 else None
    if debug is None:
        debug = os.environ.get("NANOPAR_DEBUG", "0") not in ("", "0")
    try:
        with ExitStack() as observers:
            observers.enter_context(observing(recorder))
            if debug and world.size > 1:
                comparison = Comparison(_own_connection(store), world.rank, recorder, debug_timeout_s)
                observers.enter_context(observing(comparison))
                yield world
                comparison.flush()  # only where all went well: a failure must be announced at once
            else:
                yield world
        if alarm is not None:
            alarm.wait_for_all(timeout_s)
    except SystemExit as error:
        if alarm is not None and error.code in (0, None):
            alarm.wait_for_all(timeout_s)
        elif alarm is not None:
            alarm.sound(f"it exited with status {error.code}")
        raise
    except (Exception, KeyboardInterrupt) as error:
        if alarm is not None and not alarm.sound(_summary(error)):
            message = f"rank {world.rank} stops because {alarm.reason()}"
            print(message, file=sys.stderr, flush=True)
            raise PeerFailure(message) from None
        if alarm is not None:
            error.add_note(alarm.positions())  # shown below the traceback
        raise
    finally:
        if alarm is not None:
            alarm.stop()
        dist.destroy_process_group()
        if alarm is not None:
            alarm.disarm()


def _own_store(world: World, timeout: timedelta) -> Store:
    """The job's key-value store, under a prefix of its own for every launch: a second one must not find old keys."""
    if "RANK" not in os.environ:
        return HashStore()
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    launches = store.add(f"nanopar/{attempt}/launches of rank {world.rank}", 1)
    return PrefixStore(f"nanopar/{attempt}/{launches}", store)


def _own_connection(store: Store) -> Store:
    """A second connection: the process group's own is busy while a collective waits."""
    connection: Store = store.clone()  # type: ignore[attr-defined]
    return connection


def _world_from_environment(device: str | None) -> World:
    if "RANK" not in os.environ:
        rank = local_rank = 0
        size = local_size = 1
    else:
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        except (KeyError, ValueError) as error:
            raise ValueError(f"RANK is set but the rest of torchrun's environment is not usable: {error}") from None
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', not {device!r}")
    if kind == "cpu":
        return World(rank, size, local_rank, torch.device("cpu"))
    gpus = torch.cuda.device_count()
    if local_size > gpus:
        raise ValueError(
            f"{local_size} ranks on this machine but {gpus} GPUs: start at most {gpus} or use device='cpu'"
        )
    return World(rank, size, local_rank, torch.device("cuda", local_rank))


def _summary(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Alarm:
    """The job's bulletin of failure: one key in torchrun's store, and a thread that watches it.

    The thread has a connection of its own, since the process group's store is busy while a collective waits. It ends
    the process when another rank failed, or this one did, and the main thread did not end within ``GRACE_S``.
    """

    def __init__(self, world: World, store: Store, recorder: FlightRecorder) -> None:
        self._recorder, self._size = recorder, world.size
        self._store = _own_connection(store)
        self._store.set_timeout(timedelta(seconds=10))
        self._key = "failure"
        self._rank = world.rank
        self._own = ""
        self._finished = threading.Event()
        self._watching = threading.Event()
        self._watching.set()
        threading.Thread(target=self._watch, name="nanopar-alarm", daemon=True).start()

    def sound(self, reason: str) -> bool:
        """Announce this rank's failure; False when another rank was first."""
        self._own = traceback.format_exc()
        message = f"rank {self._rank} failed: {reason}"
        last = threading.Timer(END_S, self._end)  # whatever blocks now: a link that is cut, a group that waits
        last.daemon = True
        last.start()

        def announce() -> bool:
            self._leave_position()
            return bool(self._store.compare_set(self._key, "", message).decode() == message)

        # The store may be gone with the rank, launcher or machine that held it: then this rank's failure is the first.
        return _answer_within(STORE_S, announce, otherwise=True)

    def reason(self) -> str:
        """What the first rank that failed said."""
        return str(self._store.get(self._key).decode())

    def positions(self) -> str:
        """Where every rank was when this one failed; a rank that does not say so soon is dead, or stopped."""
        gone = "no word from the other ranks: the machine that holds the job's store, or the link to it, is gone"
        return _answer_within(STORE_S, self._positions, otherwise=gone)

    def _positions(self) -> str:
        lines = []
        deadline = time.monotonic() + POSITIONS_S
        for rank in range(self._size):
            try:
                while not self._store.check([f"position/{rank}"]) and time.monotonic() < deadline:
                    time.sleep(0.02)
                known = self._store.check([f"position/{rank}"])
                where = self._store.get(f"position/{rank}").decode() if known else "gave no sign: dead, or stopped"
            except RuntimeError:  # the store is gone
                break
            lines.append(f"  rank {rank}{' (failed)' if rank == self._rank else ''}: {where}")
        return "\n".join(["last collective of each rank:", *lines])

    def wait_for_all(self, timeout_s: float) -> None:
        """This rank is done: stay until all are, since others may still wait for what it has sent last.

        Raises:
            RuntimeError: another rank has failed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        failed = False
        with suppress(RuntimeError):  # the store is gone: so are the others
            self._store.add("ended", 1)
            while not failed and self._store.add("ended", 0) < self._size and time.monotonic() < deadline:
                failed = self._store.check([self._key])
                time.sleep(0.01)
        if failed:
            raise RuntimeError(self.reason())

    def _leave_position(self) -> None:
        self._store.set(f"position/{self._rank}", self._recorder.position())

    def stop(self) -> None:
        """No longer end this process for other ranks' failures: it is leaving the job by itself."""
        self._watching.clear()

    def disarm(self) -> None:
        """The process has left the job: the thread has nothing to do any more."""
        self._finished.set()

    def _watch(self) -> None:
        while not self._finished.wait(POLL_S):
            try:
                failed = self.reason() if self._store.check([self._key]) else ""
            except RuntimeError:
                return
            if failed and (self._watching.is_set() or self._own):
                self._leave_position()
                break
        else:
            return
        if self._finished.wait(GRACE_S):
            return
        self._end(f"rank {self._rank} stops because {failed}")

    def _end(self, message: str = "") -> None:
        """The main thread has not come to its end by itself."""
        if self._finished.is_set():
            return
        print(self._own or message, file=sys.stderr, flush=True)
        os._exit(1)


def _answer_within(seconds: float, ask: Callable[[], T], *, otherwise: T) -> T:
    """What ``ask`` returns; ``otherwise`` where that takes too long or the store is gone."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    asking = threading.Thread(target=run, name="nanopar-store", daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else otherwise
