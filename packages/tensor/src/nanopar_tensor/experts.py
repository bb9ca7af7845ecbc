"""Experts of a mixture under tensor parallelism: every rank has all experts, and of each one some of its width.

    hidden [T, D], weights [T, k], the same on all ranks
      |  experts(hidden, indices, weights) on this rank's width     forward: one all_reduce of the output
      v                                                             backward: one all_reduce of both gradients at once
    output [T, D], summed

The router is not divided: all ranks run it on bit-identical inputs (what precedes it ends in an all_reduce, which gives
every rank the same bits) and so take the same decision.

Shapes: T tokens, k experts per token, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nanopar_core import Axis, all_reduce
from nanopar_core.recompute import once


def sum_over_ranks(experts: nn.Module, axis: Axis, label: str) -> None:
    """Have a module ``experts(hidden [T, D], indices [T, k], weights [T, k]) -> [T, D]`` work on a part of the width.

    Its parameters are this rank's parts already. The collectives are its hooks, so that all names stay.
    """

    def enter(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, indices, weights = args
        hidden, weights = _Entry.apply(hidden, weights, axis, label)  # type: ignore[no-untyped-call]
        return hidden, indices, weights

    def leave(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return _Exit.apply(output, axis, label)  # type: ignore[no-any-return, no-untyped-call]

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(leave)


class _Entry(torch.autograd.Function):
    """Forward: both inputs. Backward: both gradients summed over the ranks, in one message."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, axis: Axis, label: str) -> tuple[Tensor, Tensor]:
        ctx.axis, ctx.label, ctx.width = axis, label, hidden.shape[-1]
        ctx.dtypes = hidden.dtype, weights.dtype
        return hidden.view_as(hidden), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_hidden: Tensor, of_weights: Tensor) -> tuple[Tensor, Tensor, None, None]:
        wide = torch.promote_types(*ctx.dtypes)
        both = torch.cat([of_hidden.to(wide), of_weights.to(wide)], dim=-1)
        both = all_reduce(both, ctx.axis, out=both, label=ctx.label)
        hidden, weights = both.split([ctx.width, both.shape[-1] - ctx.width], dim=-1)
        return hidden.to(ctx.dtypes[0]), weights.to(ctx.dtypes[1]), None, None


class _Exit(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: the gradient as it is."""

    @staticmethod
    def forward(_ctx: Any, output: Tensor, axis: Axis, label: str) -> Tensor:
        return once(lambda: all_reduce(output, axis, label=label))

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None
