"""Collectives with a gradient, in pairs named by what both directions do.

Which backward is right depends on what the ranks' tensors mean. *Split* is a part that only this rank has, *same* is
one tensor that every rank holds whole, *partial* is a summand of it. The loss is one number: the same on every rank
where it comes from *same* tensors, or the sum of the ranks' shares.

    name (forward _ backward)                 input -> output      used by
    identity_fwd_all_reduce_bwd               same -> same         entry of a tensor-parallel region: each rank's use of
                                                                   x gives a partial gradient
    all_reduce_fwd_identity_bwd               partial -> same      exit of a tensor-parallel region
    all_reduce_fwd_all_reduce_bwd             partial -> partial   a sum whose copies each rank uses differently
    split_fwd_all_gather_bwd                  same -> split        entry of a sequence-parallel region
    all_gather_fwd_split_bwd                  split -> same        exit of a sequence-parallel region
    all_gather_fwd_reduce_scatter_bwd         split -> used by each rank in its own way (partial gradients)
    reduce_scatter_fwd_all_gather_bwd         partial -> split
    all_to_all_fwd_all_to_all_bwd             split -> split along another division

The pairs are f, g and their sequence-parallel forms of "Megatron-LM" (Shoeybi et al. 2019, section 3) and "Reducing
Activation Recomputation" (Korthikanti et al. 2022, section 4.2). Shapes: ``dim`` is the divided dim; any length.

Where a block is recomputed under ``keep_communicated``, what the last ones received is kept: ranks come to a second
pass at times that depend on their data, when others may be waiting elsewhere.

Every backward is the forward of the pair with the two names exchanged, so that second derivatives are right too. A
backward that communicates must run on all ranks: all of them use the output in their loss, or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanopar_core.along import all_gather_along, reduce_scatter_along
from nanopar_core.collectives import all_gather, all_reduce, all_to_all
from nanopar_core.grid import split_sizes
from nanopar_core.mesh import Axis
from nanopar_core.recompute import once


def identity_fwd_all_reduce_bwd(x: Tensor, axis: Axis, *, label: str = "") -> Tensor:
    """Forward: x. Backward: the sum of the ranks' gradients."""
    return _IdentityAllReduce.apply(x, axis, label)  # type: ignore[no-any-return, no-untyped-call]


def all_reduce_fwd_identity_bwd(x: Tensor, axis: Axis, *, label: str = "") -> Tensor:
    """Forward: the sum of the ranks' x. Backward: the gradient as it is."""
    return _AllReduceIdentity.apply(x, axis, label)  # type: ignore[no-any-return, no-untyped-call]


def all_reduce_fwd_all_reduce_bwd(x: Tensor, axis: Axis, *, label: str = "") -> Tensor:
    """Forward: the sum of the ranks' x. Backward: the sum of the ranks' gradients."""
    return _AllReduceAllReduce.apply(x, axis, label)  # type: ignore[no-any-return, no-untyped-call]


def split_fwd_all_gather_bwd(
    x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None, label: str = ""
) -> Tensor:
    """Forward: this rank's part of x along ``dim``. Backward: the parts' gradients put together."""
    return _SplitAllGather.apply(x, axis, dim, sizes, label)  # type: ignore[no-any-return, no-untyped-call]


def all_gather_fwd_split_bwd(
    x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None, label: str = ""
) -> Tensor:
    """Forward: the parts of all ranks along ``dim``. Backward: this rank's part of the gradient.

    Without ``sizes``, the lengths of the parts, the ranks exchange their lengths first.
    """
    return _AllGatherSplit.apply(x, axis, dim, sizes, label)  # type: ignore[no-any-return, no-untyped-call]


