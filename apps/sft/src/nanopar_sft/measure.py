"""One candidate of ``compare`` in processes of its own: ``python -m nanopar_sft.measure CANDIDATE FOLDER PARENT``.

    not a rank -> starts the ranks -> each:   step 0, 1   warm up
                                              step 2      collectives counted
                                              then ``pairs`` times: barrier, [the candidate's step]
                                                                    barrier, [a plain local step]
                                                                    barrier, [the collectives it needs, alone]
                                              all dropped, and the candidate built once more:
                                              step 0, 1   warm up    | torch's allocations counted,
                                              step 2      memory     | from before the model is built

All ranks do the same at the same time, so the three clocks of a turn see the same load of the machine: figures are
ratios inside a turn. A model that is built later computes a few percent faster than one that was built first, in memory
fresh from the kernel: so the plain steps are in turn those of a model built before the candidate, and of one built
after it. FOLDER holds ``config.yaml``; a rank leaves ``rank-N.json`` or ``error-N.txt``, and rank 0 a byte
in ``progress`` for each step or turn. PARENT is the process that waits for all this. The candidate ``reference`` gives
the losses of plain training in one process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import nanopar_core as core
from nanopar_sft import launcher, machine, workload
from nanopar_sft.candidates import CANDIDATES, LOCAL, Candidate, local
from nanopar_sft.config import Config
from nanopar_sft.floors import Sizes
from nanopar_sft.memory import MemoryCounter
from nanopar_sft.setup import Setup, Step, train_on_parts
from nanopar_sft.traffic import CallCounter, written_bytes

T = TypeVar("T")

REFERENCE = "reference"
A_MOMENT = 0.05  # seconds after which gloo's threads have let go of a finished collective's tensors
WARM_UP_STEPS = 2
STEPS_BEFORE_PAIRS = WARM_UP_STEPS + 1  # in which collectives are counted
PIECE_BYTES = 8 * 2**20  # the floor's collectives go in pieces of this size, as real ones do
CONFIG, PROGRESS = "config.yaml", "progress"


@dataclass
class Clock:
    """Seconds of each timed call on one rank: on the wall, and of all its threads on the CPU."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass
class Report:
    """What one rank saw; memory as ``MemoryCounter`` counts it, bytes per step.

    ``activation_bytes``: what forward and backward of one micro-batch take above weights and moments where every
    gradient is dropped as soon as it is complete (measured by plain local training only).
    ``bytes_modelled``: from nanopar's ledger; None for peers. ``bytes_written``: of the timed steps, where one can see.
    """

    sizes: Sizes
    losses: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0
    live_memory_bytes: int = 0
    activation_bytes: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    bytes_modelled: int | None = None
    bytes_written: list[int | None] = field(default_factory=list)
    candidate: Clock = field(default_factory=Clock)
    local: Clock = field(default_factory=Clock)
    collectives: Clock = field(default_factory=Clock)

    @classmethod
    def read(cls, file: Path) -> Report:
        """The report that a rank has left."""
        values = json.loads(file.read_text(encoding="utf-8"))
        clocks = {name: Clock(**values[name]) for name in ("candidate", "local", "collectives")}
        return cls(**{**values, **clocks, "sizes": Sizes(**values["sizes"])})


def things_to_do(config: Config) -> int:
    """The bytes that ``progress`` has at the end, for every name."""
    return STEPS_BEFORE_PAIRS + config.pairs + WARM_UP_STEPS + 1


