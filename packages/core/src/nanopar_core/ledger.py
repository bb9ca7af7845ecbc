"""``ledger()``: every collective of this process, with operation, axis, bytes sent, dtype and call site.

    collectives.py --record--> Ledger --totals()----> {(op, axis): calls, bytes}
                           |          --by_site()---> {(op, axis, label or file:line): calls, bytes}
                           |          --print()-----> a table
                           +-> other observers: launch's flight recorder, debug mode's comparison

Bytes are those that this rank sends, modelled from the algorithm that collectives.py chose (listed there); on gloo a
test compares them with what the process really wrote. Without any observer a collective pays one ``if``.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol, TypeVar

import torch

from nanopar_core.mesh import Axis

K = TypeVar("K", bound=Hashable)
Kind = TypeVar("Kind")

_HERE = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep

# Whoever wants to know of collectives. Process-wide on purpose: autograd runs backward hooks in threads of its own.
_observers: list[Observer] = []


@dataclass(frozen=True)
class Record:
    """One collective on this rank; ``bytes`` is what this rank sends."""

    op: str
    axis: str
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    label: str
    site: str


class Observer(Protocol):
    """Told of every collective just before it is issued."""

    def __call__(self, record: Record, axis: Axis, /) -> None:
        """Take note, or raise to prevent it."""


@dataclass(frozen=True)
class Total:
    """Sum over several collectives: number of calls, and bytes that this rank sent."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Total) -> Total:
        return Total(self.calls + other.calls, self.bytes + other.bytes)


@dataclass
class Ledger:
    """The records of one ``with ledger()`` block, in the order in which the collectives were issued."""

    records: list[Record] = field(default_factory=list)

    def __call__(self, record: Record, _axis: Axis) -> None:
        """Observe one collective."""
        self.records.append(record)

    def totals(self) -> dict[tuple[str, str], Total]:
        """Calls and bytes by (op, axis name)."""
        return self._sum(lambda record: (record.op, record.axis))

    def by_site(self) -> dict[tuple[str, str, str], Total]:
        """Calls and bytes by (op, axis name, label where the caller gave one, else file:line of the caller)."""
        return self._sum(lambda record: (record.op, record.axis, record.label or record.site))

    def clear(self) -> None:
        """Forget the records so far, for instance at the start of a training step."""
        self.records.clear()

    def _sum(self, key: Callable[[Record], K]) -> dict[K, Total]:
        sums: dict[K, Total] = defaultdict(Total)
        for record in self.records:
            sums[key(record)] += Total(1, record.bytes)
        return dict(sums)

    def __str__(self) -> str:
        rows = [
            (op, axis, str(total.calls), f"{total.bytes:,}", site) for (op, axis, site), total in self.by_site().items()
        ]
        table = [("op", "axis", "calls", "bytes sent", "where"), *rows]
        widths = [max(len(row[column]) for row in table) for column in range(5)]
        lines = (
            f"{op:<{widths[0]}}  {axis:<{widths[1]}}  {calls:>{widths[2]}}  {sent:>{widths[3]}}  {where}".rstrip()
            for op, axis, calls, sent, where in table
        )
        return "\n".join(lines)

    def print(self) -> None:
        """Print the table by call site."""
        print(self)


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Record the collectives of this process while the block runs; blocks may be nested, each records on its own.

    Example:
        >>> import nanopar_core as core
        >>> with core.ledger() as book:
        ...     pass  # collectives
        >>> book.totals()
        {}
    """
    book = Ledger()
    with observing(book):
        yield book


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of this process's collectives while the block runs."""
    _observers.append(observer)
    try:
        yield
    finally:
        # by identity: two ledgers with the same records are equal
        del _observers[next(i for i, other in enumerate(_observers) if other is observer)]


def observer_of(kind: type[Kind]) -> Kind | None:
    """The observer of that kind, if one is there."""
    return next((observer for observer in _observers if isinstance(observer, kind)), None)


def record(op: str, axis: Axis, sent: int, dtype: torch.dtype, shape: Sequence[int], label: str) -> None:
    """Tell every observer of one collective; ``sent`` is in bytes, ``shape`` that of this rank's tensor."""
    if not _observers:
        return
    kind = str(dtype).removeprefix("torch.")
    entry = Record(op, axis.name, sent, kind, tuple(shape), label, _call_site(sys._getframe(1)))
    for observer in tuple(_observers):
        observer(entry, axis)


def _call_site(frame: FrameType | None) -> str:
    """``file.py:line`` of the innermost caller outside core and torch."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_HERE, _TORCH)):
            return f"{os.path.basename(filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"
