"""nanopar_core's collectives beside torch.distributed's own on gloo: ``hatch run bench:collectives``.

    fill, barrier, [ours]     fill, barrier, [memcpy]    fill, barrier, [torch's]      and back in the other order
                  time of a call: its slowest rank's; time in the table: the median of ``--repeats`` calls

Every size is that of the whole tensor on one rank: the input of all_reduce, reduce_scatter, all_to_all and broadcast,
the output of all_gather. Outputs are allocated before, on both sides. Bytes are those of the rank that sends most, read
from ``/proc/self/io`` (what the process handed to write calls), beside what nanopar's ledger says for ours. memcpy
copies the whole tensor once, on all ranks at the same time. Every rank uses one thread.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import nanopar_core as core
from nanopar_core import testing
from nanopar_sft.tables import pipe_table

MIB = 1 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, None where torch has no such collective."""

    ranks: int
    op: str
    dtype: str
    mib: float
    ours_ms: float
    torch_ms: float | None
    memcpy_ms: float
    ours_sent: int
    model_sent: int
    torch_sent: int | None


@dataclass(frozen=True)
class Side:
    """One implementation on one rank: times of its calls in seconds, bytes written and bytes in the ledger of one."""

    seconds: list[float]
    written: int
    modelled: int


def written() -> int:
    """Bytes that this process has handed to write calls so far; gloo's messages are among them."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])


def pairs(whole: Tensor, axis: core.Axis) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any] | None]]:
    """Per operation: its name, ours, and torch's (None for parts of unequal length that gloo's form refuses)."""
    parts = whole.tensor_split(axis.size)
    sizes = [part.numel() for part in parts]
    even = len(set(sizes)) == 1
    part = parts[axis.rank].clone()
    gathered, exchanged = torch.empty_like(whole), whole.new_empty(sizes[axis.rank] * axis.size)
    receive = [sizes[axis.rank]] * axis.size

    def all_to_all() -> None:
        dist.all_to_all_single(exchanged, whole, receive, sizes)

    yield "all_reduce", lambda: core.all_reduce(whole, axis, out=whole), lambda: dist.all_reduce(whole)
    yield (
        "reduce_scatter",
        lambda: core.reduce_scatter(whole, axis, out=part),
        (lambda: dist.reduce_scatter_single(part, whole)) if even else None,
    )
    yield (
        "all_gather",
        lambda: core.all_gather(part, axis, sizes=sizes, out=gathered),
        (lambda: dist.all_gather_single(gathered, part)) if even else None,
    )
    yield "all_to_all", lambda: core.all_to_all(whole, axis, out=exchanged), all_to_all
    yield "broadcast", lambda: core.broadcast(whole, axis), lambda: dist.broadcast(whole, 0)


def measure(sizes: Sequence[int], dtype: torch.dtype, repeats: int) -> list[tuple[str, int, Side, Side | None, Side]]:
    """On one rank: (operation, elements, ours, torch's, memcpy) for tensors of that many elements."""
    axis = core.Mesh(dp=dist.get_world_size()).dp
    results = []
    for elements in sizes:
        whole = torch.empty(elements, dtype=dtype)
        target = torch.empty_like(whole)
        for name, ours, native in pairs(whole, axis):
            calls: list[Callable[[], Any]] = [ours, partial(target.copy_, whole), *([native] if native else [])]
            sides = alternate(calls, whole, axis, repeats)
            results.append((name, elements, sides[0], sides[2] if native else None, sides[1]))
    return results


def alternate(calls: Sequence[Callable[[], Any]], whole: Tensor, axis: core.Axis, repeats: int) -> list[Side]:
    """Run the calls in turn, once to warm up and to count bytes, then ``repeats`` times with a clock."""
    sides = []
    for call in calls:
        whole.fill_(1.0)
        core.barrier(axis)
        before = written()
        with core.ledger() as book:
            call()
        core.barrier(axis)  # the last bytes have left
        modelled = sum(record.bytes for record in book.records)
        sides.append(Side([], written() - before, modelled))
    turn = list(zip(calls, sides, strict=True))
    for _ in range(repeats):
        for call, side in turn:
            whole.fill_(1.0)  # sums stay small however often they are repeated
            core.barrier(axis)
            start = time.perf_counter()
            call()
            side.seconds.append(time.perf_counter() - start)
        turn.reverse()
    return sides


def table(
    ranks: Sequence[int], mebibytes: Sequence[float], dtypes: Sequence[str], repeats: int, odd: bool
) -> list[Row]:
    """Measure every combination; one set of processes for each number of ranks and dtype."""
    rows = []
    for size in ranks:
        for name in dtypes:
            dtype = DTYPES[name]
            elements = [int(mib * MIB) // dtype.itemsize // size * size - int(odd) for mib in mebibytes]
            for together in zip(*testing.run(size, measure, elements, dtype, repeats, timeout_s=600.0), strict=True):
                op, count = together[0][:2]
                ours, native, memcpy = ([rank[column] for rank in together] for column in (2, 3, 4))
                theirs = [side for side in native if side is not None]
                rows.append(
                    Row(
                        ranks=size,
                        op=op,
                        dtype=name,
                        mib=count * dtype.itemsize / MIB,
                        ours_ms=slowest(ours),
                        torch_ms=slowest(theirs) if theirs else None,
                        memcpy_ms=slowest(memcpy),
                        ours_sent=max(side.written for side in ours),
                        model_sent=max(side.modelled for side in ours),
                        torch_sent=max(side.written for side in theirs) if theirs else None,
                    )
                )
    return rows


def slowest(sides: Sequence[Side]) -> float:
    """Median over the calls of the slowest rank's milliseconds."""
    calls: list[tuple[float, ...]] = list(zip(*(side.seconds for side in sides), strict=True))
    return 1e3 * statistics.median([max(times) for times in calls])


HEADINGS = (
    "ranks",
    "op",
    "dtype",
    "MiB",
    "ours ms",
    "torch ms",
    "ours / torch",
    "memcpy ms",
    "ours sent MiB",
    "model MiB",
    "torch sent MiB",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    ratio = None if row.torch_ms is None else row.ours_ms / row.torch_ms
    figures = [row.ours_ms, row.torch_ms, ratio, row.memcpy_ms]
    figures += [None if sent is None else sent / MIB for sent in (row.ours_sent, row.model_sent, row.torch_sent)]
    return str(row.ranks), row.op, row.dtype, f"{row.mib:g}", *("-" if x is None else f"{x:.2f}" for x in figures)


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, readable as plain text too."""
    return pipe_table(HEADINGS, map(cells, rows), left=(1, 2)) + "\n"


def show(rows: Sequence[Row]) -> None:
    """To a terminal as a coloured table (with rich, where installed), else as plain text."""
    if not sys.stdout.isatty():
        print(markdown(rows), end="")
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*HEADINGS)
    for row in rows:
        faster = row.torch_ms is None or row.ours_ms <= row.torch_ms
        drawn.add_row(*cells(row), style=None if faster else "yellow")
    Console().print(drawn)


def circumstances() -> dict[str, Any]:
    """The command, versions and machine that the figures belong to."""
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "nanopar-core")},
        },
        "machine": {
            "platform": platform.platform(),
            "cpu": models[0] if models else platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and with ``--output`` write collectives.md and collectives.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 8, 32], help="sizes of the whole tensor")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--odd", action="store_true", help="one element less, so that the parts are of unequal length")
    parser.add_argument("--output", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if not sys.platform.startswith("linux"):
        parser.error("the bytes written come from /proc/self/io, which only Linux has")
    if options.repeats < 1 or min(options.ranks) < 2:
        parser.error("at least one repeat and two ranks are needed")
    load = os.getloadavg()[0]
    rows = table(options.ranks, options.mib, options.dtypes, options.repeats, options.odd)
    show(rows)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        report = circumstances() | {"load_before": load, "rows": [asdict(row) for row in rows]}
        (options.output / "collectives.json").write_text(json.dumps(report, indent=2) + "\n")
        (options.output / "collectives.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
