"""Pure: which parameter lies where in which flat buffer.

    backward finishes gradients roughly from the last parameter to the first, so buckets are filled in that order:

    parameters in model order   p0   p1   p2   p3   p4   p5
    buckets, in reduction order [p5 p4] [p3 p2] [p1 p0]           a bucket is closed when it has bucket_bytes
    one bucket's flat buffer    |p4......|pad|p5....|pad|         runs of one optimizer group lie together
                                 `- group 0 -' `- group 1 -'

All ranks compute the same layout from the same names, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = (
    32  # elements; a parameter starts at a multiple of 64 bytes in 16-bit, 128 in 32-bit: vector kernels need it
)


@dataclass(frozen=True)
class Item:
    """What the layout must know of one parameter; ``key`` is equal for parameters that may share a bucket."""

    name: str
    shape: torch.Size
    itemsize: int
    group: int
    key: Hashable


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements ``start`` to ``start + numel`` of its bucket."""

    item: Item
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.item.shape.numel()


@dataclass(frozen=True)
class Run:
    """Elements ``start`` to ``stop`` of a bucket, all of one optimizer group (padding included)."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """One flat buffer: slots in buffer order, runs of equal optimizer group, total length in elements."""

    slots: tuple[Slot, ...]
    runs: tuple[Run, ...]
    length: int


def bucket_layouts(items: Sequence[Item], bucket_bytes: int) -> list[BucketLayout]:
    """Divide the parameters, given in model order, into buckets in the order in which backward completes them."""
    open_buckets: dict[Hashable, list[Item]] = {}
    filled: dict[Hashable, int] = {}
    closed: list[list[Item]] = []
    for item in reversed(items):
        open_buckets.setdefault(item.key, []).append(item)
        filled[item.key] = filled.get(item.key, 0) + item.shape.numel() * item.itemsize
        if filled[item.key] >= bucket_bytes:
            closed.append(open_buckets.pop(item.key))
            filled[item.key] = 0
    closed.extend(open_buckets.values())
    return [_place(bucket) for bucket in closed]


def _place(items: Sequence[Item]) -> BucketLayout:
    slots: list[Slot] = []
    runs: list[Run] = []
    end = 0
    in_model_order = items[::-1]
    for item in sorted(in_model_order, key=lambda item: item.group):
        slots.append(Slot(item, end))
        start, end = end, end + -(-item.shape.numel() // ALIGNMENT) * ALIGNMENT
        if runs and runs[-1].group == item.group:
            start = runs.pop().start
        runs.append(Run(item.group, start, end))
    return BucketLayout(tuple(slots), tuple(runs), end)
