"""nanopar_models' Phi-MoE beside transformers' own: ``hatch run bench:models``.

    weights -+-> ours ----------.
             +-> compiled       +-> one step of each in turn, there and back: forward and backward of the same tokens
             '-> transformers --'    ours, compiled, theirs | theirs, compiled, ours | ours, ...

A process of its own measures each row. transformers' model is tried with each of its experts implementations that runs
on a CPU; the fastest in CPU time is the peer that the others are timed beside. Both models route deterministically
(the form that transformers uses in evaluation) and keep no key/value cache. Losses are compared before anything is
timed. CPU time is that of all threads; on a machine that others use too it is the steadier of the two. A ratio is
theirs / ours, of medians: above 1 ours is faster.

The share that is not matrix multiplication comes from torch.profiler's profiles of single steps: 1 - (time within the
products themselves: mm, addmm, bmm, grouped_mm and the attention kernels) / (time of the step).

With ``--output`` every row is written when it is done. Rows of the same machine and versions that are there already
stay, unless they are measured again; so a disturbed row is repeated by itself, with ``--models``, ``--dtypes`` and
``--threads``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nanopar_models as models
from nanopar_sft.tables import pipe_table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Phi-tiny-MoE divided by eight in width, heads and vocabulary, two layers deep, its experts as wide as they are.
EIGHTH = models.PhiMoEConfig(
    vocab_size=4008,
    hidden_size=512,
    intermediate_size=448,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=16,
    max_position_embeddings=4096,
)
# Per model its configuration and the batch, [sequences, tokens]: 2,048 tokens each.
WORKLOADS = {"hidden-512": (EIGHTH, (4, 512)), "nano": (models.PhiMoEConfig.preset("nano"), (32, 64))}
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")  # deepgemm and sonicmoe, the others of 5.24, need CUDA
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_dot_product")


@dataclasses.dataclass(frozen=True)
class Side:
    """One model: seconds of its steps by the clock and of the CPU, and the share that is not matrix multiplication."""

    wall_s: list[float]
    cpu_s: list[float]
    other_share: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    ``tried``: CPU seconds of one step per experts implementation, or why it did not run; ``load``: the machine's load
    average before; ``measured``: when, in UTC.
    """

    model: str
    dtype: str
    threads: int
    measured: str
    load: float
    peer: str
    tried: dict[str, float | str]
    sides: dict[str, Side]
    compile_s: float | None


def step(model: Any, ids: Tensor) -> Tensor:
    """Forward and backward; the loss."""
    model.zero_grad()
    loss: Tensor = model(
        input_ids=ids, labels=ids, **({} if isinstance(model, models.PhiMoE) else {"use_cache": False})
    ).loss
    loss.backward()
    return loss.detach()


def clocked(model: Any, ids: Tensor) -> tuple[float, float]:
    """Wall and CPU seconds of one step."""
    wall, cpu = time.perf_counter(), time.process_time()
    step(model, ids)
    return time.perf_counter() - wall, time.process_time() - cpu


def transformers_model(ours: models.PhiMoE) -> Any:
    """transformers' model with the weights of ours, in the mode without noise."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    values = ours.config.to_dict()
    settings = {name: value for name, value in values.items() if name not in ("architectures", "rope_scaling")}
    theirs = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**settings))
    theirs.load_state_dict(ours.state_dict())
    return theirs.to(ours.lm_head.weight.dtype).eval()


def try_implementations(theirs: Any, ids: Tensor) -> dict[str, float | str]:
    """CPU seconds of one step, the better of two, with each experts implementation, or why it was not run."""
    tried: dict[str, float | str] = {}
    config, size = theirs.config, next(theirs.parameters()).element_size()
    # batched_mm copies the weights of its expert for every token and choice, and keeps them for the backward pass.
    expert_bytes = 3 * config.hidden_size * config.intermediate_size * size
    copies = 2 * ids.numel() * expert_bytes * config.num_hidden_layers
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for name in IMPLEMENTATIONS:
        if name == "batched_mm" and 2 * copies > available:
            tried[name] = f"not run: it copies {copies / 2**30:.1f} GiB of weights"
            continue
        theirs.set_experts_implementation(name)
        seconds = clocked(theirs, ids)[1]
        best = min((other for other in tried.values() if isinstance(other, float)), default=seconds)
        # The first step is slow for reasons of its own, but not by so much.
        tried[name] = seconds if seconds > 5 * best else min(seconds, clocked(theirs, ids)[1])
    return tried


def other_share(model: Any, ids: Tensor) -> float:
    """The share of a step's time that is not matrix multiplication: the median of three steps."""
    shares = []
    for _ in range(3):
        with torch.profiler.profile() as profile, torch.profiler.record_function("step"):
            step(model, ids)
        events = {event.key: event for event in profile.key_averages()}
        products = sum(event.self_cpu_time_total for key, event in events.items() if key.startswith(PRODUCTS))
        shares.append(1 - products / events["step"].cpu_time_total)
    return float(statistics.median(shares))


