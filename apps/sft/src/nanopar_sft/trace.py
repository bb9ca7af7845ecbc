"""The command ``trace``: what one optimizer step sends, and when.

    step 1, 2   warm up
    step 3      ledger open, profiler on --> a table of collectives by call site, for every rank
                                         --> output_dir/trace/rank-N.json: computation beside communication

The JSON files open in chrome://tracing or https://ui.perfetto.dev. Each collective appears twice: as a mark
``nanopar <op> <axis> <label>`` where it is issued, and as the backend's own event while it runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import nanopar_core as core
from nanopar_core.ledger import Ledger, Record, Total, observing
from nanopar_sft import assemble, machine
from nanopar_sft.config import Config
from nanopar_sft.train import Trainer

WARM_UP_STEPS = 2
FOLDER = "trace"


def run(config: Config) -> None:
    """Trace step 3 of a training run that is thrown away."""
    machine.set_threads(config.threads)
    chat = assemble.load_chat(config)
    _, batches = assemble.training_batches(config, chat)
    model = assemble.model_to_train(config, chat)
    with core.launch(timeout_s=config.timeout_s, seed=config.seed) as world:
        trainer = Trainer(config, world, model, chat, batches, [], WARM_UP_STEPS + 1)
        with core.ledger() as book:
            for step in range(1, WARM_UP_STEPS + 1):
                trainer.step(step, book)
            book.clear()
            folder = config.output_dir / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            _profile(trainer, book, folder / f"rank-{world.rank}.json")
        sent = _sent_by_each_rank(book, trainer.parallel.axes.world)
    if world.rank == 0:
        _print(sent, world.size, folder)


def _profile(trainer: Trainer, book: Ledger, file: Path) -> None:
    """One step under torch's profiler, every collective marked where it is issued."""

    def mark(record: Record, _axis: core.Axis) -> None:
        with torch.profiler.record_function(f"nanopar {record.op} {record.axis} {record.label or record.site}"):
            pass

    with torch.profiler.profile() as profiler, observing(mark):
        trainer.step(WARM_UP_STEPS + 1, book)
    profiler.export_chrome_trace(str(file))


def _sent_by_each_rank(book: Ledger, axis: core.Axis) -> dict[tuple[str, str, str], list[Total]]:
    """What every rank sent, by (op, axis, call site); a pipeline's stages send different things."""
    mine = [[*site, total.calls, total.bytes] for site, total in sorted(book.by_site().items())]
    data = torch.frombuffer(bytearray(json.dumps(mine).encode() + b"\n"), dtype=torch.uint8)
    lines = bytes(core.all_gather(data, axis, label="trace").tolist()).decode().splitlines()
    sent: dict[tuple[str, str, str], list[Total]] = {}
    for rank, line in enumerate(lines):
        for op, name, site, calls, size in json.loads(line):
            sent.setdefault((op, name, site), [Total()] * len(lines))[rank] = Total(calls, size)
    return sent


def _print(sent: dict[tuple[str, str, str], list[Total]], ranks: int, folder: Path) -> None:
    table = Table(title="one step's collectives: bytes sent by each rank")
    for column in ("op", "axis", "where"):
        table.add_column(column)
    for column in ("calls", *(f"rank {rank}" for rank in range(ranks))):
        table.add_column(column, justify="right")
    for name, totals in sent.items():
        table.add_row(*name, str(max(total.calls for total in totals)), *(f"{total.bytes:,}" for total in totals))
    table.add_section()
    sums = [sum((totals[rank] for totals in sent.values()), Total()) for rank in range(ranks)]
    table.add_row("all", "", "", str(max(total.calls for total in sums)), *(f"{total.bytes:,}" for total in sums))
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"timelines: {folder}/rank-*.json, for chrome://tracing or https://ui.perfetto.dev")
