"""Pipelines as planned and as they run: ``hatch run bench:python benchmarks/pipeline.py --output docs/benchmarks``.

    every schedule   some steps on two ranks, one thread each, of a model whose stages weigh about the same
    measured         when each rank computed what, waiting left out; the time from the first to the last action
    planned          the simulator's makespan with the mean times of every stage's F, B, I and W in the same step,
                     messages at no cost

The quotient says what the runner loses beyond what the schedule itself leaves idle: the median over the steps. The
picture has the plan of one schedule above its measured run, on one scale.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanopar_core as core
import nanopar_pipeline as pipeline
from nanopar_core.testing import run
from nanopar_pipeline import schedules
from nanopar_pipeline.passes import Span
from nanopar_sft.tables import pipe_table

RANKS, STEPS, WARM_UP = 2, 9, 2
LAYERS, WIDTH, ROWS, LENGTH = 8, 256, 1, 256  # rows of one micro-batch
RUNS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_h1": 1, "zbv": 2}
DRAWN = "1f1b"


class Model(nn.Module):
    """Layers of one size, so that a bubble is the schedule's and not the model's."""

    pp_plan = {"layers": (["x"], ["x"])}  # noqa: RUF012 - a plan

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        ]
        self.layers = nn.ModuleList(blocks)


def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean square; the target is the input."""
    return (x - y).square().mean()


def on_rank(name: str, chunks: int, microbatches: int) -> list[list[Span]]:
    """Spans of every step."""
    axis = core.Mesh(pp=RANKS).pp
    schedule = schedules.NAMED[name](RANKS, chunks, microbatches)
    stages, _ = pipeline.split(Model(), None, axis, chunks=chunks, placement=schedule.placement)
    runner = pipeline.Runner(stages, schedule, axis, loss_fn)
    x = torch.randn(microbatches * ROWS, LENGTH, WIDTH)
    found = []
    for step in range(WARM_UP + STEPS):
        core.barrier(axis)
        runner.step(x, x)
        if step >= WARM_UP:
            found.append(runner.spans)
        for stage in stages:
            stage.zero_grad()
    return found


def measured(name: str, chunks: int, microbatches: int) -> dict[str, Any]:
    """One row, and what the picture needs."""
    of_ranks = run(RANKS, on_rank, name, chunks, microbatches, timeout_s=300)
    schedule = schedules.NAMED[name](RANKS, chunks, microbatches)
    steps = []
    for of_step in zip(*of_ranks, strict=True):
        times: dict[tuple[int, str], list[float]] = {}
        for span in (span for spans in of_step for span in spans):
            times.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)
        plan = schedule.simulate(of_stages={key: statistics.fmean(values) for key, values in times.items()})
        ends = [span for spans in of_step for span in spans]
        makespan = max(span.end for span in ends) - min(span.start for span in ends)
        steps.append((makespan / plan.makespan, makespan, plan, list(of_step)))
    quotient, makespan, plan, spans = sorted(steps, key=lambda step: step[0])[STEPS // 2]
    return {
        "schedule": name,
        "microbatches": microbatches,
        "planned_ms": 1e3 * plan.makespan,
        "measured_ms": 1e3 * makespan,
        "quotient": quotient,
        "bubble": plan.bubble,
        "plan": plan,
        "spans": spans,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    headings = ("schedule", "micro-batches", "planned, ms", "measured, ms", "measured / planned", "bubble of the plan")
    return pipe_table(
        headings,
        [
            (
                row["schedule"],
                row["microbatches"],
                f"{row['planned_ms']:.1f}",
                f"{row['measured_ms']:.1f}",
                f"{row['quotient']:.3f}",
                f"{row['bubble']:.1%}",
            )
            for row in rows
        ],
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=list(RUNS))
    parser.add_argument("--microbatches", type=int, default=4 * RANKS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rows = [measured(name, RUNS[name], options.microbatches) for name in options.schedules]
    print(table(rows))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "benchmarks/pipeline.py", *(sys.argv[1:] if arguments is None else arguments)])
        about = {"command": command, "load_average": os.getloadavg()[0], "torch": torch.__version__}
        numbers = [{key: value for key, value in row.items() if key not in ("plan", "spans")} for row in rows]
        (options.output / "pipeline.json").write_text(json.dumps({**about, "rows": numbers}, indent=1) + "\n")
        text = f"# Pipelines: planned and measured\n\n`{command}`, {RANKS} ranks\n\n{table(rows)}\n"
        (options.output / "pipeline.md").write_text(text)
        drawn = next((row for row in rows if row["schedule"] == DRAWN), rows[0])
        pipeline.write_svg(drawn["plan"], options.output / "pipeline.svg", measured=drawn["spans"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