def all_gather_fwd_reduce_scatter_bwd(
    x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None, label: str = ""
) -> Tensor:
    """Forward: the parts of all ranks along ``dim``. Backward: this rank's part of the sum of the gradients.

    Without ``sizes``, the lengths of the parts, the ranks exchange their lengths first.
    """
    return _AllGatherReduceScatter.apply(x, axis, dim, sizes, label)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_fwd_all_gather_bwd(
    x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None, label: str = ""
) -> Tensor:
    """Forward: this rank's part along ``dim`` of the sum of the ranks' x. Backward: the parts' gradients together."""
    return _ReduceScatterAllGather.apply(x, axis, dim, sizes, label)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all_fwd_all_to_all_bwd(
    x: Tensor,
    axis: Axis,
    *,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    label: str = "",
) -> Tensor:
    """Forward: part i of dim 0 goes to rank i. Backward: every row's gradient goes back to where the row came from."""
    if send_sizes is None:
        send_sizes = split_sizes(x.shape[0], axis.size)
        receive_sizes = receive_sizes or [send_sizes[axis.rank]] * axis.size
    elif receive_sizes is None and axis.communicates:
        counts = torch.tensor(send_sizes, dtype=torch.int64, device=x.device)
        ones = [1] * axis.size
        receive_sizes = all_to_all(counts, axis, send_sizes=ones, receive_sizes=ones, label=label + " sizes").tolist()
    return _AllToAll.apply(x, axis, send_sizes, receive_sizes, label)  # type: ignore[no-any-return, no-untyped-call]


def _sizes_of(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> list[int]:
    """How ``x``, whole along ``dim``, is divided."""
    sizes = list(sizes) if sizes is not None else list(split_sizes(x.shape[dim], axis.size))
    if len(sizes) != axis.size or sum(sizes) != x.shape[dim]:
        raise ValueError(f"sizes {sizes} must divide {x.shape[dim]} among {axis.size} ranks ({axis.name})")
    return sizes


def _lengths(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> list[int]:
    """The lengths along ``dim`` of all ranks' ``x``, asked of them where the caller does not say."""
    if sizes is not None or not axis.communicates:
        return list(sizes) if sizes is not None else [x.shape[dim]]
    mine = torch.tensor([x.shape[dim]], dtype=torch.int64, device=x.device)
    return [int(n) for n in all_gather(mine, axis, sizes=[1] * axis.size, label="sizes").tolist()]


def _gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], label: str) -> Tensor:
    return all_gather_along(x, axis, dim, sizes, label=label).wait()


def _scatter_sum(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], label: str) -> Tensor:
    return reduce_scatter_along(x, axis, dim, sizes, label=label).wait()


def _part(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    mine: Tensor = x.split(list(sizes), dim)[axis.rank]
    return mine.contiguous()


class _IdentityAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce_fwd_identity_bwd(grad, ctx.axis, label=ctx.label), None, None


class _AllReduceIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        total = all_reduce(x, axis, label=label)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return identity_fwd_all_reduce_bwd(grad, ctx.axis, label=ctx.label), None, None


class _AllReduceAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        total = all_reduce(x, axis, label=label)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce_fwd_all_reduce_bwd(grad, ctx.axis, label=ctx.label), None, None


class _SplitAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None, label: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.label = axis, dim, label
        ctx.sizes = _sizes_of(x, axis, dim, sizes)
        return _part(x, axis, dim, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = all_gather_fwd_split_bwd(grad, ctx.axis, ctx.dim, sizes=ctx.sizes, label=ctx.label)
        return back, None, None, None, None


class _AllGatherSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None, label: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.label = axis, dim, label
        ctx.sizes = _lengths(x, axis, dim, sizes)
        return _gather(x, axis, dim, ctx.sizes, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = split_fwd_all_gather_bwd(grad, ctx.axis, ctx.dim, sizes=ctx.sizes, label=ctx.label)
        return back, None, None, None, None


class _AllGatherReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None, label: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.label = axis, dim, label
        lengths = ctx.sizes = _lengths(x, axis, dim, sizes)
        return once(lambda: _gather(x, axis, dim, lengths, label))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = reduce_scatter_fwd_all_gather_bwd(grad, ctx.axis, ctx.dim, sizes=ctx.sizes, label=ctx.label)
        return back, None, None, None, None


class _ReduceScatterAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None, label: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.label = axis, dim, label
        ctx.sizes = _sizes_of(x, axis, dim, sizes)
        return _scatter_sum(x, axis, dim, ctx.sizes, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = all_gather_fwd_reduce_scatter_bwd(grad, ctx.axis, ctx.dim, sizes=ctx.sizes, label=ctx.label)
        return back, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], label: str) -> Tensor:
        ctx.axis, ctx.send, ctx.receive, ctx.label = axis, send, receive, label
        out = once(lambda: all_to_all(x, axis, send_sizes=send, receive_sizes=receive, label=label))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = all_to_all_fwd_all_to_all_bwd(
            grad, ctx.axis, send_sizes=ctx.receive, receive_sizes=ctx.send, label=ctx.label
        )
        return back, None, None, None, None
