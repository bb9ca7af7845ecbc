"""Pure: which parameter lies where in which flat buffer.

    backward finishes gradients roughly from the last parameter to the first, so buckets are filled in that order:

    parameters in model order   p0   p1   p2   p3   p4   p5
    buckets, in reduction order [p5 p4] [p3 p2] [p1 p0]           a bucket is closed when it has bucket_bytes
    one bucket's flat buffer    |p4......|pad|p5....|pad|.pad.|   runs of one optimizer group lie together
                                 `- group 0 -' `- group 1 ----'
    its parts on 2 ranks        |- of rank 0 ---|- of rank 1 -|   equally long; a cut may go through a parameter

A bucket of stage 3 holds the parameters of one unit, whatever their size; it is gathered and freed at once. All ranks
compute the same layout from the same names, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
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

    @property
    def gaps(self) -> Iterator[slice]:
        """The padding."""
        end = 0
        for slot in self.slots:
            if slot.start > end:
                yield slice(end, slot.start)
            end = slot.start + slot.numel
        if self.length > end:
            yield slice(end, self.length)

    def runs_within(self, start: int, stop: int) -> list[Run]:
        """What of the runs lies between two elements: a rank's part of them."""
        cut = (Run(run.group, max(run.start, start), min(run.stop, stop)) for run in self.runs)
        return [run for run in cut if run.start < run.stop]


def bucket_layouts(
    items: Sequence[Item],
    bytes_of: Callable[[Hashable], float],
    parts_of: Callable[[Hashable], int] = lambda _key: 1,
) -> list[BucketLayout]:
    """Divide the parameters, given in model order, into buckets in the order in which backward completes them.

    ``bytes_of(key)``: a bucket with so much is closed. ``parts_of(key)``: the number of ranks among which a bucket is
    divided: its length is a multiple of that.
    """
    open_buckets: dict[Hashable, list[Item]] = {}
    filled: dict[Hashable, int] = {}
    closed: list[list[Item]] = []
    for item in reversed(items):
        open_buckets.setdefault(item.key, []).append(item)
        filled[item.key] = filled.get(item.key, 0) + item.shape.numel() * item.itemsize
        if filled[item.key] >= bytes_of(item.key):
            closed.append(open_buckets.pop(item.key))
            filled[item.key] = 0
    closed.extend(open_buckets.values())
    return [_place(bucket, parts_of(bucket[0].key)) for bucket in closed]


def _place(items: Sequence[Item], parts: int) -> BucketLayout:
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
    multiple = ALIGNMENT * parts
    length = max(-(-end // multiple), parts > 1) * multiple  # a divided bucket is never empty
    last = runs.pop()
    runs.append(Run(last.group, last.start, length))
    return BucketLayout(tuple(slots), tuple(runs), length)
