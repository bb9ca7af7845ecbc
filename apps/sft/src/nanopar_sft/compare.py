"""The command ``compare``: strategies side by side, beside public libraries and beside arithmetic.

    reference   plain training in one process              -> losses
    local       plain training on every rank, no talking   -> activations, for the floor of memory
    zero0, torch-ddp, ...  one after the other, each in fresh processes (trial.py, measure.py)
                 `--> rows (figures.py) --> terminal, output_dir/compare.md, output_dir/compare.json

A candidate that fails is a row that says why, its output is kept as ``output_dir/NAME.log``, the others still run, and
the exit status is 1. One that is not installed is a row too, and no failure.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from nanopar_sft import machine, tables, workload
from nanopar_sft.candidates import CANDIDATES, LOCAL, chosen
from nanopar_sft.config import DEFAULTS_OF, Config
from nanopar_sft.figures import Row, row_of
from nanopar_sft.measure import REFERENCE, STEPS_BEFORE_PAIRS, WARM_UP_STEPS, Report, things_to_do
from nanopar_sft.trial import TrialError, run_trial

JSON, MARKDOWN = "compare.json", "compare.md"
WIDTH = 100  # columns of the table where there is no terminal to ask

Tell = Callable[[int], None]


def run(config: Config) -> None:
    """Measure all candidates, print the table and write both files; exits with status 1 where one has failed."""
    names = chosen(config.strategies, config.peers)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    surroundings = machine.description()  # before the load is our own
    comparison = Comparison(config)
    with _progress(len(names) + 1, things_to_do(config)) as watch:
        with watch(REFERENCE) as tell:
            comparison.measure_reference(tell)
        for name in names:
            with watch(name) as tell:
                comparison.measure(name, tell)
            _write(config, comparison.rows, surroundings)  # what is known so far survives Ctrl-C
    rows = comparison.rows
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(tables.terminal(rows, title_of(config)))
    console.print(tables.LEGEND, style="dim")
    for line in tables.problems(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    failed = [row.strategy for row in rows if row.failed]
    if failed:
        print(f"nanopar-sft: failed: {', '.join(failed)}; see {config.output_dir}/*.log", file=sys.stderr)
        sys.exit(1)


def _write(config: Config, rows: list[Row], surroundings: dict[str, Any]) -> None:
    report = {
        "command": command_of(config),
        "versions": versions(),
        "machine": surroundings,
        "protocol": protocol(config, rows),
        "rows": [asdict(row) for row in rows],
    }
    text = tables.markdown(rows, title_of(config), command_of(config))
    (config.output_dir / MARKDOWN).write_text(text, encoding="utf-8")
    (config.output_dir / JSON).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def title_of(config: Config) -> str:
    """The heading of both tables."""
    return f"{config.model} on {config.nproc} ranks, {config.batch_size} x {config.seq_len} tokens a step, fp32"


class Comparison:
    """The rows so far, and what later ones are compared with."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rows: list[Row] = []
        self._losses: list[float] | None = None
        self._activation_bytes: int | None = None

    def measure_reference(self, tell: Tell) -> None:
        """Plain training in one process."""
        reports = self._reports(REFERENCE, "local", tell)
        if reports is not None:
            self._losses = reports[0].losses

    def measure(self, name: str, tell: Tell) -> None:
        """Add the row of a candidate."""
        candidate = CANDIDATES[name]
        missing = candidate.missing()
        if missing is not None:
            self.rows.append(Row(name, candidate.kind, problem=missing))
            return
        reports = self._reports(name, candidate.kind, tell)
        if reports is None:
            return
        if name == LOCAL:
            self._activation_bytes = max(report.activation_bytes for report in reports)
        self.rows.append(row_of(name, candidate, self.config, reports, self._losses, self._activation_bytes))

    def _reports(self, name: str, kind: str, tell: Tell) -> list[Report] | None:
        """What the ranks saw; None after a failure, which then has its row and its log."""
        log = self.config.output_dir / f"{name}.log"
        log.unlink(missing_ok=True)
        try:
            return run_trial(name, self.config, tell)
        except TrialError as error:
            log.write_text(error.log, encoding="utf-8")
            self.rows.append(Row(name, kind, problem=str(error), failed=True))
            return None


def command_of(config: Config) -> str:
    """The command line that measures the same; ``output_dir`` and time-outs change no figure and are left out."""
    words = ["nanopar-sft", "compare"]
    for name in ("model", "seq_len", "batch_size", "microbatches", "nproc", "threads", "pairs", "fused"):
        value = getattr(config, name)
        if value != DEFAULTS_OF["compare"].get(name, Config.model_fields[name].default) or name in ("model", "nproc"):
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    for name in ("strategies", "peers"):
        if getattr(config, name):
            words += [f"--{name}", ",".join(getattr(config, name))]
    return shlex.join(words)


def versions() -> dict[str, str]:
    """Of Python and of all packages that the figures depend on, as far as they are installed."""
    own = ("core", "zero", "tensor", "expert", "models", "sft")
    names = ("torch", "transformers", "deepspeed", "megatron-core", *(f"nanopar-{name}" for name in own))
    installed = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in names if name in installed}


def protocol(config: Config, rows: list[Row]) -> dict[str, Any]:
    """What was run, in numbers."""
    sizes = (report["sizes"]["parameters"] for row in rows for report in row.reports)
    return {
        "model": config.model,
        "parameter_bytes": next(sizes, None),
        "ranks": config.nproc,
        "threads": config.threads,
        "sequences": config.batch_size,
        "sequence_length": config.seq_len,
        "microbatches": config.microbatches,
        "precision": "fp32",
        "optimizer": f"AdamW, lr {workload.LEARNING_RATE}, weight decay {workload.WEIGHT_DECAY}",
        "fused": config.fused,
        "warm_up_steps": WARM_UP_STEPS,
        "steps_before_pairs": STEPS_BEFORE_PAIRS,
        "pairs": config.pairs,
    }


@contextmanager
def _progress(candidates: int, things: int) -> Iterator[Any]:
    """Gives ``watch(name)``: a context around one candidate that gives a function to tell how far it is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed} of {task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        number = 0

        @contextmanager
        def watch(name: str) -> Iterator[Tell]:
            nonlocal number
            number += 1
            if not console.is_terminal:
                print(f"{name} ({number} of {candidates})", file=sys.stderr, flush=True)
            task = bar.add_task(f"{name} ({number} of {candidates})", total=things)
            yield lambda done: bar.update(task, completed=done)
            bar.remove_task(task)

        yield watch
