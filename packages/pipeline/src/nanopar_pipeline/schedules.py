"""Schedules of pipeline parallelism: for every rank the list of its actions, and nothing else.

    2F0   forward of stage 2 for micro-batch 0          B   its backward
    2I0   the part of backward that gives the gradient of the stage's input, which the stage before waits for
    2W0   the part that gives the gradients of its weights, for which nobody waits

Every function makes one; the drawings are theirs (``print(one_f_one_b(4, 1, 4))``; F, I and W take one tick, B two).
Sends and receives follow from the actions: see ``passes.py``; a runner executes any of them: ``runner.py``.

    ranks p, chunks v (stages on a rank), stages p v, micro-batches m
    placement   loop  stage s on rank s mod p          v   rank 0 has the first stage and the last one

    bubble: share of idle time, with F, I, W of one tick and B of two
    gpipe, one_f_one_b   (p - 1) / (m + p - 1)
    interleaved          (p - 1) / (v m + p - 1)
    zb_h1                (p - 1) / (3 m + p - 1): a third
    zbv, dualpipe_v      (p - 1) / (6 m + p - 1) and little more: the last rank waits for its first micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanopar_pipeline.passes import Simulation, check, simulate

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """What a rank does next; prints as ``2F0``."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """A checked schedule.

    Attributes:
        actions: for every rank, in order.
        chunks: stages on a rank.
        microbatches: of a step.
        placement: "loop" or "v".
        name: as it is printed.

    Raises:
        ValueError: an action that is missing, there twice, on a rank that does not have the stage, before what it needs
            on its own rank, or in an order in which ranks wait for each other for ever.
    """

    actions: list[list[Action]]
    chunks: int
    microbatches: int
    placement: str = "loop"
    name: str = field(default="schedule", compare=False)

    def __post_init__(self) -> None:
        check(self)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.placement == "v" and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in the order of forward."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def simulate(self, **times: Any) -> Simulation:
        """The run with given times; see ``passes.simulate``."""
        return simulate(self, **times)

    def __str__(self) -> str:
        from nanopar_pipeline.drawing import as_text

        return as_text(self.simulate())


def gpipe(ranks: int, chunks: int, microbatches: int, placement: str = "loop") -> Schedule:
    """All forwards, then all backwards ("GPipe", Huang et al. 2019). All micro-batches are live at once.

    rank 0 |F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 .  B1 .  B2 .  B3 .
    rank 1 |.  F0 F1 F2 F3 .  .  .  .  .  .  B0 .  B1 .  B2 .  B3 .
    rank 2 |.  .  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3 .
    rank 3 |.  .  .  F0 F1 F2 F3 B0 .  B1 .  B2 .  B3 .
    """
    _check_numbers(ranks, chunks, microbatches)
    shape = Schedule([[] for _ in range(ranks)], chunks, 0, placement)
    actions = []
    for rank in range(ranks):
        stages = shape.stages_of(rank)
        forwards = [Action(stage, "F", number) for stage in stages for number in range(microbatches)]
        backwards = [Action(stage, "B", number) for stage in reversed(stages) for number in range(microbatches)]
        actions.append(forwards + backwards)
    return Schedule(actions, chunks, microbatches, placement, name="gpipe")


def one_f_one_b(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """One forward, one backward in turn ("PipeDream-Flush", Narayanan et al. 2021); p - r live ones on rank r.

    rank 0 |F0 F1 F2 F3 .  .  .  .  .  .  B0 .  .  B1 .  .  B2 .  .  B3 .
    rank 1 |.  F0 F1 F2 .  .  .  .  B0 .  F3 B1 .  .  B2 .  .  B3 .
    rank 2 |.  .  F0 F1 .  .  B0 .  F2 B1 .  F3 B2 .  .  B3 .
    rank 3 |.  .  .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3 .
    """
    _check_numbers(ranks, chunks, microbatches, only_chunks=1)
    actions = []
    for rank in range(ranks):
        warm = min(microbatches, ranks - 1 - rank)
        actions.append(
            _alternating(
                [Action(rank, "F", number) for number in range(microbatches)],
                [Action(rank, "B", number) for number in range(microbatches)],
                warm,
            )
        )
    return Schedule(actions, 1, microbatches, name="1f1b")


def interleaved(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """1F1B with several stages on a rank ("Megatron-LM", Narayanan et al. 2021, section 2.2): the bubble shrinks by v.

    Micro-batches go in groups of p through one chunk after the other. Where p does not divide their number, ranks begin
    with as few more forwards as it takes for no rank to wait for ever.

    rank 0 |0F0 0F1 2F0 2F1 0F2 .   2B0 .   0F3 2B1 .   2F2 0B0 .   2F3 0B1 .   .   2B2 .   .   2B3 .   0B2 .   0B3 .
    rank 1 |.   1F0 1F1 3F0 3B0 .   3F1 3B1 .   1F2 1B0 .   1F3 1B1 .   3F2 3B2 .   3F3 3B3 .   1B2 .   1B3 .
    """
    _check_numbers(ranks, chunks, microbatches)
    groups = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    stages = [range(rank, ranks * chunks, ranks) for rank in range(ranks)]

    def with_more(more: int) -> Schedule:
        actions = []
        for rank, own in enumerate(stages):
            forwards = [Action(stage, "F", number) for group in groups for stage in own for number in group]
            backwards = [Action(stage, "B", number) for group in groups for stage in reversed(own) for number in group]
            warm = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks + more
            actions.append(_alternating(forwards, backwards, min(warm, len(forwards))))
        return Schedule(actions, chunks, microbatches, name="interleaved")

    return _first_that_runs(with_more, chunks * microbatches)


def zb_h1(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """1F1B with backward in two parts ("Zero Bubble", Qi et al., arXiv 2401.10241, section 3): W fills what was idle.

    Rank r is r micro-batches behind with its W, so that all ranks have at most p live ones, as rank 0 has in 1F1B.

    rank 0 |F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
    rank 1 |.  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
    rank 2 |.  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
    rank 3 |.  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
    """
    _check_numbers(ranks, chunks, microbatches, only_chunks=1)
    actions = []
    for rank in range(ranks):
        warm = min(microbatches, ranks - 1 - rank)
        own = [Action(rank, "F", number) for number in range(warm)]
        for number in range(microbatches):
            own += [Action(rank, "F", warm + number)] if warm + number < microbatches else []
            own.append(Action(rank, "I", number))
            own += [Action(rank, "W", number - rank)] if number >= rank else []
        own += [Action(rank, "W", number) for number in range(max(0, microbatches - rank), microbatches)]
        actions.append(own)
    return Schedule(actions, 1, microbatches, name="zb_h1")


def zbv(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Two stages on a rank in the shape of a V, backward in two parts ("Controllable Memory", arXiv 2405.15362).

    A rank has at most 2 p live stages of micro-batches, of half the size: as much as rank 0 in 1F1B, all ranks alike.

    rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0I1 0W0 0F3 3F2 3I2 3W2 0W1 0I2 0W2 3F3 3I3 3W3 .   0I3 0W3
    rank 1 |.   1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 2W1 1F2 2F2 1W0 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3 1W3
    """
    _check_numbers(ranks, chunks, microbatches, only_chunks=2)
    return _eager(ranks, 2, microbatches, "v", most_live=2 * ranks, name="zbv")


