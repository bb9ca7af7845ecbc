"""How much communication hides behind computation: steps on ranks that a slow link joins, beside the critical path.

    hatch run bench:torchrun --nnodes 2 --nproc-per-node 1 ... benchmarks/link.py --link "200 Mbit/s" --output link-200

Started by torchrun on every host, one rank each; the link between the hosts is what limits them (two network namespaces
joined by a veth pair with ``tc qdisc add dev ... root tbf rate 200mbit burst 256kb latency 50ms`` do). Rank 0 prints a
row for each strategy and each peer:

    step         seconds a step of consecutive steps, median
    critical     the shortest step that the link's goodput and this machine's computation allow, for the strategy's
                 order of things: a simulation of one link and one computing rank, from times of a plain local step
    ratio        step / critical
    computation  a plain local step, on all ranks at once
    exposed      step - computation: communication that nothing hides
    goodput      MiB a second that an all_gather gets through the link, both directions at once

What the simulation knows of each stage (b: a bucket or unit, sent when ready and the link is free):

    0      all_reduce(b) when its gradients are there; the update waits for the last
    1, 2   reduce_scatter(b) likewise; all_gather(b) after the update, waited for by the next forward, unit by unit
    3      all_gather of a unit, one unit ahead, before its forward and again before its backward; then reduce_scatter

``-alone`` rows have nothing to hide behind: one bucket for everything, or no prefetch; under tensor parallelism
(``tp``, ``tp-sp``: every rank has the whole batch) every message is waited for before the computation goes on. These
have no critical path: what a layer sends, the next one needs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial, partialmethod
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_sft import machine, peers, workload
from nanopar_sft.candidates import CANDIDATES
from nanopar_sft.compare import versions
from nanopar_sft.setup import Setup, train_on_parts
from nanopar_sft.tables import pipe_table
from nanopar_tensor.sequence import DividedSequence, WholeSequence

BUCKET_BYTES = 8 * 2**20
MIB = 2**20


@dataclass
class Strategy:
    """A stage of nanopar_zero with options, and whether anything may overlap."""

    stage: int
    options: dict[str, Any] = field(default_factory=dict)


STRATEGIES = {
    "zero0": Strategy(0),
    "zero1": Strategy(1),
    "zero2": Strategy(2),
    "zero3": Strategy(3),
    "zero0-alone": Strategy(0, {"bucket_bytes": 2**40}),
    "zero3-alone": Strategy(3, {"prefetch": 0}),
}
TENSOR = ("tp", "tp-alone", "tp-sp", "tp-sp-alone")
PEERS = ("torch-ddp", "fsdp2-keep", "fsdp2-reshard", "torch-tp", "torch-tp-sp")


@dataclass
class Times:
    """One plain local step, in seconds from its start; lists by unit or bucket of the strategy in question."""

    forward: list[float]
    backward: list[float]
    ready: list[float]
    end_of_backward: float
    update: float


class Link:
    """Messages of given bytes, one after the other; ``send`` returns when one has arrived."""

    def __init__(self, goodput: float) -> None:
        self.goodput, self.free = goodput, 0.0

    def send(self, ready: float, sent: float) -> float:
        """A message that is ready at a time."""
        self.free = max(self.free, ready) + sent / self.goodput
        return self.free


def measure_goodput(axis: core.Axis, megabytes: int = 8) -> float:
    """Bytes a second from every rank, in an all_gather."""
    part = torch.zeros(megabytes * 2**20 // 4)
    seconds = []
    for _ in range(3):
        core.barrier(axis)
        started = time.perf_counter()
        core.all_gather(part, axis, sizes=[part.numel()] * axis.size)
        seconds.append(time.perf_counter() - started)
    return part.nbytes * (axis.size - 1) / statistics.median(seconds)


def local_times(setup: Setup, batch: Tensor, units: Sequence[str], buckets: Sequence[Sequence[str]]) -> Times:
    """When a plain step reaches and leaves each unit, and when each bucket's gradients are there."""
    model = setup.make_model()
    optimizer = workload.adamw(model.parameters(), setup.fused)
    marks: dict[tuple[str, str], float] = {}

    def mark(kind: str, name: str, *_: Any) -> None:
        marks[kind, name] = time.perf_counter()

    def watch_output(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        mark("forward ends", name)
        first = output if isinstance(output, Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(partial(mark, "backward begins", name))

    for name in units[1:]:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(partial(mark, "forward begins", name))
        module.register_forward_hook(partial(watch_output, name))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(mark, "gradient", name))
    for _ in range(3):
        optimizer.zero_grad()
        started = time.perf_counter()
        loss = workload.loss_of(model, setup.parts(batch)[0])
        forward_ends = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        optimizer.step()
        updated = time.perf_counter()
    begins = [marks["forward begins", name] for name in units[1:]] + [forward_ends]
    backward = [marks["backward begins", name] for name in reversed(units[1:])] + [ended]
    return Times(
        forward=[begins[0] - started, *(after - before for before, after in pairwise(begins))],
        backward=[
            backward[0] - forward_ends,
            *(after - before for before, after in pairwise(backward)),
        ],
        ready=[max(marks["gradient", name] for name in bucket) - started for bucket in buckets],
        end_of_backward=ended - started,
        update=updated - ended,
    )


def critical_path(stage: int, times: Times, goodput: float, buckets: Sequence[float], units: Sequence[float]) -> float:
    """Seconds of a step in the steady state.

    ``buckets``: bytes that a rank sends to reduce-scatter each, in the order of backward; ``units``: to gather each, in
    the order of forward, the root first.
    """
    link = Link(goodput)
    if stage == 3:
        return _critical_path_of_stage_3(times, link, units)
    arrivals = [link.send(at, sent * (2 if stage == 0 else 1)) for at, sent in zip(times.ready, buckets, strict=True)]
    updated = max(times.end_of_backward, arrivals[-1]) + times.update
    if stage == 0:
        return updated
    # The gathers of the step before begin at its update, where this step begins: how late does forward end by them?
    link = Link(goodput)
    arrived = [link.send(0.0, sent) for sent in reversed(buckets)]
    now, share = 0.0, 0.0
    total = sum(buckets)
    for unit_bytes, seconds in zip(units, times.forward, strict=True):
        share += unit_bytes / total
        needed = next(
            (at for i, at in enumerate(arrived) if sum(buckets[::-1][: i + 1]) / total >= share - 1e-9), arrived[-1]
        )
        now = max(now, needed) + seconds
    return updated + max(0.0, now - sum(times.forward))


def _critical_path_of_stage_3(times: Times, link: Link, units: Sequence[float]) -> float:
    root, *rest = units
    now = link.send(0.0, root)
    arrival = link.send(0.0, rest[0])
    now += times.forward[0]
    for index, seconds in enumerate(times.forward[1:]):
        upcoming = link.send(now, rest[index + 1]) if index + 1 < len(rest) else 0.0
        now = max(now, arrival) + seconds
        arrival = upcoming
    backward = [*reversed(rest)]
    now = max(now, link.send(now, root))
    arrival = link.send(now, backward[0])
    now += times.backward[0]
    for index, seconds in enumerate(times.backward[1:]):
        upcoming = link.send(now, backward[index + 1]) if index + 1 < len(backward) else 0.0
        if index:
            link.send(now, backward[index - 1])
        now = max(now, arrival) + seconds
        arrival = upcoming
    link.send(now, backward[-1])
    return max(now, link.send(now, root)) + times.update


def step_seconds(step: Callable[[Tensor], Tensor], batch: Tensor, axis: core.Axis, steps: int) -> float:
    """Median of consecutive steps, the first two left out."""
    seconds = []
    core.barrier(axis)
    for _ in range(steps + 2):
        started = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


@dataclass
class Row:
    """One line of the table, in seconds and bytes; peers have no critical path of their own."""

    strategy: str
    step_s: float
    computation_s: float
    goodput_bytes_s: float
    bytes_sent: float | None = None
    critical_s: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        return (
            self.strategy,
            f"{self.step_s:.2f}",
            "-" if self.critical_s is None else f"{self.critical_s:.2f}",
            "-" if self.critical_s is None else f"{self.step_s / self.critical_s:.2f}",
            f"{self.computation_s:.2f}",
            f"{self.step_s - self.computation_s:.2f}",
            "-" if self.bytes_sent is None else f"{self.bytes_sent / MIB:.0f}",
            f"{self.goodput_bytes_s / MIB:.1f}",
        )


HEADINGS = ("strategy", "step s", "critical s", "ratio", "computation s", "exposed s", "sent MiB", "goodput MiB/s")


def measure(name: str, setup: Setup, batch: Tensor, steps: int) -> Row:
    """One row."""
    if name in peers.PEERS:
        seconds = step_seconds(peers.PEERS[name].build(setup), batch, setup.axis, steps)
        times = local_times(setup, batch, [""], [])
        return Row(name, seconds, times.end_of_backward + times.update, measure_goodput(setup.axis))
    if name in TENSOR:
        return measure_tensor(name, setup, batch, steps)
    strategy = STRATEGIES[name]
    model = setup.make_model()
    optimizer = zero.shard(
        model,
        lambda groups: workload.adamw(groups, setup.fused),
        axis=setup.axis,
        stage=strategy.stage,
        **{"bucket_bytes": BUCKET_BYTES, **strategy.options},
    )

    def step(batch: Tensor) -> Tensor:
        loss = train_on_parts(model, setup.parts(batch))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    seconds = step_seconds(step, batch, setup.axis, steps)
    share = (setup.axis.size - 1) / setup.axis.size
    sizes = {id(b): b.parameters.numel() * b.parameters.element_size() * share for b in optimizer.reducer.buckets}
    names = [[slot.item.name for slot in bucket.layout.slots] for bucket in optimizer.reducer.buckets]
    units = optimizer.windows.units if strategy.stage else []
    unit_names = [unit.name for unit in units] or [""]
    unit_bytes = [_own_bytes(unit.buckets, unit.name, units, sizes) for unit in units] or [0.0]
    bucket_bytes = [sizes[id(bucket)] for bucket in optimizer.reducer.buckets]
    optimizer.close()
    goodput = measure_goodput(setup.axis)
    times = local_times(setup, batch, unit_names, names)
    return Row(
        name,
        seconds,
        times.end_of_backward + times.update,
        goodput,
        sum(bucket_bytes) * (3 if strategy.stage == 3 else 2),
        critical_path(strategy.stage, times, goodput, bucket_bytes, unit_bytes),
    )


def measure_tensor(name: str, setup: Setup, batch: Tensor, steps: int) -> Row:
    """Tensor parallelism, with or without anything beside its messages."""
    plain, _, alone = name.partition("-alone")
    with ExitStack() as stack:
        if name.endswith("alone"):
            for boundary in (WholeSequence, DividedSequence):
                for what in ("gather", "sum"):
                    waits = partialmethod(_and_wait, getattr(boundary, what))
                    stack.enter_context(mock.patch.object(boundary, what, waits))
        step = CANDIDATES[plain + alone].build(setup)
        with core.ledger() as book:
            step(batch)
            sent = sum(record.bytes for record in book.records)
        seconds = step_seconds(step, batch, setup.axis, steps)
    times = local_times(setup, batch, [""], [])
    return Row(name, seconds, times.end_of_backward + times.update, measure_goodput(setup.axis), sent)


def _and_wait(boundary: Any, action: Callable[..., core.Pending[Any]], *args: Any, **kwargs: Any) -> core.Pending[Any]:
    """Start a collective, and do nothing until it is done."""
    return core.Pending(action(boundary, *args, **kwargs).wait())


def _own_bytes(buckets: Sequence[Any], name: str, units: Sequence[Any], sizes: dict[int, float]) -> float:
    """What a unit adds to the bytes that must have arrived: of a shared bucket its own parameters' share."""
    inside = [unit.name + "." for unit in units if unit.name]
    total = 0.0
    for bucket in buckets:
        slots = bucket.layout.slots
        own = [
            slot.numel
            for slot in slots
            if (slot.item.name.startswith(name + ".") if name else not slot.item.name.startswith(tuple(inside)))
        ]
        total += sizes[id(bucket)] * sum(own) / max(1, sum(slot.numel for slot in slots))
    return total


def markdown(rows: Sequence[Row], title: str) -> str:
    """The table in Markdown."""
    return f"# {title}\n\n{pipe_table(HEADINGS, [row.cells for row in rows])}\n"


def main() -> None:
    """Measure all rows on all ranks; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join([*STRATEGIES, *TENSOR, *PEERS]), help="comma-separated")
    parser.add_argument("--model", default="dense", help="as in nanopar-sft compare")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each row")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of all ranks together")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--link", default="a link", help="what the link is, for the title")
    parser.add_argument("--output", type=Path, help="write this name with .json and .md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with core.launch(device="cpu", seed=workload.SEED) as world:
        axis = core.Mesh(dp=world.size).dp
        setup = Setup(options.model, axis, world.device, 1, fused=True)
        vocabulary = workload.vocabulary(workload.build_model(options.model))
        batch = workload.batch(0, options.batch_size, options.seq_len, vocabulary)
        rows = []
        for name in options.rows.split(","):
            rows.append(measure(name, setup, batch, options.steps))
            if world.rank == 0:
                print(*rows[-1].cells, sep="\t", flush=True)
        if world.rank == 0 and options.output:
            about = {
                "command": shlex.join(["benchmarks/link.py", *sys.argv[1:]]),
                "versions": versions(),
                "machine": machine.description(),
                "rows": [asdict(row) for row in rows],
            }
            title = f"{options.model} on {world.size} ranks joined by {options.link}"
            options.output.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            options.output.with_suffix(".md").write_text(markdown(rows, title), encoding="utf-8")


if __name__ == "__main__":
    main()
