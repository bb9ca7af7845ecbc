"""The ledger: what it records, what it costs when closed, and its bytes against what the process really wrote."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nanopar_core as core
from nanopar_core import testing

MIB = 1 << 20


# ----------------------------------------------------------------------------------------------------------- bytes


def written() -> int:
    """Bytes that this process has passed to write calls so far; gloo sends through writev, which counts."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])


def modelled_and_written() -> dict[str, tuple[int, int, int]]:
    """By operation: bytes in the ledger, bytes written, and the exact number expected of this rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = core.Mesh(dp=size).dp
    rows = size * MIB // 8  # `whole` has 2 MiB per rank: 4 bytes for each of 4 columns
    whole = torch.randn(rows, 4)
    part = torch.randn(rows // size, 4)
    bytes_whole, bytes_part = 16 * rows, 16 * rows // size
    half = whole.bfloat16()
    uneven = [(rows // size) * (2 if peer == 0 else 1) for peer in range(size)]  # rank 0 has twice as much
    longer = torch.randn(sum(uneven), 4)
    mine = longer.split(uneven)[rank]
    to_last = [0] * (size - 1) + [rows]  # all rows to the last rank
    from_all = [rows] * size if rank == size - 1 else [0] * size
    others = size - 1
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "all_reduce": (lambda: core.all_reduce(whole, axis), 2 * bytes_whole * others // size),
        "all_reduce max": (lambda: core.all_reduce(whole, axis, op="max"), 2 * bytes_whole * others // size),
        "all_reduce int64": (lambda: core.all_reduce(whole.long(), axis), 4 * bytes_whole * others // size),
        "all_reduce bf16": (lambda: core.all_reduce(half, axis), bytes_whole * others // size),
        "reduce_scatter": (lambda: core.reduce_scatter(whole, axis), bytes_part * others),
        "reduce_scatter bf16": (lambda: core.reduce_scatter(half, axis), bytes_part * others // 2),
        "reduce_scatter uneven": (
            lambda: core.reduce_scatter(longer, axis, sizes=uneven),
            16 * (sum(uneven) - uneven[rank]),
        ),
        "all_gather": (lambda: core.all_gather(part, axis), bytes_part * others),
        "all_gather uneven": (lambda: core.all_gather(mine, axis, sizes=uneven), 16 * uneven[rank] * others),
        "all_to_all": (lambda: core.all_to_all(whole, axis), bytes_part * others),
        "all_to_all uneven": (
            lambda: core.all_to_all(whole, axis, send_sizes=to_last, receive_sizes=from_all),
            0 if rank == size - 1 else bytes_whole,
        ),
        "broadcast": (lambda: core.broadcast(whole, axis, src=1), bytes_whole * others if rank == 1 else 0),
        "send_recv": (
            lambda: core.send_recv([(whole, (rank + 1) % size)], [(torch.empty_like(whole), (rank - 1) % size)], axis),
            bytes_whole,
        ),
        "torch's reduce_scatter": (
            lambda: dist.reduce_scatter_single(torch.empty_like(part), whole),
            2 * bytes_part * others,
        ),
    }
    seen = {}
    for name, (call, expected) in calls.items():
        core.barrier(axis)
        before = written()
        with core.ledger() as book:
            call()
        core.barrier(axis)  # the last bytes have left
        after = written()
        sent = sum(total.bytes for (op, _), total in book.totals().items() if op != "all_gather_sizes")
        seen[name] = sent, after - before, expected
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/io")
@pytest.mark.parametrize("world_size", [2, 4])
def test_modelled_bytes_are_what_the_process_wrote(world_size: int) -> None:
    for seen in testing.run(world_size, modelled_and_written):
        native = seen.pop("torch's reduce_scatter")
        ours = seen["reduce_scatter"]
        assert native[1] > 1.9 * ours[1]  # gloo's own is an all-reduce underneath
        for name, (modelled, really, expected) in seen.items():
            assert modelled == expected, name
            assert abs(really - expected) <= 0.02 * expected + 2000, (name, really, expected)  # headers, barriers


# --------------------------------------------------------------------------------------------------------- records


def here() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno


def records_every_operation() -> dict[str, Any]:
    axis = core.Mesh(dp=2).dp
    x = torch.zeros(6, 2)
    other = 1 - axis.rank
    core.all_reduce(x, axis)  # before the ledger is open
    with core.ledger() as book:
        core.all_reduce(x, axis, label="a label")
        core.all_reduce(x.half(), axis)
        line = here() - 1
        core.reduce_scatter(x, axis, sizes=[4, 2])
        core.all_gather(x[: 4 if axis.rank else 2], axis, label="uneven")
        core.all_to_all(x, axis, send_sizes=[5, 1])
        core.broadcast(x, axis, async_op=True).wait()
        core.send_recv([(x.double(), other)], [(x.double(), other)], axis)
        core.barrier(axis)
        after_all = here()
        with core.ledger() as inner:
            for _ in range(3):
                core.all_reduce(x, axis, label="inner")
    core.all_reduce(x, axis)  # after
    weight = torch.ones(2, requires_grad=True)
    with core.ledger() as backward:
        y = core.identity_fwd_all_reduce_bwd(weight, axis, label="f")
        core.all_reduce_fwd_identity_bwd(y * 2, axis)
        y.sum().backward()
    return {
        "records": [(r.op, r.axis, r.bytes, r.dtype, r.label) for r in book.records],
        "sites": [r.site for r in book.records],
        "lines": (line, after_all),
        "totals": {key: (total.calls, total.bytes) for key, total in book.totals().items()},
        "by_site": {key: (total.calls, total.bytes) for key, total in book.by_site().items()},
        "inner": [(r.op, r.label) for r in inner.records],
        "text": str(inner),
        "backward": [(r.op, r.label, r.bytes) for r in backward.records],
    }


def test_records() -> None:
    for rank, seen in enumerate(testing.run(2, records_every_operation)):
        part, rest = (4, 2) if rank == 0 else (2, 4)  # rows of reduce_scatter's parts
        gathered = 4 if rank else 2
        assert seen["records"][:9] == [
            ("all_reduce", "dp", 48, "float32", "a label"),
            ("all_reduce", "dp", 24, "float16", ""),
            ("reduce_scatter", "dp", rest * 8, "float32", ""),
            ("all_gather_sizes", "dp", 8, "int64", ""),
            ("all_gather", "dp", gathered * 8, "float32", "uneven"),
            ("all_to_all_sizes", "dp", 8, "int64", ""),
            ("all_to_all", "dp", (1 if rank == 0 else 5) * 8, "float32", ""),
            ("broadcast", "dp", 48 if rank == 0 else 0, "float32", ""),
            ("send_recv", "dp", 96, "float64", ""),
        ]
        assert (
            seen["records"][9:]
            == [("barrier", "dp", 0, "uint8", "")] + [("all_reduce", "dp", 48, "float32", "inner")] * 3
        )
        assert part + rest == 6
        line, after_all = seen["lines"]
        assert seen["sites"][1] == f"test_ledger.py:{line}"
        assert seen["sites"][9] == f"test_ledger.py:{after_all - 1}"
        assert seen["totals"]["all_reduce", "dp"] == (5, 48 + 24 + 3 * 48)
        assert seen["totals"]["barrier", "dp"] == (1, 0)
        assert len(seen["totals"]) == 9
        assert seen["by_site"]["all_reduce", "dp", "a label"] == (1, 48)
        assert seen["by_site"]["all_reduce", "dp", f"test_ledger.py:{line}"] == (1, 24)
        assert seen["by_site"]["all_reduce", "dp", "inner"] == (3, 144)
        assert seen["inner"] == [("all_reduce", "inner")] * 3
        assert seen["text"].splitlines() == [
            "op          axis  calls  bytes sent  where",
            "all_reduce  dp        3         144  inner",
        ]
        assert seen["backward"] == [("all_reduce", "", 8), ("all_reduce", "f", 8)]


def test_clear_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    with core.ledger() as book:
        record_two()
        assert len(book.records) == 2
        book.clear()
        assert book.totals() == book.by_site() == {}
        record_two()
    book.print()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["op", "axis", "calls", "bytes", "sent", "where"]
    assert lines[1].split() == ["all_reduce", "dp", "2", "2,468", "here"]
    assert len({line.index(word) for line, word in zip(lines, ("where", "here"), strict=True)}) == 1  # aligned


def record_two() -> None:
    from nanopar_core.ledger import record

    axis = core.Axis("dp", 2, 0, None, ((0, 1),), communicates=True)
    record("all_reduce", axis, 1234, torch.float32, (4,), "here")
    record("all_reduce", axis, 1234, torch.float32, (4,), "here")


def test_ledgers_close_in_any_order_and_on_errors() -> None:
    first, second = core.ledger(), core.ledger()
    outer, inner = first.__enter__(), second.__enter__()
    record_two()
    second.__exit__(None, None, None)  # equal to the other one, but not it
    record_two()
    first.__exit__(None, None, None)
    record_two()
    assert (len(outer.records), len(inner.records)) == (4, 2)
    first, second = core.ledger(), core.ledger()
    outer, inner = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    record_two()
    second.__exit__(None, None, None)
    assert (len(outer.records), len(inner.records)) == (0, 2)
    with pytest.raises(KeyError), core.ledger() as book:
        record_two()
        raise KeyError
    record_two()
    assert len(book.records) == 2


def python_calls(call: Callable[[], Any]) -> list[str]:
    """Names of the Python functions of core's ledger that run inside ``call``."""
    names: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("nanopar_core/ledger.py"):
            names.append(frame.f_code.co_name)

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def cost_of_a_collective() -> tuple[list[str], list[str]]:
    axis = core.Mesh(dp=2).dp
    x = torch.ones(4)
    closed = python_calls(lambda: core.all_reduce(x, axis))
    with core.ledger():
        opened = python_calls(lambda: core.all_reduce(x, axis))
    return closed, opened


def test_a_closed_ledger_costs_no_more_than_the_flight_recorder() -> None:
    for closed, opened in testing.run(2, cost_of_a_collective):
        assert closed == ["record", "_call_site"]
        assert opened == ["record", "_call_site", "__call__"]
