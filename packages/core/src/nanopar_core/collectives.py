"""Collectives on an ``Axis``: the one place through which nanopar's bytes move.

Every function works along dim 0, takes any length (not only multiples of the axis size), gives back its input on an
axis of one rank, and blocks unless ``async_op=True``, which returns a ``Pending`` whose ``wait()`` gives the result.
``out=`` saves an allocation, and a copy where it may share storage with the input. ``label`` names the call in the
ledger. All ranks of the axis make the same calls, waits included, in the same order. No gradient flows through these
functions: autograd.py has those that carry one.

What one rank of N sends for a tensor of P bytes (P is the whole: input of reduce_scatter, output of all_gather):

    op              on CPU (gloo)                               on CUDA (NCCL)   bytes that a rank sends
    all_reduce      gloo's ring; 16-bit floats: reduce_scatter  native           2 P (N-1)/N
                    and all_gather, so that sums are in fp32;
                    two ranks, up to 4 MiB: an exchange
    reduce_scatter  direct exchange in pieces, summed locally   native           P - its own part
    all_gather      direct exchange                             native           (N-1) x its own part
    all_to_all      native                                      native           P - the part that it keeps
    broadcast       direct from the source                      native           source (N-1) P, others 0
    send_recv       point to point                              native           what it sends
    barrier         native                                      native           0

The direct forms send what is necessary and no more: gloo's own reduce_scatter is an all-reduce underneath.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from nanopar_core import debug
from nanopar_core.grid import split_sizes
from nanopar_core.ledger import observer_of, record
from nanopar_core.mesh import Axis

T = TypeVar("T")
ReduceOp = Literal["sum", "max", "min"]
_TORCH_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Elements of a message of the direct reduce_scatter: while it is summed, also in fp32, it stays in a core's cache.
_PIECE = 1 << 18
# Up to this size two ranks exchange what they reduce, which takes a buffer of that size.
_EXCHANGED_BYTES = 4 * 2**20
_LOCAL_OPS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass
class Pending(Generic[T]):
    """A collective in flight. It owns every buffer that the collective touches until ``wait()`` returns the result.

    Wait for every handle: a message whose handle was dropped may never be sent, and then the other ranks hang.
    """

    result: T
    works: list[dist.Work] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    finish: Callable[[], None] | None = None

    @torch.no_grad()
    def wait(self) -> T:
        """Wait (on CUDA the current stream waits, not the host) and return the result. May be called again."""
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()
        self.works, self.buffers, self.finish = [], [], None
        return self.result


@overload
def all_reduce(
    tensor: Tensor, axis: Axis, *, op: ReduceOp = "sum", out: Tensor | None = None, label: str = ""
) -> Tensor: ...
@overload
def all_reduce(
    tensor: Tensor,
    axis: Axis,
    *,
    op: ReduceOp = "sum",
    out: Tensor | None = None,
    label: str = "",
    async_op: Literal[True],
) -> Pending[Tensor]: ...
@torch.no_grad()
def all_reduce(
    tensor: Tensor,
    axis: Axis,
    *,
    op: ReduceOp = "sum",
    out: Tensor | None = None,
    label: str = "",
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Sum (or "max", "min") over the ranks of a tensor of any shape, the same on each; equal bit for bit on all ranks.

    ``out=tensor`` works in place.
    """
    _check_op(op)
    if not axis.communicates:
        return _answer(Pending(_into(out, tensor)), async_op)
    result = _buffer(out, tensor.shape, tensor)
    record("all_reduce", axis, 2 * _bytes(tensor) * (axis.size - 1) // axis.size, tensor.dtype, tensor.shape, label)
    if axis.size == 2 and tensor.device.type == "cpu" and _bytes(tensor) <= _EXCHANGED_BYTES:
        return _answer(_all_reduce_of_two(tensor.contiguous(), axis, op, result), async_op)
    if _sums_badly(tensor, op):
        flat = result.view(-1)
        sizes = split_sizes(flat.numel(), axis.size)
        mine = flat.split(sizes)[axis.rank]
        source = tensor.contiguous().view(-1)
        scattered = _reduce_scatter_direct(source, axis, op, sizes, mine, pieces_ahead=_pieces_ahead(async_op))

        def finish() -> None:
            scattered.wait()
            _all_gather_direct(mine, axis, sizes, flat).wait()

        return _answer(Pending(result, finish=finish), async_op)
    work = dist.all_reduce(_into(result, tensor), op=_TORCH_OPS[op], group=axis.group, async_op=True)
    return _answer(Pending(result, _works(work)), async_op)


@overload
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    *,
    op: ReduceOp = "sum",
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    label: str = "",
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    *,
    op: ReduceOp = "sum",
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    label: str = "",
    async_op: Literal[True],
) -> Pending[Tensor]: ...
@torch.no_grad()
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    *,
    op: ReduceOp = "sum",
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    label: str = "",
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Sum over the ranks, of which each rank gets its part of dim 0.

    Args:
        tensor: ``[n, ...]``, the same shape on every rank.
        sizes: rows of each rank's part, summing to n; as even as possible, longer parts first, where not given.
        out: ``[sizes[rank], ...]``; this rank's own part of ``tensor`` makes it work in place.
    """
    _check_op(op)
    sizes = _checked(sizes if sizes is not None else split_sizes(_length(tensor), axis.size), tensor, axis, "sizes")
    if not axis.communicates:
        return _answer(Pending(_into(out, tensor)), async_op)
    tensor = tensor.contiguous()
    own = tensor.split(sizes)[axis.rank]
    out = _buffer(out, own.shape, tensor)
    record("reduce_scatter", axis, _bytes(tensor) - _bytes(own), tensor.dtype, tensor.shape, label)
    if tensor.device.type == "cpu":
        ahead = _pieces_ahead(async_op)
        return _answer(_reduce_scatter_direct(tensor, axis, op, sizes, out, pieces_ahead=ahead), async_op)
    if len(set(sizes)) == 1:
        work = dist.reduce_scatter_single(out, tensor, op=_TORCH_OPS[op], group=axis.group, async_op=True)
    else:
        work = dist.reduce_scatter(out, list(tensor.split(sizes)), op=_TORCH_OPS[op], group=axis.group, async_op=True)
    return _answer(Pending(out, _works(work), [tensor]), async_op)


@overload
def all_gather(
    part: Tensor, axis: Axis, *, sizes: Sequence[int] | None = None, out: Tensor | None = None, label: str = ""
) -> Tensor: ...
@overload
def all_gather(
    part: Tensor,
    axis: Axis,
    *,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    label: str = "",
    async_op: Literal[True],
) -> Pending[Tensor]: ...
@torch.no_grad()
def all_gather(
    part: Tensor,
    axis: Axis,
    *,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    label: str = "",
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """The parts of all ranks one after the other along dim 0.

    Args:
        part: ``[sizes[rank], ...]``; ranks may have different lengths, zero included.
        sizes: rows of each rank's part. Where neither ``sizes`` nor ``out`` is given the ranks first exchange their
            lengths, which costs a small collective (``all_gather_sizes`` in the ledger) and, on CUDA, a host sync.
        out: ``[sum(sizes), ...]``; ``part`` may be this rank's slice of it, which then is not copied. Without
            ``sizes`` its rows are divided as evenly as possible, longer parts first.
    """
    if not axis.communicates:
        return _answer(Pending(_into(out, part)), async_op)
    if sizes is None:
        sizes = split_sizes(_length(out), axis.size) if out is not None else _exchange_lengths(part, axis)
    if len(sizes) != axis.size or sizes[axis.rank] != _length(part):
        raise ValueError(f"all_gather: rank {axis.rank} of {axis.name} has {_length(part)} rows, sizes: {list(sizes)}")
    part = part.contiguous()
    out = _buffer(out, (sum(sizes), *part.shape[1:]), part)
    record("all_gather", axis, _bytes(part) * (axis.size - 1), part.dtype, part.shape, label)
    if part.device.type == "cpu":
        return _answer(_all_gather_direct(part, axis, sizes, out), async_op)
    if len(set(sizes)) == 1:
        work = dist.all_gather_single(out, part, group=axis.group, async_op=True)
    else:
        work = dist.all_gather(list(out.split(list(sizes))), part, group=axis.group, async_op=True)
    return _answer(Pending(out, _works(work), [part]), async_op)


@overload
def all_to_all(
    tensor: Tensor,
    axis: Axis,
    *,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    label: str = "",
) -> Tensor: ...
@overload
def all_to_all(
    tensor: Tensor,
    axis: Axis,
    *,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    label: str = "",
    async_op: Literal[True],
) -> Pending[Tensor]: ...
@torch.no_grad()
def all_to_all(
    tensor: Tensor,
    axis: Axis,
    *,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    label: str = "",
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Send the i-th part of dim 0 to rank i; get the parts meant for this rank, in rank order.

    Args:
        tensor: ``[sum(send_sizes), ...]``.
        send_sizes: rows for each rank. Without it every rank sends equally many rows, divided as evenly as possible.
        receive_sizes: rows from each rank. Where only ``send_sizes`` is given the ranks first exchange them, which
            costs a small collective (``all_to_all_sizes`` in the ledger) and, on CUDA, a host sync.
        out: ``[sum(receive_sizes), ...]``, not sharing storage with ``tensor``.
    """
    if not axis.communicates:
        return _answer(Pending(_into(out, tensor)), async_op)
    if send_sizes is None:
        send_sizes = split_sizes(_length(tensor), axis.size)
        if receive_sizes is None:
            receive_sizes = [send_sizes[axis.rank]] * axis.size
    send_sizes = _checked(send_sizes, tensor, axis, "send_sizes")
    if receive_sizes is None:
        receive_sizes = _transpose_sizes(send_sizes, axis, tensor)
    if len(receive_sizes) != axis.size or min(receive_sizes) < 0 or receive_sizes[axis.rank] != send_sizes[axis.rank]:
        raise ValueError(
            f"receive_sizes {list(receive_sizes)} must be {axis.size} lengths ({axis.name}), of which this rank's own, "
            f"the one at {axis.rank}, is that of send_sizes {send_sizes}"
        )
    tensor = tensor.contiguous()
    own = tensor.split(send_sizes)[axis.rank]
    out = _buffer(out, (sum(receive_sizes), *tensor.shape[1:]), tensor)
    record("all_to_all", axis, _bytes(tensor) - _bytes(own), tensor.dtype, tensor.shape, label)
    work = dist.all_to_all_single(out, tensor, list(receive_sizes), send_sizes, group=axis.group, async_op=True)
    return _answer(Pending(out, _works(work), [tensor]), async_op)


