"""Which part of a parameter a rank holds, boxes of it for checkpoints, and whole parameters out of the parts.

plain        [ 0 1 2 3 4 5 6 7 ]  on 2 ranks   [ 0 1 2 3 ] [ 4 5 6 7 ]
sections     [ g g g g|u u u u ]               [ g g|u u ] [ g g|u u ]     gate and up, divided one by one
sizes (3, 2) [ 0 1 2 3 4 ]                     [ 0 1 2 ]   [ 3 4 ]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanopar_core.collectives import all_gather
from nanopar_core.grid import split_sizes
from nanopar_core.specs import ParamSpec, Shard


def part_of(full: Tensor, spec: ParamSpec) -> Tensor:
    """This rank's part of a whole parameter: a copy, contiguous; ``full`` itself where nothing divides it."""
    for shard in spec.shards:
        full = take(full, shard.dim, own_places(shard, full.shape[shard.dim]))
    return full


def take(tensor: Tensor, dim: int, places: Sequence[range]) -> Tensor:
    """What lies at some ranges of a dim, one after the other: a copy."""
    return torch.cat([tensor.narrow(dim, at.start, len(at)) for at in places], dim)


def own_places(shard: Shard, length: int) -> list[range]:
    """Where this rank's pieces lie along the dim, ``length`` long as a whole: one in each section."""
    places, start = [], 0
    for section in shard.sections or (length,):
        sizes = shard.sizes or split_sizes(section, shard.axis.size)
        first = start + sum(sizes[: shard.axis.rank])
        places.append(range(first, first + sizes[shard.axis.rank]))
        start += section
    return places


def whole_shape(part: Tensor, spec: ParamSpec) -> tuple[int, ...]:
    """The shape of the parameter that ``part`` is this rank's part of."""
    shape = list(part.shape)
    for shard in spec.shards:
        if shard.sections is not None:
            shape[shard.dim] = sum(shard.sections)
        elif shard.sizes is not None:
            shape[shard.dim] = sum(shard.sizes)
        else:
            shape[shard.dim] *= shard.axis.size
    return tuple(shape)


def places_of_part(shape: tuple[int, ...], spec: ParamSpec) -> list[list[range]]:
    """By dim, the ranges of a whole parameter of ``shape`` that this rank's part consists of.

    Raises:
        ValueError: two shards divide one dim.
    """
    places = [[range(length)] for length in shape]
    for shard in spec.shards:
        if places[shard.dim] != [range(shape[shard.dim])]:
            raise ValueError(f"two shards divide dim {shard.dim}: such a parameter cannot be read in parts")
        places[shard.dim] = own_places(shard, shape[shard.dim])
    return places


def places_of(model: nn.Module, specs: Mapping[str, ParamSpec]) -> dict[str, list[list[range]]]:
    """``places_of_part`` of all parameters of a divided model that have specs."""
    every = dict(model.named_parameters(remove_duplicate=False))
    return {name: places_of_part(whole_shape(every[name], spec), spec) for name, spec in specs.items()}


class Box(NamedTuple):
    """Consecutive elements ``start`` to ``stop`` of a flat tensor, and where they lie in the whole: a range by dim."""

    start: int
    stop: int
    ranges: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length by dim."""
        return tuple(len(one) for one in self.ranges)


def boxes(places: Sequence[Sequence[range]], start: int, stop: int) -> list[Box]:
    """The elements ``start`` to ``stop`` of a flat part, cut into boxes of the whole.

    Args:
        places: by dim, the ranges of the whole that the part consists of (``places_of_part``).
    """
    return list(_boxes(places, (), 0, start, stop))


def _boxes(
    places: Sequence[Sequence[range]], outer: tuple[range, ...], first: int, start: int, stop: int
) -> Iterator[Box]:
    """Those of what lies at ``outer`` in the dims before, and begins with element ``first`` of the part."""
    if not places:
        if start <= first < stop:
            yield Box(first, first + 1, outer)
        return
    inner = places[1:]
    row = prod(sum(map(len, of_dim)) for of_dim in inner)
    is_block = all(len(of_dim) == 1 for of_dim in inner)
    for piece in places[0]:
        low, high = max(start - first, 0), min(stop - first, len(piece) * row)
        index = low // row if row else 0
        while index * row < high:
            last = high // row
            if is_block and index * row >= low and last > index:  # whole rows, together
                rows = range(piece.start + index, piece.start + last)
                yield Box(first + index * row, first + last * row, (*outer, rows, *(of_dim[0] for of_dim in inner)))
                index = last
            else:
                one = range(piece.start + index, piece.start + index + 1)
                yield from _boxes(inner, (*outer, one), first + index * row, start, stop)
                index += 1
        first += len(piece) * row


def whole_parameter(part: Tensor, spec: ParamSpec, *, label: str = "") -> Tensor:
    """The whole parameter out of the parts of all ranks, on every rank; collective along the axes of its shards."""
    for shard in reversed(spec.shards):
        part = _joined(part, shard, label)
    return part


def split_state_dict(state_dict: Mapping[str, Tensor], specs: Mapping[str, ParamSpec]) -> dict[str, Tensor]:
    """This rank's part of whole weights, for ``load_state_dict`` of a divided model."""
    return {name: part_of(value, specs.get(name, ParamSpec())) for name, value in state_dict.items()}


def merge_state_dict(state_dict: Mapping[str, Tensor], specs: Mapping[str, ParamSpec]) -> dict[str, Tensor]:
    """Whole weights out of the ranks' parts, on every rank; all of them call it. What is not divided is not copied."""
    return {
        name: whole_parameter(value, specs.get(name, ParamSpec()), label=name) for name, value in state_dict.items()
    }


def _joined(part: Tensor, shard: Shard, label: str) -> Tensor:
    size, dim = shard.axis.size, shard.dim
    lengths = list(shard.sizes or [part.shape[dim]] * size)
    rows = all_gather(part.movedim(dim, 0).contiguous(), shard.axis, sizes=lengths, label=label)
    parts = rows.split(lengths)
    if shard.sections:
        local = [section // size for section in shard.sections]
        of_ranks = [piece.split(local) for piece in parts]
        rows = torch.cat([of_rank[number] for number in range(len(local)) for of_rank in of_ranks])
    return rows.movedim(0, dim).contiguous()
