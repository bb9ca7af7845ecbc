"""The layout of flat buffers: pure arithmetic, checked on random models."""

import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopar_zero.layout import ALIGNMENT, Item, bucket_layouts

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(torch.Size)
ITEMS = st.lists(st.tuples(SHAPES, st.sampled_from([2, 4, 8]), st.integers(0, 3), st.sampled_from("xy")), min_size=1)


@settings(deadline=None)  # the machine may be busy
@given(described=ITEMS, bucket_bytes=st.integers(1, 20_000))
def test_every_parameter_lies_once_in_its_place(
    described: list[tuple[torch.Size, int, int, str]], bucket_bytes: int
) -> None:
    items = [Item(f"p{i}", shape, size, group, (key, size)) for i, (shape, size, group, key) in enumerate(described)]
    layouts = bucket_layouts(items, lambda _key: bucket_bytes)
    assert sorted(slot.item.name for layout in layouts for slot in layout.slots) == sorted(item.name for item in items)
    for layout in layouts:
        assert len({slot.item.key for slot in layout.slots}) == 1
        end = 0
        for slot in layout.slots:
            assert slot.start % ALIGNMENT == 0
            assert slot.start >= end, "overlap"
            end = slot.start + slot.numel
        assert end <= layout.length < end + ALIGNMENT
        # The runs cover the buffer without a gap, and each parameter lies in the run of its group.
        assert [run.start for run in layout.runs] == [0, *(run.stop for run in layout.runs[:-1])]
        assert layout.runs[-1].stop == layout.length
        assert len({run.group for run in layout.runs}) == len(layout.runs)
        for slot in layout.slots:
            (run,) = (run for run in layout.runs if run.group == slot.item.group)
            assert run.start <= slot.start
            assert slot.start + slot.numel <= run.stop
    # Of each key, later parameters lie in earlier buckets; all buckets but the last are as full as asked, no fuller.
    number = {item.name: i for i, item in enumerate(items)}
    for key in {item.key for item in items}:
        mine = [layout for layout in layouts if layout.slots[0].item.key == key]
        firsts = [min(number[slot.item.name] for slot in layout.slots) for layout in mine]
        lasts = [max(number[slot.item.name] for slot in layout.slots) for layout in mine]
        assert all(last < first for first, last in zip(firsts, lasts[1:], strict=False))
        for layout, first in zip(mine, firsts, strict=True):
            sizes = {slot.item.name: slot.numel * slot.item.itemsize for slot in layout.slots}
            assert sum(sizes.values()) >= bucket_bytes or layout is mine[-1]
            assert sum(sizes.values()) - sizes[f"p{first}"] < bucket_bytes


def test_two_groups_by_hand() -> None:
    shapes = [(3,), (40,), (0, 5), (5,)]
    items = [Item(f"p{i}", torch.Size(shape), 4, i % 2, "key") for i, shape in enumerate(shapes)]
    first, second = bucket_layouts(items, lambda _key: 100)
    assert [(slot.item.name, slot.start) for slot in first.slots] == [("p2", 0), ("p1", 0), ("p3", 64)]
    assert [(run.group, run.start, run.stop) for run in first.runs] == [(0, 0, 0), (1, 0, 96)]
    assert [(slot.item.name, slot.start) for slot in second.slots] == [("p0", 0)]
    assert (first.length, second.length) == (96, 32)


def test_work_grows_with_the_number_of_parameters_only() -> None:
    def calls(count: int) -> int:
        items = [Item(f"p{i}", torch.Size((3,)), 4, 0, "key") for i in range(count)]
        made = 0

        def count_call(_frame: object, event: str, _argument: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            bucket_layouts(items, lambda _key: 25 * 2**20)
        finally:
            sys.setprofile(None)
        return made

    assert calls(800) < 9 * calls(100)  # quadratic: 64 times as many
