"""Ring attention: keys and values travel round the ranks while each attends to those that it has (Liu et al. 2023).

    step      0         1         2         3        rank 1 of 4; N - 1 messages of |k, v|
    keys of   1         0         3         2        the next ones are on their way while these are used
    queries   all       all       2nd half  2nd half
    keys      causal    1st half  all       all      half of the pairs at each step: the same work on every rank

Partial results are merged by their log-sum-exp ("FlashAttention", Dao et al. 2022, section 3.1). In backward keys and
values go round once more, and with them their gradients, which make one more hop to arrive at home: N messages more.
With documents or a window every step is computed under a mask, by plain products.

Shapes: B batch, H query heads, G key and value heads, S positions, C head dim, N ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanopar_core import Axis, Pending, send_recv
from nanopar_core.recompute import once
from nanopar_tensor.attention_block import attend, attend_backward
from nanopar_tensor.autocast import without_autocast
from nanopar_tensor.zigzag import positions_of

if TYPE_CHECKING:
    from nanopar_tensor.context import ContextMask


def attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: ContextMask | None, scale: float | None, label: str
) -> Tensor:
    """``[B, H, S/N, C]``; see ``ContextAttention``."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        return _Ring.apply(q, k, v, axis, mask, scale, label)  # type: ignore[no-any-return, no-untyped-call]


class _Step(NamedTuple):
    """Which of the rank's queries see which of the keys that it has at a step."""

    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None


def _step(number: int, axis: Axis, length: int, mask: ContextMask | None, device: torch.device) -> _Step:
    """At step ``number`` a rank has the keys of the rank so many places before it; ``length`` of them."""
    source = (axis.rank - number) % axis.size
    everything, half = slice(0, length), length // 2
    if mask is not None:
        queries, keys = (positions_of(rank, axis.size, length * axis.size).to(device) for rank in (axis.rank, source))
        return _Step(everything, everything, causal=False, mask=mask.visible(queries, keys))
    if source == axis.rank:
        return _Step(everything, everything, causal=True, mask=None)
    if source < axis.rank:
        return _Step(everything, slice(0, half), causal=False, mask=None)
    return _Step(slice(half, length), everything, causal=False, mask=None)


def _pass_on(tensor: Tensor, axis: Axis, label: str) -> Pending[list[Tensor]]:
    """Send to the next rank, receive from the one before."""
    following, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    return send_recv([(tensor, following)], [(torch.empty_like(tensor), before)], axis, label=label, async_op=True)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: ContextMask | None, scale: float, label: str
    ) -> Tensor:
        totals: list[Tensor] = []

        def run() -> Tensor:
            out, total = _ring_forward(q, k, v, axis, mask, scale, label)
            totals.append(total)
            return out.to(q.dtype)

        result = once(run)
        total = once(lambda: totals[0])
        ctx.save_for_backward(q, k, v, result, total)
        ctx.axis, ctx.mask, ctx.scale, ctx.label = axis, mask, scale, label
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        with without_autocast(grad):
            return *_ring_backward(grad, q, k, v, out, total, ctx.axis, ctx.mask, ctx.scale, ctx.label), *[None] * 4


def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: ContextMask | None, scale: float, label: str
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of what each query has seen."""
    both = torch.stack([k, v])
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape, dtype=wide)
    total = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    for number in range(axis.size):
        coming = _pass_on(both, axis, label) if number < axis.size - 1 else None
        step = _step(number, axis, q.shape[2], mask, q.device)
        keys, values = both[:, :, :, step.keys].unbind()
        part, part_total = attend(q[:, :, step.queries], keys, values, step.causal, step.mask, scale)
        _merge(out[:, :, step.queries], total[:, :, step.queries], part, part_total)
        if coming is not None:
            [both] = coming.wait()
    return out, total


def _ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor,
    axis: Axis, mask: ContextMask | None, scale: float, label: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's ``q``, ``k`` and ``v``."""
    both = torch.stack([k, v])
    of_q = torch.zeros_like(q, dtype=total.dtype)
    of_both: Tensor | None = None  # gradients of the keys and values that are here now
    arriving: Pending[list[Tensor]] | None = None
    for number in range(axis.size):
        coming = _pass_on(both, axis, label) if number < axis.size - 1 else None
        step = _step(number, axis, q.shape[2], mask, q.device)
        rows = step.queries
        keys, values = both[:, :, :, step.keys].unbind()
        more = attend_backward(
            grad[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows], total[:, :, rows],
            step.causal, step.mask, scale,
        )  # fmt: skip
        of_q[:, :, rows] += more[0]
        of_both = torch.zeros_like(both, dtype=total.dtype) if arriving is None else arriving.wait()[0]
        of_both[:, :, :, step.keys] += torch.stack(more[1:])
        if axis.size > 1:
            arriving = _pass_on(of_both, axis, label)
        if coming is not None:
            [both] = coming.wait()
    if arriving is not None:
        [of_both] = arriving.wait()
    assert of_both is not None
    of_k, of_v = of_both.to(k.dtype).unbind()
    return of_q.to(q.dtype), of_k, of_v


def _merge(out: Tensor, total: Tensor, part: Tensor, part_total: Tensor) -> None:
    """Take ``part`` into the weighted mean ``out``, in place; a query that has seen nothing yet has weight 0."""
    both = torch.logaddexp(total, part_total)
    old, new = ((one - both).exp().nan_to_num(nan=0.0)[..., None] for one in (total, part_total))
    out.mul_(old).add_(part * new)
    total.copy_(both)
