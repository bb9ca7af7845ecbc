"""``all_gather`` and ``reduce_scatter`` along any dim, with at most one copy beside what the collective does.

    [B, s, D] of each rank --flat, one after the other--> [N][B, s, D] --one copy, none where B is 1--> [B, S, D]

Shapes: B whatever is before the dim, s a rank's length along it, S the sum of these, D whatever comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from nanopar_core.collectives import Pending, all_gather, reduce_scatter
from nanopar_core.mesh import Axis


def all_gather_along(part: Tensor, axis: Axis, dim: int, sizes: Sequence[int], *, label: str = "") -> Pending[Tensor]:
    """The ranks' parts put together along ``dim``; ``sizes``: their lengths by rank."""
    dim %= part.dim()
    lengths = _lengths(part, dim, sizes)
    flat = all_gather(part.reshape(-1), axis, sizes=lengths, label=label, async_op=True)
    shape = (*part.shape[:dim], sum(sizes), *part.shape[dim + 1 :])
    if prod(part.shape[:dim]) == 1:
        return replace(flat, result=flat.result.view(shape))
    whole = part.new_empty(shape)

    def finish() -> None:
        pieces = zip(flat.wait().split(lengths), sizes, strict=True)
        of_ranks = [piece.view(*part.shape[:dim], size, *part.shape[dim + 1 :]) for piece, size in pieces]
        torch.cat(of_ranks, dim, out=whole)

    return Pending(whole, finish=finish)


def reduce_scatter_along(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], *, label: str = "") -> Pending[Tensor]:
    """This rank's part along ``dim`` of the sum of the ranks' ``x``; ``sizes``: lengths of the parts by rank."""
    dim %= x.dim()
    lengths = _lengths(x, dim, sizes)
    flat = x.reshape(-1)
    if prod(x.shape[:dim]) != 1:
        flat = torch.cat([part.reshape(-1) for part in x.split(list(sizes), dim)])
    pending = reduce_scatter(flat, axis, sizes=lengths, label=label, async_op=True)
    mine = pending.result.view(*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :])
    return replace(pending, result=mine)


def _lengths(x: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    around = prod(x.shape[:dim]) * prod(x.shape[dim + 1 :])
    return [size * around for size in sizes]
