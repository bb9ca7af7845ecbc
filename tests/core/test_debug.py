"""Debug mode: a mix-up of collectives raises on every rank within the limit, and says which rank is where."""

import os
import re
import signal
import time

import pytest
import torch

import nanopar_core as core
from nanopar_core import testing

LIMIT_S = 2.0


def error_on_each_rank(rank_code: str, ranks: int = 2) -> list[str]:
    """Run ``rank_code`` (the name of a function here) with comparisons on; each rank's error text, "" for none."""
    return testing.run(ranks, guarded, rank_code, timeout_s=60, debug_timeout_s=LIMIT_S)


def guarded(name: str) -> str:
    mesh = core.Mesh(dp=torch.distributed.get_world_size())
    started = time.monotonic()
    try:
        globals()[name](mesh.dp)
    except RuntimeError as error:
        assert time.monotonic() - started < LIMIT_S + 3
        return f"{type(error).__name__}: {error}"
    return ""


def swapped_order(axis: core.Axis) -> None:
    a, b = torch.ones(6, 6), torch.zeros(6, 6)
    first, second = (("a", a), ("b", b))[:: 1 if axis.rank == 0 else -1]
    core.all_reduce(first[1], axis, label=first[0])
    core.all_reduce(second[1], axis, label=second[0])


def other_operation(axis: core.Axis) -> None:
    core.all_reduce(torch.ones(4), axis)
    if axis.rank == 1:
        core.all_gather(torch.ones(4), axis, sizes=[4] * axis.size, label="layers.7")
    else:
        core.reduce_scatter(torch.ones(8), axis, label="layers.8")


def other_shape(axis: core.Axis) -> None:
    core.all_reduce(torch.ones(4 + axis.rank), axis)


def other_dtype_of_equal_bytes(axis: core.Axis) -> None:
    dtype = torch.float32 if axis.rank == 0 else torch.int32
    core.all_reduce(torch.ones(4, dtype=dtype), axis)


def everything_right(axis: core.Axis) -> None:
    for size in (3, 5):
        core.all_reduce(torch.ones(size), axis)
    core.all_gather(torch.ones(1 + axis.rank), axis)  # lengths may differ
    core.all_to_all(torch.ones(5), axis, send_sizes=[5, *[0] * (axis.size - 1)])
    core.broadcast(torch.ones(2), axis)
    core.barrier(axis)
    pending = [core.all_reduce(torch.ones(3), axis, async_op=True) for _ in range(3)]
    assert [p.wait()[0].item() for p in pending] == [axis.size] * 3
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    mine, theirs = torch.full((3,), float(axis.rank)), torch.empty(3)
    early = core.send_recv([], [(theirs, before)], axis, label="ring", async_op=True)
    core.send_recv([(mine, after)], [], axis, label="ring")
    early.wait()
    assert theirs[0].item() == before


@pytest.mark.parametrize("ranks", [2, 3])
def test_right_programs_pass(ranks: int) -> None:
    assert error_on_each_rank("everything_right", ranks) == [""] * ranks


def test_swapped_order_of_equal_tensors() -> None:
    for error in error_on_each_rank("swapped_order"):
        assert re.search(r"rank 0 is at #1 all_reduce on dp 'a' float32 \[6, 6\] from test_debug\.py:\d+; ", error), (
            error
        )
        assert re.search(r"rank 1 is at #1 all_reduce on dp 'b'", error), error


def test_other_operation_names_the_odd_one_first() -> None:
    for error in error_on_each_rank("other_operation", 3):
        assert re.match(
            r"CollectiveMismatchError: rank 1 is at #2 all_gather on dp 'layers\.7' float32 \[4\] from \S+:\d+"
            r"; ranks 0, 2 are at #2 reduce_scatter on dp 'layers\.8' float32 \[8\]",
            error,
        ), error


def test_other_shape() -> None:
    for error in error_on_each_rank("other_shape"):
        assert "float32 [4]" in error and "float32 [5]" in error


def test_other_dtype_of_equal_bytes() -> None:
    for error in error_on_each_rank("other_dtype_of_equal_bytes"):
        assert "rank 0 is at #1 all_reduce on dp float32 [4]" in error
        assert "rank 1 is at #1 all_reduce on dp int32 [4]" in error