def main(arguments: list[str]) -> int:
    """Start the ranks, or be one; returns the exit status."""
    name, folder = arguments[0], Path(arguments[1])
    config = Config.parse(["--config", str(folder / CONFIG)])
    launcher.end_with_launcher()
    if not launcher.in_rank():
        if os.getppid() != int(arguments[2]):
            return 1  # the parent ended before this process could ask to end with it
        ranks = 1 if name == REFERENCE else config.nproc or 1
        return launcher.launch(ranks, arguments, threads=config.threads, module="nanopar_sft.measure")
    rank = os.environ["RANK"]
    machine.set_threads(config.threads)
    try:
        with core.launch(timeout_s=config.timeout_s, seed=workload.SEED) as world:
            report = Measurement(config, world, folder / PROGRESS).run(name)
            (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(report)), encoding="utf-8")
    except Exception as error:  # a rank that only stops because another one failed leaves through SystemExit
        (folder / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise
    return 0


class Measurement:
    """One candidate on one rank."""

    def __init__(self, config: Config, world: core.World, progress: Path) -> None:
        self.config, self.device = config, world.device
        self.axis = core.Mesh(dp=world.size).dp
        self.progress = progress if world.rank == 0 else None
        self.setup = Setup(config.model, self.axis, world.device, config.microbatches, config.fused)
        model = workload.build_model(config.model)  # brings in what is only imported when a model is built, too
        self.vocabulary = workload.vocabulary(model)
        self.sizes = workload.sizes(model, config.batch_size * config.seq_len)

    def run(self, name: str) -> Report:
        """The whole protocol, or the reference's losses."""
        report = Report(self.sizes)
        if name == REFERENCE:
            step = local(self.setup)
            report.losses = [self._step(step, number) for number in range(STEPS_BEFORE_PAIRS + self.config.pairs)]
            return report
        candidate = CANDIDATES[name]
        self._time_and_count(candidate, report)
        gc.collect()  # the models are gone
        self._memory(candidate, report, with_activations=name == LOCAL)
        return report

    def _time_and_count(self, candidate: Candidate, report: Report) -> None:
        earlier = self._plain()
        step = candidate.build(self.setup)
        report.losses += [self._step(step, number) for number in range(WARM_UP_STEPS)]
        self._calls(candidate, step, report)
        self._pairs(candidate, step, (earlier, self._plain()), report)

    def _batch(self, number: int) -> Tensor:
        return workload.batch(number, self.config.batch_size, self.config.seq_len, self.vocabulary)

    def _step(self, step: Step, number: int) -> float:
        loss = step(self._batch(number)).item()
        self._report_progress()
        return loss

    def _report_progress(self) -> None:
        if self.progress is not None:
            with self.progress.open("a") as file:
                file.write(".")

    def _memory(self, candidate: Candidate, report: Report, *, with_activations: bool) -> None:
        with MemoryCounter(self.device) as counter:
            step = candidate.build(self.setup)
            for number in range(WARM_UP_STEPS):
                self._step(step, number)
            with counter.window("step"):
                self._step(step, WARM_UP_STEPS)
                time.sleep(A_MOMENT)
            if with_activations:
                model = self.setup.make_model()
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
                parts = self.setup.parts(self._batch(WARM_UP_STEPS))
                with counter.window("activations"):
                    train_on_parts(model, parts[:1])
        window = counter.windows["step"]
        report.peak_memory_bytes, report.live_memory_bytes = window.peak, window.end
        if with_activations:
            window = counter.windows["activations"]
            report.activation_bytes = window.peak - window.start

    def _calls(self, candidate: Candidate, step: Step, report: Report) -> None:
        """nanopar's collectives by its ledger: some are made of torch's point-to-point ones."""
        with core.ledger() as book:
            if candidate.kind == "peer":
                with CallCounter() as counter:
                    loss = self._step(step, WARM_UP_STEPS)
                report.calls = dict(counter.calls)
            else:
                loss = self._step(step, WARM_UP_STEPS)
                report.calls = dict(Counter(record.op for record in book.records))
                report.bytes_modelled = sum(record.bytes for record in book.records)
        report.losses.append(loss)

    def _plain(self) -> Step:
        """Plain local training, warm."""
        plain = local(self.setup)
        for number in range(WARM_UP_STEPS):
            plain(self._batch(number))
        return plain

    def _pairs(self, candidate: Candidate, step: Step, plain: tuple[Step, Step], report: Report) -> None:
        collectives = self._collectives(candidate)
        collectives()
        for number in range(self.config.pairs):
            batch = self._batch(STEPS_BEFORE_PAIRS + number)
            before = self._barrier_and_count()
            loss = self._time(partial(step, batch), report.candidate)
            after = written_bytes()
            report.bytes_written.append(None if before is None or after is None else after - before)
            report.losses.append(loss.item())
            self._barrier_and_count()
            self._time(partial(plain[number % 2], batch), report.local)
            self._barrier_and_count()
            self._time(collectives, report.collectives)
            self._report_progress()

    def _barrier_and_count(self) -> int | None:
        core.barrier(self.axis)
        return written_bytes()

    def _time(self, action: Callable[[], T], clock: Clock) -> T:
        self._finish_queued()
        cpu, wall = time.process_time(), time.perf_counter()
        result = action()
        self._finish_queued()
        clock.wall.append(time.perf_counter() - wall)
        clock.cpu.append(time.process_time() - cpu)
        return result

    def _finish_queued(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _collectives(self, candidate: Candidate) -> Callable[[], None]:
        """What the candidate cannot do without, on buffers of that size, one after the other."""
        messages = candidate.needs.collectives(self.sizes, self.config.microbatches)
        whole = torch.zeros(max((message.size for message in messages), default=0) // 4, device=self.device)

        def run() -> None:
            for op, size, number in messages:
                for _ in range(number):
                    for piece in whole[: size // 4].split(PIECE_BYTES // 4):
                        _once(op, piece, self.axis)

        return run


def _once(op: str, whole: Tensor, axis: core.Axis) -> None:
    """One collective in place: all_gather sends this rank's part of ``whole``, reduce_scatter fills it.

    An all_to_all is of this rank's part, a send_recv of the whole, and neither in place.
    """
    part = whole.split(core.split_sizes(whole.numel(), axis.size))[axis.rank]
    if op == "all_reduce":
        core.all_reduce(whole, axis, out=whole)
    elif op == "reduce_scatter":
        core.reduce_scatter(whole, axis, out=part)
    elif op == "send_recv":
        other = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        core.send_recv([(whole, other[0])], [(torch.empty_like(whole), other[1])], axis)
    elif op == "all_to_all":
        core.all_to_all(part, axis, out=torch.empty_like(part))
    else:
        core.all_gather(part, axis, out=whole)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
