"""What is worked out from a schedule's actions: whether it runs, what is sent, how long it takes, how much is live.

    actions --check-->     every action once, on its rank, after what it needs; no rank waits for ever
            --messages-->  for each pair of ranks and direction the order in which tensors go
            --simulate-->  times of all actions: makespan, bubble, live micro-batches

An action needs          F  the forward of the stage before; B, I  its own forward, and the B or I of the stage after
                         W  its own I

A receiver posts its receives in the order in which the sender sends, and both directions between two ranks have
channels of their own; so with sends that do not block, and receivers that use messages in their order, what runs in the
simulation runs with messages too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanopar_pipeline.schedules import Action, Schedule


class Span(NamedTuple):
    """When an action ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A run.

    Attributes:
        schedule: what ran.
        spans: for every rank, in order.
    """

    schedule: Schedule
    spans: list[list[Span]]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they are idle."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (self.makespan * len(self.spans)) if self.makespan else 0.0

    @property
    def peak_live(self) -> list[int]:
        """For every rank the most (stage, micro-batch) pairs whose activations it holds at once: from F to B or W."""
        return [_peak(self.schedule.actions[rank]) for rank in range(len(self.spans))]


class Message(NamedTuple):
    """What a stage gives to its neighbour: activations to the next, or gradients to the one before."""

    stage: int
    microbatch: int


def check(schedule: Schedule) -> None:
    """Raise ``ValueError`` unless every action is there once, in the right place, and all of them run."""
    if schedule.placement not in ("loop", "v"):
        raise ValueError(f'placement must be "loop" or "v", not {schedule.placement!r}')
    if schedule.ranks < 1 or schedule.chunks < 1:
        raise ValueError(f"a schedule needs a rank and a stage, not {schedule.ranks} and {schedule.chunks}")
    seen: set[tuple[int, str, int]] = set()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind not in ("F", "B", "I", "W"):
                raise ValueError(f"{action} of rank {rank}: unknown kind {action.kind!r}; there are F, B, I, W")
            if not 0 <= action.stage < schedule.stages or not 0 <= action.microbatch < schedule.microbatches:
                raise ValueError(
                    f"{action} of rank {rank}: there are {schedule.stages} stages and {schedule.microbatches} "
                    "micro-batches, numbered from 0"
                )
            if schedule.rank_of(action.stage) != rank:
                raise ValueError(f"{action} is on rank {rank}, but rank {schedule.rank_of(action.stage)} has the stage")
            if action in seen:
                raise ValueError(f"{action} is there twice")
            seen.add(action)
    for stage in range(schedule.stages):
        for number in range(schedule.microbatches):
            kinds = "".join(kind for kind in "FBIW" if (stage, kind, number) in seen)
            if kinds not in ("FB", "FIW"):
                raise ValueError(
                    f"stage {stage}, micro-batch {number} has {kinds or 'nothing'}: it needs F and B, or F, I and W"
                )
    simulate(schedule)
    for backward in (False, True):
        _check_order(schedule, backward=backward)


def _check_order(schedule: Schedule, *, backward: bool) -> None:
    """A channel delivers in the order in which was sent: receivers must use messages in that order."""
    step = 1 if backward else -1  # from a stage to the one that gives to it
    for (sender, receiver), sent in messages(schedule, backward=backward).items():
        used = [
            Message(stage + step, number)
            for stage, kind, number in schedule.actions[receiver]
            if kind in ("BI" if backward else "F")
            and 0 <= stage + step < schedule.stages
            and schedule.rank_of(stage + step) == sender
        ]
        for one, other in zip(sent, used, strict=True):
            if one != other:
                what = "gradients" if backward else "activations"
                raise ValueError(
                    f"rank {sender} sends {what} of stage {one.stage} for micro-batch {one.microbatch} next, but rank "
                    f"{receiver} uses those of stage {other.stage} for micro-batch {other.microbatch} first"
                )


def needs(schedule: Schedule, action: Action) -> Iterator[tuple[int, str, int]]:
    """What must have run before an action: (stage, kind, micro-batch); of B and I either counts."""
    stage, kind, number = action
    if kind == "F" and stage > 0:
        yield stage - 1, "F", number
    if kind in "BI":
        yield stage, "F", number
        if stage < schedule.stages - 1:
            yield stage + 1, "B", number
    if kind == "W":
        yield stage, "I", number


def simulate(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float | None = None,
    input_part: float = 1.0,
    weight_part: float = 1.0,
    communication: float = 0.0,
    of_stages: Mapping[tuple[int, str], float] | None = None,
) -> Simulation:
    """The times of all actions, each as early as its rank and what it needs allow.

    Args:
        forward, input_part, weight_part: of F, I and W of a stage.
        backward: of B; by default both its parts together.
        of_stages: by stage and kind, where stages differ, as when they were measured.
        communication: from the end of an action to where another rank can use what it made.

    Raises:
        ValueError: ranks wait for each other, or a time below 0.
    """
    if negative := [time for time in (forward, backward, input_part, weight_part, communication) if (time or 0) < 0]:
        raise ValueError(f"times must be at least 0, not {negative[0]}")
    whole = input_part + weight_part if backward is None else backward
    times = {"F": forward, "B": whole, "I": input_part, "W": weight_part}
    ended: dict[tuple[int, str, int], float] = {}  # B stands for I too
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.ranks
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, actions in enumerate(schedule.actions):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                required = list(needs(schedule, action))
                if any(one not in ended for one in required):
                    break
                ready = (ended[one] + (communication if schedule.rank_of(one[0]) != rank else 0.0) for one in required)
                start = max([free[rank], *ready])
                free[rank] = start + (of_stages or {}).get((action.stage, action.kind), times[action.kind])
                spans[rank].append(Span(action, start, free[rank]))
                ended[action.stage, action.kind, action.microbatch] = free[rank]
                if action.kind == "I":
                    ended[action.stage, "B", action.microbatch] = free[rank]
                goes_on = True
    stuck = [
        f"rank {rank} waits with {actions[len(spans[rank])]}"
        for rank, actions in enumerate(schedule.actions)
        if len(spans[rank]) < len(actions)
    ]
    if stuck:
        raise ValueError("ranks wait for each other: " + "; ".join(stuck))
    return Simulation(schedule, spans)


def messages(schedule: Schedule, *, backward: bool) -> dict[tuple[int, int], list[Message]]:
    """For every (sender, receiver) the messages in the order in which they are sent; forward's or backward's."""
    found: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(schedule.actions):
        for stage, kind, number in actions:
            neighbour = stage - 1 if backward else stage + 1
            if kind in ("BI" if backward else "F") and 0 <= neighbour < schedule.stages:
                receiver = schedule.rank_of(neighbour)
                if receiver != rank:
                    found.setdefault((rank, receiver), []).append(Message(stage, number))
    return found


def _peak(actions: list[Action]) -> int:
    live = peak = 0
    for action in actions:
        live += action.kind == "F"
        peak = max(peak, live)
        live -= action.kind in "BW"
    return peak
