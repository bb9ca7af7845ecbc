"""Collectives whose parts are made, or used, one after the other, while others travel.

    sum_parts      rank 1 of 3:  make(2) --send-->  make(0) --send-->  make(1), its own     + what the others send
    gather_parts                 its own part is there at once, those of the others when they arrive

A product before a reduce-scatter, or after an all-gather, so overlaps with it: "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models" (Wang et al., ASPLOS 2023). The same bytes as the plain
collectives, as point-to-point messages.

Shapes: dim -2 is the divided one, ``sizes`` the lengths along it by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanopar_core.collectives import Pending, combine, exchange, send_to_all
from nanopar_core.ledger import record
from nanopar_core.mesh import Axis


@torch.no_grad()
def gather_parts(part: Tensor, axis: Axis, sizes: Sequence[int], *, label: str = "") -> Pending[list[Tensor]]:
    """The parts ``[.., sizes[i], D]`` of all ranks, in rank order; this rank's own is ``part`` itself."""
    if not axis.communicates:
        return Pending([part])
    part = part.contiguous()
    shapes = [(*part.shape[:-2], size, part.shape[-1]) for size in sizes]
    parts = [part if rank == axis.rank else part.new_empty(shape) for rank, shape in enumerate(shapes)]
    sent = part.numel() * part.element_size() * (axis.size - 1)
    record("all_gather", axis, sent, part.dtype, part.shape, label)
    return Pending(parts, send_to_all(part, parts, axis), [part])


@torch.no_grad()
def sum_parts(make: Callable[[int], Tensor], axis: Axis, sizes: Sequence[int], *, label: str = "") -> Pending[Tensor]:
    """This rank's part ``[.., sizes[rank], D]`` of the sum of what the ranks make.

    ``make(i)`` gives this rank's summand ``[.., sizes[i], D]`` of rank i's part; it is called for the others first:
    while the last one is made the others travel.
    """
    if not axis.communicates:
        return Pending(make(axis.rank))
    works, kept, arriving = [], [], []
    for step in range(1, axis.size):
        to, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        summand = make(to).contiguous()
        if step == 1:
            wide = summand.numel() // max(1, sizes[to]) * summand.element_size()
            shape = (*summand.shape[:-2], sum(sizes), summand.shape[-1])
            sent = wide * (sum(sizes) - sizes[axis.rank]) if sizes[to] else 0
            record("reduce_scatter", axis, sent, summand.dtype, shape, label)
        received = summand.new_empty(*summand.shape[:-2], sizes[axis.rank], summand.shape[-1])
        works += exchange([(summand, to)], [(received, source)], axis)
        kept.append(summand)
        arriving.append(received)
    own = make(axis.rank)
    return Pending(own, works, [*kept, *arriving], lambda: combine(own, arriving, "sum", own))