def dualpipe_v(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half (DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and Sea AI Lab's note on it), stages in a V.

    In its steady state forwards and whole backwards alternate, so that one's communication can overlap with the other's
    computation; at both ends backward is in two parts. With few micro-batches (m < 2 p) it is ``zbv``.

    rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 .   3F2 0B0 .   3B2 .   3F3 .   0B1 .   3B3 .   0I2 0W2 0I3 0W3
    rank 1 |.   1F0 2F0 1F1 2F1 1F2 2B0 .   2F2 1B0 .   1F3 2B1 .   2F3 1B1 .   2B2 .   1B2 .   2I3 1I3 2W3 1W3
    """
    _check_numbers(ranks, chunks, microbatches, only_chunks=2)
    if microbatches < 2 * ranks:
        return Schedule(zbv(ranks, 2, microbatches).actions, 2, microbatches, "v", name="dualpipe_v")
    return Schedule(
        [_dualpipe_rank(rank, ranks, microbatches) for rank in range(ranks)], 2, microbatches, "v", name="dualpipe_v"
    )


NAMED: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zbv": zbv,
    "dualpipe_v": dualpipe_v,
}


def _alternating(forwards: Sequence[Action], backwards: Sequence[Action], warm: int) -> list[Action]:
    """``warm`` forwards, then one forward and one backward in turn, then what is left."""
    pairs = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return [*forwards[:warm], *pairs, *backwards[len(forwards) - warm :]]


def _first_that_runs(make: Callable[[int], Schedule], tries: int) -> Schedule:
    for more in range(tries):
        try:
            return make(more)
        except ValueError:  # ranks would wait for each other
            continue
    return make(tries)


def _eager(ranks: int, chunks: int, microbatches: int, placement: str, *, most_live: int, name: str) -> Schedule:
    """At every tick a rank does what is ready and others wait for: I before F before W; F only below ``most_live``.

    Of several forwards the one of the latest stage, for which earlier ones leave room.
    """
    stages = ranks * chunks
    place = Schedule([[] for _ in range(ranks)], chunks, 0, placement)
    own = [place.stages_of(rank) for rank in range(ranks)]
    done = {(stage, kind): 0 for stage in range(stages) for kind in "FIW"}  # micro-batches, before this tick
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    while any(count < microbatches for count in done.values()):
        chosen = []
        for rank in range(ranks):
            live = sum(done[stage, "F"] - done[stage, "W"] for stage in own[rank])
            late_first = own[rank][::-1]
            ready = [
                *((stage, "I") for stage in late_first if done[stage, "I"] < _may_go_back(done, stage, stages)),
                *(
                    (stage, "F")
                    for chunk, stage in reversed(list(enumerate(own[rank])))
                    if done[stage, "F"] < (microbatches if stage == 0 else done[stage - 1, "F"])
                    and live < most_live - (chunks - 1 - chunk)
                ),
                *((stage, "W") for stage in late_first if done[stage, "W"] < done[stage, "I"]),
            ]
            if ready:
                stage, kind = ready[0]
                chosen.append((rank, Action(stage, kind, done[stage, kind])))
        for rank, action in chosen:
            actions[rank].append(action)
            done[action.stage, action.kind] += 1
    return Schedule(actions, chunks, microbatches, placement, name=name)


def _may_go_back(done: dict[tuple[int, str], int], stage: int, stages: int) -> int:
    """How many micro-batches of a stage have what their I needs."""
    return done[stage, "F"] if stage == stages - 1 else min(done[stage, "F"], done[stage + 1, "I"])


def _dualpipe_rank(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The actions of one rank; its stages are called 0 and 1."""
    stages = rank, 2 * ranks - 1 - rank
    found: list[Action] = []
    counts: dict[tuple[int, str], int] = {}
    parts: list[Action] = []  # W that are still to come

    def do(kind: str, chunk: int) -> None:
        counted = "F" if kind == "F" else "B"
        number = counts[chunk, counted] = counts.get((chunk, counted), -1) + 1
        found.append(Action(stages[chunk], kind, number))
        if kind == "I":
            parts.append(Action(stages[chunk], "W", number))

    def weights() -> None:
        if parts:
            found.append(parts.pop(0))

    after, here = ranks - 1 - rank, rank + 1
    for _ in range(2 * after):
        do("F", 0)
    for _ in range(here):
        do("F", 0)
        do("F", 1)
    for _ in range(after):
        do("I", 1)
        weights()
        do("F", 1)
    for _ in range(microbatches - 2 * ranks + here):
        do("F", 0)
        do("B", 1)
        do("F", 1)
        do("B", 0)
    for _ in range(after):
        do("B", 1)
        do("F", 1)
        do("B", 0)
    for number in range(here):  # in two parts from the middle on
        do("I" if 2 * number >= here else "B", 1)
        do("I" if 2 * number + 1 >= here else "B", 0)
    for _ in range(after):
        weights()
        do("I", 0)
    while parts:
        weights()
    return found


def _check_numbers(ranks: int, chunks: int, microbatches: int, only_chunks: int | None = None) -> None:
    for name, value in (("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if only_chunks is not None and chunks != only_chunks:
        raise ValueError(f"chunks must be {only_chunks} for this schedule, not {chunks}")
