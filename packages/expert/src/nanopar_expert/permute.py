"""Rows of tokens in the order of their experts, and back, without atomics: each move is the other's gradient.

    T tokens x k experts = pairs          sort, stable, by expert
    row        0   1   2   3   4   5
    expert     0   0   0   1   2   2      ends = [3, 4, 6]: where each expert's rows end
    token      2   5   7   0   1   4      which token a row is of
    places [T, k]                         in which row a pair is; the number of rows, for a pair that is left out

A pair whose index is not that of an expert (below 0, or ``num_experts`` and above) is left out.

Shapes: T tokens, k experts per token, P rows, E experts, D hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class Order(NamedTuple):
    """Pairs sorted by expert; those left out come last.

    ``pairs`` ``[T*k]``: row -> pair; ``places`` ``[T, k]``: pair -> row; ``ends`` ``[E]``, int32.
    """

    pairs: Tensor
    places: Tensor
    ends: Tensor


def sort_by_expert(indices: Tensor, num_experts: int) -> Order:
    """The order of ``indices`` ``[T, k]``; the same in every run, no host sync."""
    chosen = indices.reshape(-1)
    experts, pairs = torch.sort(chosen.where(chosen >= 0, num_experts), stable=True)
    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(pairs.numel(), device=pairs.device))
    every = torch.arange(num_experts, device=pairs.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    return Order(pairs, places.view(indices.shape), ends)


def counts_of(ends: Tensor) -> Tensor:
    """Rows of each expert ``[E]``, int64."""
    return ends.diff(prepend=ends.new_zeros(1)).long()


def sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    """``[T, D]``: for each token the sum of its k rows ``[P, D]``; a bag is that, in one pass, summed in fp32."""
    return F.embedding_bag(places, rows, mode="sum")


def gather_tokens(x: Tensor, order: Order) -> Tensor:
    """Rows ``[T*k, D]`` of tokens ``[T, D]``, with a gradient."""
    return _Gather.apply(x, order.pairs // order.places.shape[1], order.places)  # type: ignore[no-any-return, no-untyped-call]


def gather_pairs(weights: Tensor, order: Order) -> Tensor:
    """Rows ``[T*k, 1]`` of the pairs' values ``[T, k]``, with a gradient."""
    places = order.places.view(-1, 1)
    return _Gather.apply(weights.reshape(-1, 1), order.pairs, places)  # type: ignore[no-any-return, no-untyped-call]


def sum_tokens(rows: Tensor, order: Order) -> Tensor:
    """``[T, D]``: the sum of each token's rows ``[T*k, D]``, with a gradient."""
    return _Sum.apply(rows, order.pairs // order.places.shape[1], order.places)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return sum_rows(grad, places), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        return sum_rows(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (sources,) = ctx.saved_tensors
        return grad.index_select(0, sources), None, None