def rank_1_elsewhere(axis: core.Axis) -> None:
    core.all_reduce(torch.ones(4), axis, label="before")
    if axis.rank == 1:
        time.sleep(LIMIT_S + 1.5)
    else:
        core.all_reduce(torch.ones(4), axis, label="after")


def test_a_rank_that_does_not_come() -> None:
    errors = error_on_each_rank("rank_1_elsewhere", 3)
    assert errors[1] == ""
    for error in (errors[0], errors[2]):
        assert re.search(r"rank 1 did not come within 2 s, it was last at #1 all_reduce on dp 'before'", error), error
        assert re.search(r"ranks 0, 2 wait in #2 all_reduce on dp 'after'", error), error


def wrong_message(axis: core.Axis) -> None:
    if axis.rank == 0:
        core.send_recv([(torch.ones(4), 1)], [], axis, label="activations")
    else:
        core.send_recv([], [(torch.ones(8, dtype=torch.bfloat16), 0)], axis, label="activations")


def test_a_message_of_the_wrong_kind() -> None:
    _, error = error_on_each_rank("wrong_message")
    assert 'expects from rank 0 a message ["torch.bfloat16", [8], "activations"]' in error
    assert 'that rank sends ["torch.float32", [4], "activations"]' in error


def no_message(axis: core.Axis) -> None:
    if axis.rank == 0:
        time.sleep(LIMIT_S + 1)
    else:
        core.send_recv([], [(torch.ones(8), 0)], axis, label="gradients")


def test_a_message_that_never_comes() -> None:
    _, error = error_on_each_rank("no_message")
    assert "rank 1 of dp got no message 'gradients' from rank 0 within 2 s" in error


def one_rank_raises(axis: core.Axis) -> None:
    core.all_reduce(torch.ones(4), axis, label="before")
    if axis.rank == 1:
        raise KeyError("lost")
    core.all_reduce(torch.ones(4), axis, label="after")


def unguarded(name: str) -> None:
    globals()[name](core.Mesh(dp=torch.distributed.get_world_size()).dp)


@pytest.mark.parametrize("debug_timeout_s", [None, 5.0])
def test_a_rank_that_raised_is_reported_with_the_places_of_all(
    debug_timeout_s: float | None,
) -> None:
    started = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        testing.run(3, unguarded, "one_rank_raises", timeout_s=60, debug_timeout_s=debug_timeout_s)
    assert time.monotonic() - started < 10
    said = "\n".join(caught.value.__notes__)
    assert re.search(r"rank 1 \(failed\): #1 all_reduce on dp 'before' float32 \[4\] from test_debug\.py:\d+", said), (
        said
    )
    for rank in (0, 2):
        assert re.search(rf"rank {rank}: #2 all_reduce on dp 'after' float32 \[4\]", said), said


def one_rank_stops(axis: core.Axis) -> None:
    core.all_reduce(torch.ones(4), axis, label="before")
    if axis.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    core.all_reduce(torch.ones(4), axis, label="after")


def test_a_stopped_rank_is_named_in_debug_mode() -> None:
    with pytest.raises(
        RuntimeError, match=r"rank 1 did not come within 2 s, it was last at #1 all_reduce on dp 'before'"
    ) as caught:
        testing.run(3, unguarded, "one_rank_stops", timeout_s=60, debug_timeout_s=LIMIT_S)
    assert "rank 1: gave no sign: dead, or stopped" in "\n".join(caught.value.__notes__)


def test_a_stopped_rank_is_named_when_the_time_out_strikes() -> None:
    with pytest.raises(RuntimeError) as caught:
        testing.run(2, stop_with_short_timeout, timeout_s=40)
    said = "\n".join(caught.value.__notes__)
    assert "rank 0 (failed): #2 all_reduce on dp 'after'" in said
    assert "rank 1: gave no sign: dead, or stopped" in said


def stop_with_short_timeout() -> None:
    from datetime import timedelta

    # The job's own time-out is the test's: a mesh of this world gets a shorter one.
    group = torch.distributed.new_group([0, 1], timeout=timedelta(seconds=2))
    one_rank_stops(core.as_axis(group))
