"""The arithmetic between axis sizes and ranks, against values counted by hand."""

import pytest

from nanopar_core import split_sizes
from nanopar_core.grid import expert_sizes, rank_lists

# The picture in grid.py: 8 ranks as pp=2, dp=2, tp=2.
CUBE = {"pp": 2, "dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("along", "lists"),
    [
        (["tp"], ((0, 1), (2, 3), (4, 5), (6, 7))),
        (["dp"], ((0, 2), (1, 3), (4, 6), (5, 7))),
        (["pp"], ((0, 4), (1, 5), (2, 6), (3, 7))),
        (["dp", "tp"], ((0, 1, 2, 3), (4, 5, 6, 7))),
        (["tp", "dp"], ((0, 2, 1, 3), (4, 6, 5, 7))),
        (["pp", "tp"], ((0, 1, 4, 5), (2, 3, 6, 7))),
        (["pp", "dp", "tp"], ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ([], ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,))),
    ],
)
def test_ranks_that_differ_along_some_axes(along: list[str], lists: tuple[tuple[int, ...], ...]) -> None:
    assert rank_lists(CUBE, along) == lists


def test_axes_that_are_no_power_of_two() -> None:
    assert rank_lists({"a": 2, "b": 3}, ["a"]) == ((0, 3), (1, 4), (2, 5))
    assert rank_lists({"a": 2, "b": 3}, ["b"]) == ((0, 1, 2), (3, 4, 5))
    assert rank_lists({"a": 1, "b": 3}, ["a"]) == ((0,), (1,), (2,))


def test_an_unknown_axis_is_named() -> None:
    with pytest.raises(ValueError, match="no axis 'xp'; the axes are pp, dp, tp"):
        rank_lists(CUBE, ["xp"])


def dense(**sizes: int) -> dict[str, int]:
    return {"pp": 1, "dp_replicate": 1, "dp": 1, "cp": 1, "tp": 1} | sizes


@pytest.mark.parametrize(
    ("sizes", "ep", "etp", "edp"),
    [
        (dense(dp=2, tp=2), 2, 2, 1),
        (dense(dp=2, tp=2), 2, 1, 2),
        (dense(dp=2, tp=2), 4, 1, 1),
        (dense(dp=2, cp=3, tp=2), 3, 2, 2),
        (dense(pp=2, dp_replicate=3, dp=4), 2, 1, 2),
        (dense(), 1, 1, 1),
    ],
)
def test_the_expert_view_has_as_many_ranks(sizes: dict[str, int], ep: int, etp: int, edp: int) -> None:
    view = expert_sizes(sizes, ep, etp)
    assert view == {"pp": sizes["pp"], "dp_replicate": sizes["dp_replicate"], "edp": edp, "ep": ep, "etp": etp}
    assert list(view) == ["pp", "dp_replicate", "edp", "ep", "etp"]  # outer to inner


@pytest.mark.parametrize(
    ("ep", "etp", "message"),
    [
        (3, 1, r"ep=3 x etp=1 does not divide dp=2 x cp=1 x tp=4 = 8 ranks"),
        (4, 4, r"ep=4 x etp=4 does not divide dp=2 x cp=1 x tp=4 = 8 ranks"),
        (2, 2, r"etp=2 must be 1 or equal to tp=4"),
    ],
)
def test_an_impossible_expert_view_is_refused(ep: int, etp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expert_sizes(dense(dp=2, tp=4), ep, etp)


@pytest.mark.parametrize(
    ("length", "parts", "sizes"),
    [
        (7, 2, (4, 3)),
        (8, 4, (2, 2, 2, 2)),
        (2, 4, (1, 1, 0, 0)),
        (0, 3, (0, 0, 0)),
        (11, 4, (3, 3, 3, 2)),
        (5, 1, (5,)),
    ],
)
def test_lengths_as_even_as_possible(length: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert split_sizes(length, parts) == sizes


@pytest.mark.parametrize(("length", "parts"), [(4, 0), (-1, 2)])
def test_an_impossible_split_names_both_numbers(length: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"length of {length} into {parts} parts"):
        split_sizes(length, parts)
