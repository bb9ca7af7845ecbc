"""The last collectives of this rank, so that a job that fails or hangs can say where every rank was.

    collectives.py --record--> FlightRecorder (the last 64, in memory) --position()--> "#41 all_gather on dp 'layers.7'
                                                                        float32 [128] from layers.py:88"

Every ``launch`` has one. When a rank fails, or a collective runs into the time-out, each rank leaves its position in
the job's store, and the rank that failed first prints them all (launch.py).
"""

from __future__ import annotations

from collections import Counter, deque

from nanopar_core.ledger import Record
from nanopar_core.mesh import Axis

LENGTH = 64


class FlightRecorder:
    """Numbers the collectives of each axis and keeps the last ones."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._last: deque[tuple[int, Record]] = deque(maxlen=LENGTH)

    def __call__(self, record: Record, axis: Axis) -> None:
        """Take note of a collective that is about to be issued."""
        self._numbers[axis.name] += 1
        self._last.append((self._numbers[axis.name], record))

    def number(self, axis: Axis) -> int:
        """How many collectives this rank has issued on axes of this name."""
        return self._numbers[axis.name]

    def position(self) -> str:
        """The last collective that this rank issued."""
        return describe(*self._last[-1]) if self._last else "no collective yet"

    def history(self) -> list[str]:
        """The last collectives, oldest first."""
        return [describe(*entry) for entry in self._last]


def describe(number: int, record: Record) -> str:
    """One collective in words."""
    label = f" '{record.label}'" if record.label else ""
    return f"#{number} {record.op} on {record.axis}{label} {record.dtype} {list(record.shape)} from {record.site}"
