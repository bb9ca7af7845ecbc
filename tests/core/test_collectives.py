"""Every collective on 2 and 4 ranks against plain torch on the ranks' stacked inputs.

The inputs of all ranks come from one seed, so every rank knows what the others send. Values are small whole numbers
where sums must be exact whatever their order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nanopar_core as core
from nanopar_core import testing

SHAPES = [(0,), (1,), (7,), (8,), (0, 3), (3, 0), (5, 3), (2, 3, 4), (13, 1)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16, torch.uint8]
REDUCE: dict[Any, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}

both_sizes = pytest.mark.parametrize("world_size", [2, 4])


def world() -> core.Axis:
    return core.Mesh(dp=dist.get_world_size()).dp


def whole_numbers(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One tensor for every rank, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(sum(shape) for shape in shapes))
    return [torch.randint(0, 9, tuple(shape), generator=generator).to(dtype) for shape in shapes]


def strided(tensor: Tensor) -> Tensor:
    """The same values in a tensor that is not contiguous (where it has two elements at least)."""
    return torch.stack([tensor, -tensor.float().to(tensor.dtype)], -1)[..., 0]


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    assert torch.equal(actual, expected), (actual, expected)


def uneven(size: int) -> list[list[int]]:
    """Some divisions of rows among ranks, empty parts included."""
    return [list(range(size)), [0] * (size - 1) + [5], [3] + [0] * (size - 1), [size - rank for rank in range(size)]]


# ------------------------------------------------------------------------------------------------------ all_reduce


def reduces() -> None:
    axis = world()
    for shape in [(), *SHAPES]:
        for dtype in DTYPES:
            for op, reduce in REDUCE.items():
                inputs = whole_numbers([shape] * axis.size, dtype)
                mine, expected = inputs[axis.rank].clone(), reduce(torch.stack(inputs))
                result = core.all_reduce(mine, axis, op=op)
                same(result, expected)
                same(mine, inputs[axis.rank])  # the input is left alone
                out = torch.full_like(mine, 7)
                assert core.all_reduce(mine, axis, op=op, out=out) is out
                same(out, expected)
                same(core.all_reduce(strided(mine), axis, op=op), expected)
                assert core.all_reduce(mine, axis, op=op, out=mine) is mine
                same(mine, expected)


@both_sizes
def test_all_reduce(world_size: int) -> None:
    testing.run(world_size, reduces)


def sums_of_real_numbers() -> list[Any]:
    """Sums that are not exact: the bits of all ranks, and how far 16-bit sums are from the right ones."""
    axis = world()
    bits = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for length in (1, 5, 1001):
            generator = torch.Generator().manual_seed(axis.rank)
            total = core.all_reduce(torch.randn(length, generator=generator, dtype=torch.float64).to(dtype), axis)
            bits.append(total.view(torch.uint8).tolist())
    return bits


@both_sizes
def test_all_reduce_is_equal_bit_for_bit_on_all_ranks(world_size: int) -> None:
    ranks = testing.run(world_size, sums_of_real_numbers)
    assert ranks == [ranks[0]] * world_size


def small_on_top_of_large() -> dict[str, list[float]]:
    """256 + 1 + 1 + 1 is 259 and rounds to 260 in bf16 (steps of 2); added up in bf16 it stays 256."""
    axis = world()
    terms = [256.0, 1.0, 1.0, 1.0]
    mine = torch.full((6,), terms[axis.rank], dtype=torch.bfloat16)
    fresh = mine.clone()
    naive = torch.tensor(terms[0], dtype=torch.bfloat16)
    for term in terms[1:]:
        naive = naive + term
    return {
        "all_reduce": core.all_reduce(mine, axis).tolist(),
        "in place": core.all_reduce(fresh, axis, out=fresh).tolist(),
        "reduce_scatter": core.reduce_scatter(mine, axis).tolist(),
        "naive": [naive.item()],
    }


def test_sums_of_16_bit_floats_are_rounded_once() -> None:
    for seen in testing.run(4, small_on_top_of_large):
        assert set(seen["naive"]) == {256.0}
        assert set(seen["all_reduce"]) == set(seen["in place"]) == {260.0}
        assert set(seen["reduce_scatter"]) == {260.0}


# -------------------------------------------------------------------------------------------------- reduce_scatter


def reduce_scatters() -> None:
    axis = world()
    for shape in SHAPES:
        for dtype in DTYPES:
            for op, reduce in REDUCE.items():
                inputs = whole_numbers([shape] * axis.size, dtype)
                mine = inputs[axis.rank].clone()
                whole = reduce(torch.stack(inputs))
                expected = whole.tensor_split(axis.size)[axis.rank]  # longer parts first, as split_sizes
                same(core.reduce_scatter(mine, axis, op=op), expected)
                same(mine, inputs[axis.rank])
                same(core.reduce_scatter(strided(mine), axis, op=op), expected)
                out = torch.full_like(expected, 7)
                assert core.reduce_scatter(mine, axis, op=op, out=out) is out
                same(out, expected)
                others = [part.clone() for part in mine.tensor_split(axis.size)]
                place = mine.tensor_split(axis.size)[axis.rank]  # in place, in this rank's own part
                assert core.reduce_scatter(mine, axis, op=op, out=place) is place
                same(place, expected)
                for rank, part in enumerate(mine.tensor_split(axis.size)):
                    same(part, expected if rank == axis.rank else others[rank])
    for sizes in uneven(axis.size):
        inputs = whole_numbers([(sum(sizes), 2)] * axis.size)
        expected = torch.stack(inputs).sum(0).split(sizes)[axis.rank]
        same(core.reduce_scatter(inputs[axis.rank], axis, sizes=sizes), expected)
        same(core.reduce_scatter(inputs[axis.rank], axis, sizes=tuple(sizes), async_op=True).wait(), expected)


@both_sizes
def test_reduce_scatter(world_size: int) -> None:
    testing.run(world_size, reduce_scatters)


# ------------------------------------------------------------------------------------------------------ all_gather


def gathers() -> None:
    axis = world()
    for shape in SHAPES:
        for dtype in [*DTYPES, torch.bool]:
            parts = whole_numbers([shape] * axis.size, dtype)
            mine, expected = parts[axis.rank], torch.cat(parts)
            same(core.all_gather(mine, axis), expected)
            same(core.all_gather(strided(mine) if dtype != torch.bool else mine, axis), expected)
            sizes = [shape[0]] * axis.size
            same(core.all_gather(mine, axis, sizes=sizes), expected)
            out = torch.zeros_like(expected)
            assert core.all_gather(mine, axis, out=out) is out
            same(out, expected)
            out = torch.zeros_like(expected)
            place = out.split(sizes)[axis.rank]
            place.copy_(mine)
            assert core.all_gather(place, axis, out=out) is out  # in place
            same(out, expected)
    for sizes in uneven(axis.size):
        parts = whole_numbers([(rows, 2) for rows in sizes])
        expected = torch.cat(parts)
        same(core.all_gather(parts[axis.rank], axis), expected)
        same(core.all_gather(parts[axis.rank], axis, sizes=sizes), expected)
        same(core.all_gather(parts[axis.rank], axis, sizes=sizes, out=torch.zeros_like(expected)), expected)
    # `out` alone: its rows as even as possible, longer parts first
    whole = whole_numbers([(7, 2)])[0]
    mine = whole.tensor_split(axis.size)[axis.rank]
    same(core.all_gather(mine, axis, out=torch.zeros_like(whole)), whole)


@both_sizes
def test_all_gather(world_size: int) -> None:
    testing.run(world_size, gathers)


# ------------------------------------------------------------------------------------------------------ all_to_all


def exchanges() -> None:
    axis = world()
    for shape in [shape for shape in SHAPES if shape[0] % axis.size == 0]:
        for dtype in [*DTYPES, torch.bool]:
            inputs = whole_numbers([shape] * axis.size, dtype)
            expected = torch.cat([tensor.tensor_split(axis.size)[axis.rank] for tensor in inputs])
            same(core.all_to_all(inputs[axis.rank], axis), expected)
            out = torch.zeros_like(expected)
            assert core.all_to_all(inputs[axis.rank], axis, out=out) is out
            same(out, expected)
    # as even as possible: rank 0 gets more
    inputs = whole_numbers([(7, 2)] * axis.size)
    expected = torch.cat([tensor.tensor_split(axis.size)[axis.rank] for tensor in inputs])
    same(core.all_to_all(inputs[axis.rank], axis), expected)
    same(core.all_to_all(strided(inputs[axis.rank]), axis), expected)

    n = axis.size
    tables = [
        [[(rank * 3 + peer) % 4 for peer in range(n)] for rank in range(n)],  # some zeros
        [[0] * n for _ in range(n)],  # nobody sends anything
        [[5 if peer == 0 else 0 for peer in range(n)] for _ in range(n)],  # all to one
        [[0 if rank == 0 else 2 for _ in range(n)] for rank in range(n)],  # one sends nothing
        [[0 if rank == peer else 1 for peer in range(n)] for rank in range(n)],  # nothing to oneself
    ]
    for table in tables:
        inputs = whole_numbers([(sum(row), 3) for row in table])
        send, receive = table[axis.rank], [row[axis.rank] for row in table]
        pieces = [tensor.split(row)[axis.rank] for tensor, row in zip(inputs, table, strict=True)]
        expected = torch.cat(pieces)
        mine = inputs[axis.rank]
        same(core.all_to_all(mine, axis, send_sizes=send, receive_sizes=receive), expected)
        same(core.all_to_all(mine, axis, send_sizes=send), expected)  # lengths asked of the peers
        handle = core.all_to_all(strided(mine), axis, send_sizes=send, receive_sizes=receive, async_op=True)
        same(handle.wait(), expected)


@both_sizes
def test_all_to_all(world_size: int) -> None:
    testing.run(world_size, exchanges)


# ------------------------------------------------------------------------------- broadcast, send and receive, barrier


def broadcasts() -> None:
    axis = world()
    for src in range(axis.size):
        for shape in [(), *SHAPES]:
            for dtype in [*DTYPES, torch.bool]:
                tensors = whole_numbers([shape] * axis.size, dtype)
                mine = tensors[axis.rank].clone()
                assert core.broadcast(mine, axis, src=src) is mine
                same(mine, tensors[src])
    # the source is a place on the axis, not a global rank
    turned = core.Mesh(dp=axis.size).subset(list(range(axis.size))[::-1], "turned")
    assert turned is not None
    assert core.broadcast(torch.tensor([dist.get_rank()]), turned, src=0).item() == axis.size - 1


def messages() -> None:
    axis = world()
    n, rank = axis.size, axis.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    tensors = whole_numbers([(4, 2)] * n)
    # a ring; two messages of different sizes and dtypes between the same two ranks arrive in the order of the lists
    second = [torch.full((3,), other, dtype=torch.int64) for other in range(n)]
    sends = [(tensors[rank], after), (second[rank], after)]
    receives = [(torch.zeros(4, 2), before), (torch.zeros(3, dtype=torch.int64), before)]
    got = core.send_recv(sends, receives, axis)
    assert got[0] is receives[0][0]
    same(got[0], tensors[before])
    same(got[1], second[before])
    # only some ranks, nothing at all, and empty tensors
    got = core.send_recv([(tensors[0], 1)] if rank == 0 else [], [(torch.zeros(4, 2), 0)] if rank == 1 else [], axis)
    assert len(got) == (1 if rank == 1 else 0)
    if rank == 1:
        same(got[0], tensors[0])
    assert core.send_recv([], [], axis) == []
    same(core.send_recv([(torch.zeros(0), after)], [(torch.zeros(0), before)], axis)[0], torch.zeros(0))
    handle = core.send_recv(
        sends, [(torch.zeros(4, 2), before), (torch.zeros_like(second[0]), before)], axis, async_op=True
    )
    same(handle.wait()[1], second[before])


def waits_for_all(folder: str) -> bool:
    """Rank 0 comes late to a barrier; the others find its file behind it."""
    import pathlib
    import time

    axis = world()
    place = pathlib.Path(folder, "late")
    if axis.rank == 0:
        time.sleep(0.3)
        place.touch()
    core.barrier(axis)
    return place.exists()


@both_sizes
def test_broadcast(world_size: int) -> None:
    testing.run(world_size, broadcasts)


@both_sizes
def test_send_and_receive(world_size: int) -> None:
    testing.run(world_size, messages)


def test_barrier(tmp_path: Any) -> None:
    assert testing.run(2, waits_for_all, str(tmp_path)) == [True, True]


# --------------------------------------------------------------------------------------------------------- handles


def several_in_flight() -> None:
    """All operations at once on one group, waited in another order, some twice."""
    axis = world()
    n, rank = axis.size, axis.rank
    inputs = whole_numbers([(n * 5, 3)] * n)
    stacked = torch.stack(inputs)
    half = [tensor.bfloat16() for tensor in inputs]
    mine = inputs[rank]
    parts = [tensor.tensor_split(n)[rank] for tensor in inputs]
    scalar = torch.tensor(float(rank))
    for order in (range(8), reversed(range(8)), (3, 1, 7, 5, 0, 2, 6, 4)):
        handles: list[Any] = [
            core.all_reduce(mine, axis, async_op=True),
            core.all_reduce(half[rank], axis, async_op=True),
            core.reduce_scatter(mine, axis, async_op=True),
            core.all_gather(parts[0] * 0 + rank, axis, sizes=[5] * n, async_op=True),
            core.all_to_all(mine, axis, async_op=True),
            core.broadcast(mine.clone(), axis, src=1, async_op=True),
            core.send_recv([(mine, (rank + 1) % n)], [(mine * 0, (rank - 1) % n)], axis, async_op=True),
            core.all_reduce(scalar, axis, op="max", async_op=True),
        ]
        expected = [
            stacked.sum(0),
            torch.stack(half).float().sum(0).bfloat16(),
            stacked.sum(0).tensor_split(n)[rank],
            torch.arange(n).float().repeat_interleave(5)[:, None].expand(-1, 3),
            torch.cat(parts),
            inputs[1],
            inputs[(rank - 1) % n],
            torch.tensor(float(n - 1)),
        ]
        for at in order:
            result = handles[at].wait()
            result = result[0] if at == 6 else result
            assert torch.equal(result, expected[at]), at
        for at, handle in enumerate(handles):  # a second wait gives the same and holds nothing
            again = handle.wait()
            assert torch.equal(again[0] if at == 6 else again, expected[at])
            assert (handle.works, handle.buffers, handle.finish) == ([], [], None)


def buffers_may_be_forgotten() -> None:
    """The handle alone keeps the tensors of its collective alive."""
    axis = world()
    n, x = axis.size, torch.ones(axis.size * 4)
    for handle in (
        core.reduce_scatter(x, axis, async_op=True),
        core.all_gather(x, axis, sizes=[n * 4] * n, async_op=True),
        core.all_to_all(x, axis, async_op=True),
        core.send_recv([(x, (axis.rank + 1) % n)], [(x * 0, (axis.rank - 1) % n)], axis, async_op=True),
    ):
        assert any(buffer is x for buffer in handle.buffers)
        handle.wait()
    handles = []
    for step in range(6):
        handles.append(core.reduce_scatter(torch.full((axis.size * 50_000,), float(step)), axis, async_op=True))
        handles.append(
            core.all_gather(torch.full((50_000,), float(step)), axis, sizes=[50_000] * axis.size, async_op=True)
        )
        torch.full((axis.size * 50_000,), -1.0)  # would reuse freed storage
    for step in range(6):
        assert torch.equal(handles[2 * step].wait(), torch.full((50_000,), float(step) * axis.size))
        assert torch.equal(handles[2 * step + 1].wait(), torch.full((axis.size * 50_000,), float(step)))


@both_sizes
def test_several_collectives_in_flight(world_size: int) -> None:
    testing.run(world_size, several_in_flight)
    testing.run(world_size, buffers_may_be_forgotten)


# ---------------------------------------------------------------------------------------- no gradient, clear errors


def carries_no_gradient() -> None:
    axis = world()
    x = torch.ones(axis.size * 2, requires_grad=True)
    for result in (
        core.all_reduce(x, axis),
        core.reduce_scatter(x, axis),
        core.all_gather(x, axis),
        core.all_to_all(x, axis),
        core.all_reduce(x.bfloat16(), axis),
    ):
        assert not result.requires_grad
    core.all_reduce(x, axis, out=x)  # a parameter may be summed or overwritten in place
    core.broadcast(x, axis)
    assert x.requires_grad
    part = torch.zeros(2, requires_grad=True)
    handle = core.reduce_scatter(torch.ones(axis.size * 2), axis, out=part, async_op=True)
    assert handle.wait().tolist() == [float(axis.size)] * 2  # waited for where gradients are recorded
    assert x.tolist() == [float(axis.size)] * (axis.size * 2)


@both_sizes
def test_plain_collectives_carry_no_gradient(world_size: int) -> None:
    testing.run(world_size, carries_no_gradient)


def refused() -> None:
    axis = world()
    x = torch.zeros(4, 2)
    turned = x.view(2, 4).t()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: core.all_reduce(x, axis, op="mean"), "one of sum, max, min, not 'mean'"),  # type: ignore[call-overload]
        (lambda: core.reduce_scatter(x, axis, op="avg"), "one of sum, max, min, not 'avg'"),  # type: ignore[call-overload]
        (lambda: core.all_reduce(x, axis, out=torch.zeros(3, 2)), r"out must be .*\[4, 2\], not .*\[3, 2\]"),
        (lambda: core.all_reduce(x, axis, out=torch.zeros(4, 2).double()), "float32.*not torch.float64"),
        (lambda: core.all_reduce(x, axis, out=torch.zeros(2, 4).t()), "out must be contiguous"),
        (lambda: core.all_reduce(turned, axis, out=turned), "out must be contiguous"),
        (lambda: core.reduce_scatter(x, axis, sizes=[4]), r"sizes \[4\] must divide 4 rows among 2 ranks \(dp\)"),
        (lambda: core.reduce_scatter(x, axis, sizes=[2, 3]), r"sizes \[2, 3\] must divide 4 rows"),
        (lambda: core.reduce_scatter(x, axis, sizes=[5, -1]), r"sizes \[5, -1\] must divide 4 rows"),
        (lambda: core.reduce_scatter(x, axis, out=torch.zeros(3, 2)), r"out must be .*\[2, 2\]"),
        (lambda: core.reduce_scatter(torch.tensor(1.0), axis), r"pass tensor.view\(1\)"),
        (lambda: core.all_gather(x, axis, sizes=[4]), r"all_gather: rank . of dp has 4 rows, sizes: \[4\]"),
        (lambda: core.all_gather(x, axis, sizes=[3, 3]), r"has 4 rows, sizes: \[3, 3\]"),
        (lambda: core.all_gather(x, axis, out=torch.zeros(5, 2)), r"has 4 rows, sizes: \[3, 2\]"),
        (lambda: core.all_gather(x, axis, sizes=[4, 4], out=torch.zeros(7, 2)), r"out must be .*\[8, 2\]"),
        (lambda: core.all_gather(torch.tensor(1.0), axis), r"pass tensor.view\(1\)"),
        (lambda: core.all_to_all(x, axis, send_sizes=[1, 2]), r"send_sizes \[1, 2\] must divide 4 rows"),
        (lambda: core.all_to_all(x, axis, send_sizes=[2, 2], receive_sizes=[2]), r"receive_sizes \[2\] must be 2"),
        (lambda: core.all_to_all(x, axis, send_sizes=[2, 2], receive_sizes=[-1, -1]), "receive_sizes"),
        (lambda: core.all_to_all(x, axis, send_sizes=[2, 2], receive_sizes=[3, 3]), "this rank's own"),
        (lambda: core.all_to_all(x, axis, out=torch.zeros(3, 2)), r"out must be .*\[4, 2\]"),
        (lambda: core.broadcast(x, axis, src=2), "from rank 2 of dp, which has 2 ranks"),
        (lambda: core.broadcast(x, axis, src=-1), "from rank -1 of dp"),
        (lambda: core.broadcast(turned, axis), "must be contiguous"),
        (lambda: core.send_recv([(x, 2)], [], axis), r"rank . of dp \(size 2\) cannot reach 2"),
        (lambda: core.send_recv([(x, axis.rank)], [], axis), "cannot reach"),
        (lambda: core.send_recv([], [(turned, 1 - axis.rank)], axis), "must be contiguous"),
    ]
    with core.ledger() as book:
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                call()
    assert book.records == []  # what did not happen is not counted
    same(core.all_reduce(torch.ones(2), axis), torch.full((2,), 2.0))  # the group is unharmed


def test_bad_arguments_are_refused_with_both_numbers() -> None:
    testing.run(2, refused)


# ------------------------------------------------------------------------------------------------------- size one


def test_an_axis_of_one_rank_gives_the_input_back() -> None:
    axis = core.Mesh().dp
    x = torch.arange(6.0).view(3, 2)
    with core.ledger() as book:
        for collective in (core.all_reduce, core.reduce_scatter, core.all_gather, core.all_to_all, core.broadcast):
            assert collective(x, axis) is x
            assert collective(x, axis, async_op=True).wait() is x
        for collective in (core.all_reduce, core.reduce_scatter, core.all_gather, core.all_to_all):
            out = torch.zeros(3, 2)
            assert collective(x, axis, out=out) is out
            assert torch.equal(out, x)
            assert collective(x, axis, out=x) is x
            with pytest.raises(ValueError, match="out must be"):
                collective(x, axis, out=torch.zeros(2, 3))
        assert core.send_recv([], [], axis) == []
        core.barrier(axis)
        with pytest.raises(ValueError, match="cannot reach 1"):
            core.send_recv([(x, 1)], [], axis)
        with pytest.raises(ValueError, match="one of sum"):
            core.all_reduce(x, axis, op="mean")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="must divide 3 rows among 1 ranks"):
            core.reduce_scatter(x, axis, sizes=[2])
    assert book.records == []
