"""Debug mode: before each collective its ranks compare what they are about to do, so that a mix-up is named, not hung.

    each rank --"#41 reduce_scatter float32 [64] 'layers.8'"--> the job's store --read by all ranks--> equal?
      no, or a rank does not come in time: every rank raises, and says who is where

Switched on by ``NANOPAR_DEBUG=1`` or ``launch(debug=True)``; works with every backend, since the store is torchrun's.
A comparison takes a fraction of a millisecond. Point-to-point messages are not compared beforehand (that would make a
rank wait for a message that it must not wait for yet): each carries a header, which the receiver checks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from nanopar_core.flight_recorder import FlightRecorder, describe
from nanopar_core.ledger import Record
from nanopar_core.mesh import Axis

HEADER_BYTES = 256
HEADER_TAG = 1  # headers and contents between two ranks are two streams on gloo
# What ranks must agree on of a tensor's shape: all of it, or all but the divided dim 0.
_WHOLE_SHAPE = ("all_reduce", "reduce_scatter", "broadcast")


class CollectiveMismatchError(RuntimeError):
    """Ranks of an axis issued different collectives, or one did not come; the message says which rank is where."""


class Comparison:
    """Compares every collective of this rank with those of the other ranks of its axis.

    Args:
        store: a connection of its own to the job's store.
        rank: this rank in the world.
        recorder: numbers the collectives; must observe before this one.
        timeout_s: how long to wait for a rank that has not come.
    """

    def __init__(self, store: Store, rank: int, recorder: FlightRecorder, timeout_s: float) -> None:
        self._store, self._rank, self._recorder, self.timeout_s = store, rank, recorder, timeout_s
        self._kept: list[tuple[dist.Work, Sequence[Tensor]]] = []

    def __call__(self, record: Record, axis: Axis) -> None:
        """Raise ``CollectiveMismatchError`` unless all ranks of the axis are about to do the same."""
        if axis.size == 1 or record.op == "send_recv":
            return
        number, ranks = self._recorder.number(axis), axis.ranks
        place = f"compare/{axis.name}/{'-'.join(map(str, ranks))}"
        here = describe(number, record)
        shape = record.shape if record.op in _WHOLE_SHAPE else record.shape[1:]
        said = json.dumps([[record.op, list(shape), record.dtype, record.label], here])
        self._store.set(f"at/{self._rank}", here)
        self._store.set(f"{place}/{number}/{self._rank}", said)
        keys = {rank: f"{place}/{number}/{rank}" for rank in ranks}
        missing = self._wait(keys)
        if missing:
            raise CollectiveMismatchError(self._missing_ranks(here, ranks, missing))
        heard = {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}
        # All have come to this one, so nobody reads the one before the last any more.
        self._store.delete_key(f"{place}/{number - 2}/{self._rank}")
        if any(signature != heard[ranks[0]][0] for signature, _ in heard.values()):
            raise CollectiveMismatchError(_sentence({rank: text for rank, (_, text) in heard.items()}))

    def keep(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        """Hold messages and their tensors until they are sent."""
        self._kept = [entry for entry in self._kept if not entry[0].is_completed()]
        self._kept += [(work, tensors) for work in works]

    def flush(self) -> None:
        """Before this rank leaves: let its last messages arrive, as far as their receivers still want them."""
        for work, _ in self._kept:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=self.timeout_s))
        self._kept.clear()

    def _wait(self, keys: Mapping[int, str]) -> list[int]:
        """Wait for all ranks; those that did not come in time, or before another failure of the job."""
        started = time.monotonic()
        while True:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            waited = time.monotonic() - started
            if not missing or waited > self.timeout_s or (waited > 1 and self._store.check(["failure"])):
                return missing
            time.sleep(min(0.0002 + waited / 20, 0.05))

    def _missing_ranks(self, here: str, ranks: Sequence[int], missing: Sequence[int]) -> str:
        waiting = {rank: here for rank in ranks if rank not in missing}
        places = []
        for rank in missing:
            known = self._store.check([f"at/{rank}"])
            place = self._store.get(f"at/{rank}").decode() if known else "no collective yet"
            places.append(f"rank {rank} did not come within {self.timeout_s:g} s, it was last at {place}")
        return "; ".join(places) + "; " + _sentence(waiting, verb="wait in")


def _sentence(places: Mapping[int, str], verb: str = "at") -> str:
    """``rank 1 is at #41 all_gather ...; ranks 0, 2 are at #41 reduce_scatter ...``: the smallest party first."""
    parties: dict[str, list[int]] = {}
    for rank, place in places.items():
        parties.setdefault(place, []).append(rank)
    words = []
    for place, ranks in sorted(parties.items(), key=lambda item: (len(item[1]), item[1])):
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        is_or_are = "is" if len(ranks) == 1 else "are"
        doing = f"{is_or_are} at" if verb == "at" else ("waits in" if len(ranks) == 1 else "wait in")
        words.append(f"{who} {doing} {place}")
    return "; ".join(words)


# -------------------------------------------------------------------------------------------- point to point


def header(tensor: Tensor, label: str) -> Tensor:
    """What travels before a message: its dtype, shape and label, in ``HEADER_BYTES`` bytes."""
    text = json.dumps([str(tensor.dtype), list(tensor.shape), label[:80]]).encode()[:HEADER_BYTES]
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8).to(tensor.device)


def check_header(received: Tensor, buffer: Tensor, label: str, sender: int, axis: Axis) -> None:
    """Raise ``CollectiveMismatchError`` where the message to come does not fit the buffer made for it."""
    expected = header(buffer, label)
    if torch.equal(received, expected):
        return
    came, wanted = (bytes(h.tolist()).rstrip(b"\0").decode() for h in (received.cpu(), expected.cpu()))
    raise CollectiveMismatchError(
        f"rank {axis.rank} of {axis.name} expects from rank {sender} a message {wanted}, and that rank sends {came}"
    )
