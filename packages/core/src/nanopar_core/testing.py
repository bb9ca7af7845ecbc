"""Run a function on several gloo ranks of this machine, and compare its results with one plain process.

    parent --forkserver (torch already imported)--> rank 0 .. N-1, each inside ``launch()`` --> results in rank order

A forkserver starts a rank in a tenth of a second, where a new interpreter pays seconds to import torch. The first
rank that fails decides: its error is raised in the parent, the others are ended.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanopar_core.launch import GRACE_S, PeerFailure, launch
from nanopar_core.mesh import Mesh
from nanopar_core.specs import ParamSpec
from nanopar_core.torch_private import LAZY_AND_SLOW
from nanopar_core.verify import compare

R = TypeVar("R")


def run(
    world_size: int, fn: Callable[..., R], *args: Any, timeout_s: float = 120.0, debug_timeout_s: float | None = None
) -> list[R]:
    """Call ``fn(*args)`` on ``world_size`` gloo ranks; return their results in rank order.

    ``fn`` must be importable (defined at the top of a module); arguments and results travel by pickle. On each rank a
    process group exists while ``fn`` runs, so that ``Mesh(dp=world_size)`` works at once, and torch uses one thread.
    With ``debug_timeout_s`` collectives are compared over the ranks (debug mode), with this time limit.

    Raises:
        TimeoutError: some ranks did not finish in ``timeout_s`` seconds; the stacks of these are on stderr.
        RuntimeError: a rank died or exited without an exception.
        Exception: whatever the first rank that failed raised, with its rank and traceback as a note.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    call = pickle.dumps((fn, args))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nanopar_core.testing", LAZY_AND_SLOW])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, world_size, store.port, timeout_s, debug_timeout_s)
            process = context.Process(target=_serve, args=(theirs, call, place), daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours))
        _collect(ranks, time.monotonic() + timeout_s, timeout_s)
        return [rank.answer.value for rank in ranks if rank.answer is not None]
    finally:
        for rank_ in ranks:
            rank_.process.kill()
            rank_.process.join()
            rank_.pipe.close()


@dataclass
class _Answer:
    """What a rank sends back: a value, or an error (None where it cannot be pickled) with its traceback."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    peer_failed: bool = False
    died: bool = False


@dataclass
class _Rank:
    rank: int
    process: ForkServerProcess
    pipe: Connection
    answer: _Answer | None = None

    def read(self) -> None:
        """Take this rank's answer, or the fact that it died without one."""
        try:
            self.answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):  # OSError: it died in the middle of a message
            self.process.join()
            text = f"rank {self.rank} died with exit code {self.process.exitcode}"
            self.answer = _Answer(error=RuntimeError(text), trace=text, died=True)


def _collect(ranks: Sequence[_Rank], deadline: float, timeout_s: float) -> None:
    """Wait for the answers of all ranks; raise the first failure that is not the echo of another."""
    first: _Rank | None = None
    while waiting := [rank for rank in ranks if rank.answer is None]:
        ready = wait([rank.pipe for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        answered = [rank for rank in waiting if rank.pipe in ready]
        for rank in answered:
            rank.read()
        # of several at once the dead come first: their peers' broken connections are the echo
        for rank in sorted(answered, key=lambda rank: rank.answer is None or not rank.answer.died):
            assert rank.answer is not None
            failed = bool(rank.answer.trace)
            if failed and (
                first is None or (first.answer and first.answer.peer_failed and not rank.answer.peer_failed)
            ):
                first = rank
                deadline = min(deadline, time.monotonic() + 2 * GRACE_S)
    if first is not None and first.answer is not None:
        error = first.answer.error or RuntimeError(first.answer.trace)
        error.add_note(f"raised on rank {first.rank} of {len(ranks)}:\n{first.answer.trace}")
        raise error
    if waiting:
        late = [rank.rank for rank in waiting]
        raise TimeoutError(f"ranks {late} of {len(ranks)} did not finish within {timeout_s} s")


def _serve(pipe: Connection, call: bytes, place: tuple[int, int, int, float, float | None]) -> None:
    """The life of one rank."""
    rank, size, port, timeout_s, debug_timeout_s = place
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    _end_with_parent()
    faulthandler.dump_traceback_later(max(0.1, timeout_s - 0.5))
    try:
        debug = debug_timeout_s is not None
        with launch(device="cpu", timeout_s=timeout_s, debug=debug, debug_timeout_s=debug_timeout_s or 0.0):
            fn, args = pickle.loads(call)
            answer = _Answer(value=fn(*args))
        pipe.send_bytes(pickle.dumps(answer))
    # Errors are sent before they are let go: their frames may hold collectives in flight, whose end gloo waits for.
    except PeerFailure as failure:
        pipe.send_bytes(pickle.dumps(_Answer(trace=failure.message, peer_failed=True)))
    except BaseException as error:  # SystemExit too is this rank's failure
        pipe.send_bytes(_failure(error))
    faulthandler.cancel_dump_traceback_later()


def _end_with_parent() -> None:
    """Let this rank end when the process that called ``run`` is killed, since nobody else would end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="nanopar-parent", daemon=True).start()


def _failure(error: BaseException) -> bytes:
    trace = traceback.format_exc()
    if not isinstance(error, Exception):  # a rank's exit must not end the caller
        error = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        message = pickle.dumps(_Answer(error=error, trace=trace))
        pickle.loads(message)  # some exceptions can be written but not read back
    except Exception:
        return pickle.dumps(_Answer(trace=trace))
    return message


def train_plainly(
    model: nn.Module,
    batches: Iterable[Sequence[tuple[Any, ...]]],
    loss_fn: Callable[..., Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
) -> dict[str, Any]:
    """Train in one process with nothing but torch: the reference for ``assert_parity``.

    Args:
        model: trained in place.
        batches: for each optimizer step the micro-batches, each a tuple of arguments for ``loss_fn(model, *micro)``.
        loss_fn: this micro-batch's share of the step's loss; the shares are added up.
        make_optimizer: receives the parameters.
        max_norm: clip to this norm where given; the norm before clipping is reported anyway.

    Returns:
        ``loss`` and ``norm`` (a list of floats, one per step), ``gradients`` of the last step before clipping and
        ``weights`` after it (by parameter name; a parameter without a gradient counts as zero).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters)
    losses, norms, gradients = [], [], {}
    for micro_batches in batches:
        optimizer.zero_grad()
        total = 0.0
        for micro in micro_batches:
            loss = loss_fn(model, *micro)
            loss.backward()
            total += loss.item()
        for parameter in parameters:  # nanopar's rule: unused means a zero gradient
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: _copy(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm)
        optimizer.step()
        losses.append(total)
        norms.append(norm.item())
    weights = {name: _copy(parameter) for name, parameter in model.named_parameters()}
    return {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def assert_parity(
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    specs: Mapping[str, ParamSpec] | None = None,
    *,
    axes: Mesh | Mapping[str, int] | None = None,
    micro_batches: int = 1,
    rtol: float | Mapping[str, float] | None = None,
    floor: float = 1e-3,
) -> None:
    """Assert that ``nanopar_core.verify.compare``, which takes the same arguments, finds no difference.

    Of losses, norms, outputs, every gradient and every weight the message names those that deviate most, and what is
    probably wrong.
    """
    compare(reference, candidate, specs, axes=axes, micro_batches=micro_batches, rtol=rtol, floor=floor).check()