def measure(name: str, dtype: str, threads: int, pairs: int, compiled: bool) -> Row:
    """One row, in the process that calls it."""
    measured, load = time.strftime("%Y-%m-%d %H:%M", time.gmtime()), os.getloadavg()[0]
    torch.set_num_threads(threads)
    config, batch = WORKLOADS[name]
    ours = models.PhiMoE(config, dtype=DTYPES[dtype])
    theirs = transformers_model(ours)
    ids = torch.randint(config.vocab_size, batch, generator=torch.Generator().manual_seed(0))
    tried = try_implementations(theirs, ids)
    peer = min((seconds, name) for name, seconds in tried.items() if isinstance(seconds, float))[1]
    theirs.set_experts_implementation(peer)
    sides: dict[str, Any] = {"ours": ours, "transformers": theirs}
    compile_s = None
    if compiled:
        sides["compiled"] = models.PhiMoE(config, dtype=DTYPES[dtype])
        sides["compiled"].load_state_dict(ours.state_dict())
        sides["compiled"].compile_layers()
        compile_s = clocked(sides["compiled"], ids)[0]
    losses = {side: step(model, ids) for side, model in sides.items()}  # warm now
    for loss in losses.values():
        torch.testing.assert_close(loss, losses["ours"], rtol=2e-3 if dtype == "bf16" else 1e-5, atol=0)
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    turn = list(sides)
    for _ in range(pairs):
        for side in turn:
            times[side].append(clocked(sides[side], ids))
        turn.reverse()
    results = {
        side: Side([wall for wall, _ in times[side]], [cpu for _, cpu in times[side]], other_share(model, ids))
        for side, model in sides.items()
    }
    return Row(name, dtype, threads, measured, load, peer, tried, results, compile_s)


def measure_each(names: Sequence[str], dtypes: Sequence[str], threads: Sequence[int], **options: Any) -> Iterator[Row]:
    """All rows, each in a fresh process."""
    for row in itertools.product(names, dtypes, threads):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            yield process.submit(measure, *row, **options).result()


def ratio(row: Row, side: str, clock: Callable[[Side], list[float]]) -> float:
    """How many times faster ``side`` is than transformers, by medians."""
    return statistics.median(clock(row.sides["transformers"])) / statistics.median(clock(row.sides[side]))


HEADINGS = (
    "model",
    "dtype",
    "threads",
    "peer",
    "ours wall ms",
    "theirs wall ms",
    "ours CPU ms",
    "theirs CPU ms",
    "ratio wall",
    "ratio CPU",
    "ours not matmul",
    "theirs not matmul",
    "compiled CPU ms",
    "compiled ratio wall",
    "compiled ratio CPU",
    "compiling s",
)


def wall(side: Side) -> list[float]:
    """Its seconds by the clock."""
    return side.wall_s


def cpu(side: Side) -> list[float]:
    """Its CPU seconds."""
    return side.cpu_s


def spread(seconds: Sequence[float]) -> str:
    """Median and range in milliseconds."""
    return f"{1e3 * statistics.median(seconds):.0f} ({1e3 * min(seconds):.0f}-{1e3 * max(seconds):.0f})"


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    ours, theirs, compiled = (row.sides.get(side) for side in ("ours", "transformers", "compiled"))
    assert ours is not None and theirs is not None
    return (
        row.model,
        row.dtype,
        str(row.threads),
        row.peer,
        *(spread(clock(side)) for clock in (wall, cpu) for side in (ours, theirs)),
        *(f"{ratio(row, 'ours', clock):.2f}" for clock in (wall, cpu)),
        *(f"{side.other_share:.0%}" for side in (ours, theirs)),
        "-" if compiled is None else spread(compiled.cpu_s),
        *("-" if compiled is None else f"{ratio(row, 'compiled', clock):.2f}" for clock in (wall, cpu)),
        "-" if row.compile_s is None else f"{row.compile_s:.0f}",
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, readable as plain text too, and what became of each experts implementation."""
    table = pipe_table(HEADINGS, map(cells, rows), left=(0, 1, 3))
    tried = [f"- {row.model} {row.dtype} {row.threads}: {', '.join(map(said, row.tried.items()))}" for row in rows]
    return (
        f"{table}\n\nCPU ms of one step with each experts implementation of transformers:\n\n" + "\n".join(tried) + "\n"
    )


def said(tried: tuple[str, float | str]) -> str:
    """One experts implementation's figure."""
    name, result = tried
    return f"{name} {1e3 * result:.0f}" if isinstance(result, float) else f"{name} {result}"


def circumstances() -> dict[str, Any]:
    """The versions and the machine that the figures belong to."""
    processors = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "nanopar-models")},
        },
        "machine": {
            "platform": platform.platform(),
            "cpu": processors[0] if processors else platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
    }


def earlier_rows(folder: Path) -> list[Row]:
    """The rows of ``folder``'s models.json that belong to this machine and these versions."""
    file = folder / "models.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    if any(report.get(name) != value for name, value in circumstances().items()):
        return []
    return [
        Row(**{**row, "sides": {name: Side(**side) for name, side in row["sides"].items()}}) for row in report["rows"]
    ]


def place(row: Row) -> tuple[int, int, int]:
    """Where a row stands in the table."""
    return list(WORKLOADS).index(row.model), list(DTYPES).index(row.dtype), row.threads


def write(rows: Sequence[Row], folder: Path) -> None:
    """models.md and models.json."""
    folder.mkdir(parents=True, exist_ok=True)
    command = {"command": shlex.join(["hatch", "run", "bench:models", *sys.argv[1:]])}
    report = command | circumstances() | {"rows": [dataclasses.asdict(row) for row in rows]}
    (folder / "models.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "models.md").write_text(markdown(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and with ``--output`` write models.md and models.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out the compiled model and the minutes it takes"
    )
    parser.add_argument("--output", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.pairs < 1 or min(options.threads) < 1:
        parser.error("at least one pair and one thread are needed")
    table = {place(row): row for row in (earlier_rows(options.output) if options.output else [])}
    for row in measure_each(
        options.models, options.dtypes, options.threads, pairs=options.pairs, compiled=not options.no_compile
    ):
        table[place(row)] = row
        rows = [table[key] for key in sorted(table)]
        if options.output is not None:
            write(rows, options.output)
    print(markdown(rows), end="")


if __name__ == "__main__":
    main()