@overload
def broadcast(tensor: Tensor, axis: Axis, *, src: int = 0, label: str = "") -> Tensor: ...
@overload
def broadcast(
    tensor: Tensor, axis: Axis, *, src: int = 0, label: str = "", async_op: Literal[True]
) -> Pending[Tensor]: ...
@torch.no_grad()
def broadcast(
    tensor: Tensor, axis: Axis, *, src: int = 0, label: str = "", async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Overwrite ``tensor``, contiguous and of one shape everywhere, with that of rank ``src`` of the axis, in place."""
    if not 0 <= src < axis.size:
        raise ValueError(f"broadcast from rank {src} of {axis.name}, which has {axis.size} ranks")
    if not tensor.is_contiguous():
        raise ValueError("broadcast: the tensor must be contiguous")
    if not axis.communicates:
        return _answer(Pending(tensor), async_op)
    sent = _bytes(tensor) * (axis.size - 1) if axis.rank == src else 0
    record("broadcast", axis, sent, tensor.dtype, tensor.shape, label)
    if tensor.device.type == "cpu":
        peers = [peer for peer in range(axis.size) if peer != src]
        sends = [(tensor, peer) for peer in peers] if axis.rank == src else []
        receives = [] if axis.rank == src else [(tensor, src)]
        return _answer(Pending(tensor, exchange(sends, receives, axis)), async_op)
    work = dist.broadcast(tensor, group_src=src, group=axis.group, async_op=True)
    return _answer(Pending(tensor, _works(work)), async_op)


Message = tuple[Tensor, int]


@overload
def send_recv(
    sends: Sequence[Message], receives: Sequence[Message], axis: Axis, *, label: str = ""
) -> list[Tensor]: ...
@overload
def send_recv(
    sends: Sequence[Message], receives: Sequence[Message], axis: Axis, *, label: str = "", async_op: Literal[True]
) -> Pending[list[Tensor]]: ...
@torch.no_grad()
def send_recv(
    sends: Sequence[Message], receives: Sequence[Message], axis: Axis, *, label: str = "", async_op: bool = False
) -> list[Tensor] | Pending[list[Tensor]]:
    """A batch of sends ``(tensor, rank on the axis)`` and receives ``(buffer to fill, rank on the axis)``.

    Between two ranks messages arrive in the order of the lists; shape and dtype of a buffer must be the sender's.
    Returns the filled buffers.
    """
    for tensor, peer in [*sends, *receives]:
        if not 0 <= peer < axis.size or peer == axis.rank:
            raise ValueError(f"send_recv: rank {axis.rank} of {axis.name} (size {axis.size}) cannot reach {peer}")
        if not tensor.is_contiguous():
            raise ValueError("send_recv: tensors must be contiguous")
    if not axis.communicates:
        return _answer(Pending([]), async_op)
    dtype = next((tensor.dtype for tensor, _ in [*sends, *receives]), torch.uint8)
    record("send_recv", axis, sum(_bytes(tensor) for tensor, _ in sends), dtype, (), label)
    comparison = observer_of(debug.Comparison)
    if comparison is not None:
        return _answer(_send_recv_with_headers(sends, receives, axis, label, comparison), async_op)
    buffers = [buffer for buffer, _ in receives]
    works = exchange(sends, receives, axis)
    return _answer(Pending(buffers, works, [tensor for tensor, _ in sends]), async_op)


def barrier(axis: Axis, *, label: str = "") -> None:
    """Return on no rank before all ranks of the axis have called it."""
    if axis.communicates:
        record("barrier", axis, 0, torch.uint8, (), label)
        dist.barrier(axis.group)


# ------------------------------------------------------------------------------------------------ direct exchange


def _all_reduce_of_two(tensor: Tensor, axis: Axis, op: ReduceOp, out: Tensor) -> Pending[Tensor]:
    """Each sends the other all it has, as many bytes as any way takes, and combines: one message's latency, not two."""
    peer = 1 - axis.rank
    other = torch.empty_like(tensor)
    works = exchange([(tensor, peer)], [(other, peer)], axis)
    return Pending(out, works, [tensor, other], lambda: combine(tensor, [other], op, out))


def _reduce_scatter_direct(
    tensor: Tensor, axis: Axis, op: ReduceOp, sizes: Sequence[int], out: Tensor, *, pieces_ahead: int | None
) -> Pending[Tensor]:
    """Send each rank its part of ``tensor``, in pieces; sum this rank's with the received ones, piece by piece.

    The sums are made in ``wait``. ``pieces_ahead`` is how many pieces may arrive before they are summed, all if None.
    Few of them mean small buffers that are filled again and again: faster than new memory for whole parts.
    """
    parts = [part.view(-1).split(_PIECE) for part in tensor.split(list(sizes))]
    own = [piece for piece in parts[axis.rank] if piece.numel()]
    results = out.view(-1).split(_PIECE)
    peers = _peers(axis)
    ring = [[torch.empty_like(own[0]) for _ in peers] for _ in own[:pieces_ahead]]

    def receive(i: int) -> tuple[list[Tensor], list[dist.Work]]:
        buffers = [buffer[: own[i].numel()] for buffer in ring[i % len(ring)]]
        return buffers, exchange([], list(zip(buffers, peers, strict=True)), axis)

    arriving = deque(receive(i) for i in range(len(ring)))
    sends = exchange([(piece, peer) for peer in peers for piece in parts[peer]], [], axis)

    def finish() -> None:
        for i in range(len(own)):
            others, works = arriving.popleft()
            for work in works:
                work.wait()
            combine(own[i], others, op, results[i])
            if i + len(ring) < len(own):
                arriving.append(receive(i + len(ring)))
        for work in sends:  # last: a peer may take the last pieces only when it has got those that it waits for
            work.wait()

    return Pending(out, [], [tensor], finish)


def combine(own: Tensor, others: Sequence[Tensor], op: ReduceOp, out: Tensor) -> None:
    """Reduce equally long pieces into ``out``, which may be ``own``; sums of 16-bit floats are rounded once."""
    if _sums_badly(own, op) and len(others) > 1:  # torch adds two in fp32 by itself
        total = own.float()
        for other in others:
            total += other
        out.copy_(total)
        return
    total = own
    for other in others:
        total = _LOCAL_OPS[op](total, other, out=out)
    if not others:
        out.copy_(own)


def _all_gather_direct(part: Tensor, axis: Axis, sizes: Sequence[int], out: Tensor) -> Pending[Tensor]:
    """Send this rank's part to every other rank and receive theirs into their places of ``out``."""
    places = out.split(list(sizes))
    if places[axis.rank].data_ptr() != part.data_ptr():
        places[axis.rank].copy_(part)
    return Pending(out, send_to_all(part, places, axis), [part])


def send_to_all(part: Tensor, places: Sequence[Tensor], axis: Axis) -> list[dist.Work]:
    """Start to send this rank's part to every other rank, and to receive theirs into their ``places``."""
    peers = _peers(axis)
    return exchange([(part, peer) for peer in peers], [(places[peer], peer) for peer in peers], axis)


def _peers(axis: Axis) -> list[int]:
    """The other ranks, from the next one on: so no rank is everybody's first."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


def exchange(sends: Sequence[Message], receives: Sequence[Message], axis: Axis, tag: int = 0) -> list[dist.Work]:
    """Start point-to-point messages, receives first; empty ones are left out on both sides."""
    sends, receives = ([message for message in messages if message[0].numel()] for messages in (sends, receives))
    if all(tensor.device.type == "cpu" for tensor, _ in [*sends, *receives]):  # gloo batches nothing: save the checks
        works = [dist.irecv(buffer, group=axis.group, group_src=peer, tag=tag) for buffer, peer in receives]
        works += [dist.isend(tensor, group=axis.group, group_dst=peer, tag=tag) for tensor, peer in sends]
        return [work for work in works if work is not None]
    messages = [(dist.irecv, *message) for message in receives] + [(dist.isend, *message) for message in sends]
    ops = [dist.P2POp(op, tensor, group=axis.group, group_peer=peer, tag=tag) for op, tensor, peer in messages]
    return list(dist.batch_isend_irecv(ops))


def _send_recv_with_headers(
    sends: Sequence[Message], receives: Sequence[Message], axis: Axis, label: str, comparison: debug.Comparison
) -> Pending[list[Tensor]]:
    """Debug mode: every message is preceded by its description; contents are received once that is found right.

    Since the receiver posts its buffer late, a sender must not wait for it: it sends a copy that ``comparison`` keeps.
    """
    incoming = [(torch.zeros(debug.HEADER_BYTES, dtype=torch.uint8, device=t.device), peer) for t, peer in receives]
    headers = [exchange([], [message], axis, debug.HEADER_TAG) for message in incoming]
    outgoing = [(debug.header(tensor, label), peer) for tensor, peer in sends]
    copies = [(tensor.clone(), peer) for tensor, peer in sends]
    works = exchange(outgoing, [], axis, debug.HEADER_TAG) + exchange(copies, [], axis)
    comparison.keep(works, [tensor for tensor, _ in [*outgoing, *copies]])
    early = exchange([], receives, axis) if any(tensor.is_cuda for tensor, _ in receives) else []  # NCCL has no tags

    def finish() -> None:
        for (received, peer), work, (buffer, _) in zip(incoming, headers, receives, strict=True):
            try:
                work[0].wait(timedelta(seconds=comparison.timeout_s))
            except RuntimeError as error:
                limit = f"{comparison.timeout_s:g} s"
                raise debug.CollectiveMismatchError(
                    f"rank {axis.rank} of {axis.name} got no message '{label}' from rank {peer} within {limit}"
                ) from error
            debug.check_header(received, buffer, label, peer, axis)
        for arriving in early or exchange([], receives, axis):
            arriving.wait()

    return Pending([buffer for buffer, _ in receives], finish=finish)


def _exchange_lengths(part: Tensor, axis: Axis) -> list[int]:
    lengths = torch.empty(axis.size, dtype=torch.int64, device=part.device)
    lengths[axis.rank] = _length(part)
    record("all_gather_sizes", axis, 8 * (axis.size - 1), lengths.dtype, (1,), "")
    mine = lengths[axis.rank : axis.rank + 1]
    if part.device.type == "cpu":
        _all_gather_direct(mine, axis, [1] * axis.size, lengths).wait()
    else:
        dist.all_gather_single(lengths, mine.clone(), group=axis.group)
    return [int(n) for n in lengths.tolist()]


def _transpose_sizes(send_sizes: Sequence[int], axis: Axis, like: Tensor) -> list[int]:
    sending = torch.tensor(send_sizes, dtype=torch.int64, device=like.device)
    receiving = torch.empty_like(sending)
    record("all_to_all_sizes", axis, 8 * (axis.size - 1), sending.dtype, sending.shape, "")
    dist.all_to_all_single(receiving, sending, group=axis.group)
    return [int(n) for n in receiving.tolist()]


# ---------------------------------------------------------------------------------------------------- small parts


def _pieces_ahead(async_op: bool) -> int | None:
    """A blocking call sums pieces as they come; what is sent in the background must all have a place to arrive in."""
    return None if async_op else 4


def _answer(pending: Pending[T], async_op: bool) -> T | Pending[T]:
    return pending if async_op else pending.wait()


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _length(tensor: Tensor) -> int:
    if tensor.ndim == 0:
        raise ValueError("this collective divides dim 0, a 0-dim tensor has none: pass tensor.view(1)")
    return tensor.shape[0]


def _checked(sizes: Sequence[int], tensor: Tensor, axis: Axis, name: str) -> list[int]:
    if len(sizes) != axis.size or sum(sizes) != _length(tensor) or min(sizes) < 0:
        raise ValueError(
            f"{name} {list(sizes)} must divide {_length(tensor)} rows among {axis.size} ranks ({axis.name})"
        )
    return list(sizes)


def _check_op(op: str) -> None:
    if op not in _TORCH_OPS:
        raise ValueError(f"op must be one of {', '.join(_TORCH_OPS)}, not {op!r}")


def _sums_badly(tensor: Tensor, op: ReduceOp) -> bool:
    """Whether gloo would add up 16-bit floats and round each sum; NCCL is left to its own ways."""
    return op == "sum" and tensor.dtype in (torch.bfloat16, torch.float16) and tensor.device.type == "cpu"


def _buffer(out: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    if out is None:
        return like.new_empty(tuple(shape))
    if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {like.dtype} {list(shape)}, not {out.dtype} {list(out.shape)}")
    return out


def _into(out: Tensor | None, tensor: Tensor) -> Tensor:
    if out is None:
        return tensor
    _buffer(out, tensor.shape, tensor)
    return out if out is tensor else out.copy_(tensor)


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """The values of all ranks in their order, by torch's own way for Python objects: for reports, not in a hot path."""
    if not axis.communicates:
        return [value]
    of_all: list[Any] = [None] * axis.size
    dist.all_gather_object(of_all, value, group=axis.group)
    return of_all
