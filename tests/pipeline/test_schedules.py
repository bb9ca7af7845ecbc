"""Schedules: their drawings, bubbles and memory; every one runs, whatever the numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from nanopar_pipeline import Action, Schedule, schedules
from nanopar_pipeline.passes import messages

Make = Callable[[int, int, int], Schedule]
ALL: list[tuple[Make, tuple[int, ...]]] = [
    (schedules.gpipe, (1, 2, 3)),
    (schedules.one_f_one_b, (1,)),
    (schedules.interleaved, (1, 2, 3)),
    (schedules.zb_h1, (1,)),
    (schedules.zbv, (2,)),
    (schedules.dualpipe_v, (2,)),
]


@pytest.mark.parametrize(("make", "chunks"), ALL)
def test_the_drawings_are_theirs(make: Make, chunks: tuple[int, ...]) -> None:
    drawn = re.findall(r"rank \d \|.*", make.__doc__ or "")
    count = 2 if 2 in chunks and make is not schedules.gpipe else 1
    assert str(make(4 // count, count, 4)).splitlines() == drawn


@pytest.mark.parametrize(("make", "chunks"), ALL)
def test_every_schedule_runs(make: Make, chunks: tuple[int, ...]) -> None:
    """A schedule checks itself: every action once, dependencies, no rank waits for ever."""
    for ranks in range(1, 6):
        for microbatches in (1, 2, 3, 4, 5, 7, 8, 9, 16):
            for count in chunks:
                made = make(ranks, count, microbatches)
                assert (made.ranks, made.chunks, made.microbatches) == (ranks, count, microbatches)


def test_random_sizes() -> None:
    numbers = random.Random(0)
    for _ in range(60):
        make, chunks = numbers.choice(ALL)
        made = make(numbers.randint(1, 8), numbers.choice(chunks), numbers.randint(1, 24))
        slow = made.simulate(forward=numbers.random() + 0.1, input_part=numbers.random() + 0.1, communication=0.3)
        assert 0 <= slow.bubble < 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_bubbles_are_those_of_the_literature(ranks: int, times: int) -> None:
    m, p = times * ranks, ranks
    one = (p - 1) / (m + p - 1)
    for made in (schedules.gpipe(p, 1, m), schedules.one_f_one_b(p, 1, m)):
        assert made.simulate().bubble == pytest.approx(one)
    for v in (2, 3):
        assert schedules.interleaved(p, v, m).simulate().bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert schedules.zb_h1(p, 1, m).simulate().bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    if times > 1:  # both end the warm-up of the last rank, and a few ticks more with many ranks
        best = (p - 1) / (6 * m + p - 1)
        assert 0.999 * best <= schedules.zbv(p, 2, m).simulate().bubble <= 1.5 * best
        assert schedules.dualpipe_v(p, 2, m).simulate().bubble == pytest.approx(best)


def test_live_micro_batches() -> None:
    p, m = 4, 16
    assert schedules.gpipe(p, 1, m).simulate().peak_live == [m] * p
    assert schedules.one_f_one_b(p, 1, m).simulate().peak_live == [4, 3, 2, 1]
    assert schedules.zb_h1(p, 1, m).simulate().peak_live == [p] * p
    assert schedules.zbv(p, 2, m).simulate().peak_live == [2 * p] * p
    assert schedules.dualpipe_v(p, 2, m).simulate().peak_live == [2 * p + 1] * p


def test_placements() -> None:
    loop, bent = schedules.interleaved(2, 2, 2), schedules.zbv(2, 2, 2)
    assert [loop.stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [bent.stages_of(rank) for rank in range(2)] == [[0, 3], [1, 2]]
    assert [bent.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert set(messages(loop, backward=False)) == {(0, 1), (1, 0)}
    assert messages(bent, backward=True)[0, 1] == [(3, 0), (3, 1)]


def test_an_action_prints_as_in_the_papers() -> None:
    assert [str(action) for action in schedules.one_f_one_b(2, 1, 2).actions[1]] == ["1F0", "1B0", "1F1", "1B1"]


# ------------------------------------------------------------------------------------------------------------ errors


def rank(*texts: str) -> list[Action]:
    return [Action(int(text[0]), text[1], int(text[2])) for text in texts]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([rank("0F0"), rank("1F0", "1B0")], "stage 0, micro-batch 0 has F: it needs F and B, or F, I and W"),
        ([rank("0F0", "0B0", "0W0"), rank("1F0", "1B0")], "stage 0, micro-batch 0 has FBW"),
        ([rank("0F0", "0F0", "0B0"), rank("1F0", "1B0")], "0F0 is there twice"),
        ([rank("0F0", "1B0"), rank("1F0", "0B0")], "1B0 is on rank 0, but rank 1 has the stage"),
        ([rank("0F0", "0B0"), rank("1B0", "1F0")], "ranks wait for each other: rank 0 waits with 0B0; rank 1 waits"),
        ([rank("0F0", "0W0", "0I0"), rank("1F0", "1B0")], "rank 0 waits with 0W0"),
        ([rank("0F0", "0X0"), rank("1F0", "1B0")], "0X0 of rank 0: unknown kind 'X'; there are F, B, I, W"),
        ([rank("0F0", "0B0", "2F0"), rank("1F0", "1B0")], "2F0 of rank 0: there are 2 stages and 1 micro-batches"),
    ],
)
def test_a_schedule_of_ones_own_is_checked(actions: list[list[Action]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(actions, 1, 1)


@pytest.mark.parametrize(
    ("make", "numbers", "message"),
    [
        (schedules.gpipe, (0, 1, 1), "ranks must be at least 1, not 0"),
        (schedules.one_f_one_b, (2, 2, 4), "chunks must be 1 for this schedule, not 2"),
        (schedules.zbv, (2, 1, 4), "chunks must be 2 for this schedule, not 1"),
        (schedules.interleaved, (2, 2, 0), "microbatches must be at least 1, not 0"),
    ],
)
def test_numbers_that_do_not_fit(make: Make, numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*numbers)


def test_stages_may_take_different_times() -> None:
    schedule = schedules.one_f_one_b(2, 1, 3)
    uniform = schedule.simulate(forward=2.0, backward=3.0)
    given = schedule.simulate(of_stages={(s, k): t for s in (0, 1) for k, t in (("F", 2.0), ("B", 3.0))})
    assert given.makespan == uniform.makespan
    slow = schedule.simulate(forward=2.0, backward=3.0, of_stages={(1, "F"): 4.0})
    assert slow.makespan == 2 + 3 * (4 + 3) + 3, "the second stage is busy from its first forward on"
