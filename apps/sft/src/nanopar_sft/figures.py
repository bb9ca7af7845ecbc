"""From what the ranks of a candidate saw to its row: medians over turns, the worst over ranks, floors beside them.

a turn    candidate's step, local step, collectives      wall: the slowest rank's      CPU: of all ranks together
ratio     local / candidate                              1.00: communication and bookkeeping cost nothing
floor     local / (local + collectives)                  nothing hidden, nothing wasted
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nanopar_sft.candidates import LOCAL, Candidate
from nanopar_sft.config import Config
from nanopar_sft.measure import Clock, Report


@dataclass(frozen=True)
class Row:
    """One line of the comparison. Figures are None where the candidate did not run, or where they have no meaning.

    Attributes:
        strategy: the candidate's name.
        kind: "local", "nanopar" or "peer".
        problem: why there are no figures; ``failed`` tells a failure from a package that is not installed.
        tokens_per_second: of all ranks together.
        wall_ratio, cpu_ratio: local / candidate, medians over the turns; ``..._range``: least and largest.
        bytes_sent: what the rank that sends most handed to the system in a step (without /proc: the model's bytes).
        bytes_modelled: what nanopar's ledger says for the same; None for peers.
        peak_memory_bytes, live_memory_bytes: tensors on the fullest rank: the most in a step, and after it.
        loss_difference: largest difference to plain training in one process, over all steps.
        differs: why the losses are not compared: another model is trained, such as one with the library's own router.
        calls: collectives in a step, by kind.
        reports: everything that the ranks recorded.
        ..._floor: what no implementation of the strategy can do without (floors.py).
    """

    strategy: str
    kind: str
    problem: str | None = None
    failed: bool = False
    tokens_per_second: float | None = None
    wall_ratio: float | None = None
    wall_ratio_range: tuple[float, float] | None = None
    wall_ratio_floor: float | None = None
    cpu_ratio: float | None = None
    cpu_ratio_range: tuple[float, float] | None = None
    cpu_ratio_floor: float | None = None
    bytes_sent: int | None = None
    bytes_sent_floor: int | None = None
    bytes_modelled: int | None = None
    peak_memory_bytes: int | None = None
    peak_memory_bytes_floor: int | None = None
    live_memory_bytes: int | None = None
    loss_difference: float | None = None
    loss_difference_floor: float | None = None
    differs: str | None = None
    calls: dict[str, int] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)


def row_of(
    name: str,
    candidate: Candidate,
    config: Config,
    reports: Sequence[Report],
    reference_losses: Sequence[float] | None,
    activation_bytes: int | None,
) -> Row:
    """The row of a candidate that ran.

    Args:
        reports: one per rank.
        reference_losses: of plain training in one process, per step.
        activation_bytes: as plain local training measured it, for the floor of memory.
    """
    ranks, needs, sizes = len(reports), candidate.needs, reports[0].sizes
    walls = _Turns(reports, "wall", max)
    cpus = _Turns(reports, "cpu", sum)
    modelled = [report.bytes_modelled for report in reports if report.bytes_modelled is not None]
    written = [_median_written(report) for report in reports]
    sent = [size for size in written if size is not None] or modelled
    losses = [statistics.fmean(each) for each in zip(*(report.losses for report in reports), strict=True)]
    same_training = reference_losses is not None and candidate.differs is None and (name != LOCAL or ranks == 1)
    memory_floor = None
    if activation_bytes is not None:
        memory_floor = needs.memory_bytes(sizes, ranks, activation_bytes)
    return Row(
        strategy=name,
        kind=candidate.kind,
        tokens_per_second=config.batch_size * config.seq_len / statistics.median(walls.candidate),
        wall_ratio=statistics.median(walls.ratios()),
        wall_ratio_range=_range(walls.ratios()),
        wall_ratio_floor=statistics.median(walls.floors()),
        cpu_ratio=statistics.median(cpus.ratios()),
        cpu_ratio_range=_range(cpus.ratios()),
        cpu_ratio_floor=statistics.median(cpus.floors()),
        bytes_sent=max(sent, default=None),
        bytes_sent_floor=needs.bytes_sent(sizes, ranks, config.microbatches),
        bytes_modelled=max(modelled, default=None),
        peak_memory_bytes=max(report.peak_memory_bytes for report in reports),
        peak_memory_bytes_floor=memory_floor,
        live_memory_bytes=max(report.live_memory_bytes for report in reports),
        loss_difference=_largest_difference(losses, reference_losses or []) if same_training else None,
        loss_difference_floor=0.0 if same_training else None,
        differs=candidate.differs,
        calls=reports[0].calls,
        reports=[asdict(report) for report in reports],
    )


class _Turns:
    """Seconds per turn, over all ranks."""

    def __init__(self, reports: Sequence[Report], clock: str, over_ranks: Any) -> None:
        def together(clocks: list[Clock]) -> list[float]:
            return [over_ranks(turn) for turn in zip(*(getattr(one, clock) for one in clocks), strict=True)]

        self.candidate = together([report.candidate for report in reports])
        self.local = together([report.local for report in reports])
        self.collectives = together([report.collectives for report in reports])

    def ratios(self) -> list[float]:
        return [local / own for local, own in zip(self.local, self.candidate, strict=True)]

    def floors(self) -> list[float]:
        return [local / (local + extra) for local, extra in zip(self.local, self.collectives, strict=True)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _median_written(report: Report) -> int | None:
    sizes = [size for size in report.bytes_written if size is not None]
    return int(statistics.median(sizes)) if sizes else None


def _largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(losses, reference, strict=True))
