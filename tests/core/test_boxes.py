"""Boxes of a whole tensor are exactly the elements of a flat part, in their order."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from nanopar_core.sharding import boxes


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[int], list[list[range]], int, int]:
    """A shape, the ranges of a part of it by dim, and two places in that part."""
    shape, places = [], []
    for _ in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 6))
        shape.append(length)
        bounds = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=4, unique=True)))
        pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
        places.append([range(start, stop) for start, stop in pairs])
    count = 1
    for of_dim in places:
        count *= sum(map(len, of_dim))
    start = draw(st.integers(0, count))
    return shape, places, start, draw(st.integers(start, count))


@settings(max_examples=300, deadline=None)
@given(parts())
def test_boxes_are_the_elements_of_a_flat_part(case: tuple[list[int], list[list[range]], int, int]) -> None:
    shape, places, start, stop = case
    whole = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
    part = whole
    for dim, of_dim in enumerate(places):
        part = torch.cat([part.narrow(dim, at.start, len(at)) for at in of_dim], dim)
    place, flat = start, part.reshape(-1)
    for box in boxes(places, start, stop):
        assert box.start == place
        assert box.stop > box.start
        place = box.stop
        found = whole[tuple(slice(one.start, one.stop) for one in box.ranges)]
        assert tuple(found.shape) == box.shape
        assert torch.equal(found.reshape(-1), flat[box.start : box.stop])
    assert place == stop


def test_whole_rows_are_one_box() -> None:
    assert [box.shape for box in boxes([[range(10)], [range(4)]], 2, 34)] == [(1, 2), (7, 4), (1, 2)]
    sections = [[range(2), range(6, 8)], [range(4)]]  # this rank's part of gate and up
    assert [box.ranges[0] for box in boxes(sections, 0, 16)] == [range(2), range(6, 8)]
