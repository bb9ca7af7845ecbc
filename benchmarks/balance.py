"""What balancing does to a real run: ``hatch run bench:python benchmarks/balance.py --output docs/benchmarks``.

A Phi-MoE of the preset ``nano`` with nanopar_expert's ``TopKRouter`` in place of its own routers learns the generated
word problems of ``nanopar-sft train``, three times from the same weights and in the same order:

    nothing   no balancing
    loss      BalancingLoss, per sequence
    bias      BiasBalancer

For every step: how many tokens the busiest expert of a layer got, as a multiple of the mean (worst layer; 1 is even),
and the loss. With ``--output`` a table ``balance.md``, the numbers ``balance.json`` and the picture ``balance.svg``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import nanopar_expert as expert
import nanopar_models as models
from nanopar_sft.assemble import load_chat, model_shape, training_batches
from nanopar_sft.config import Config
from nanopar_sft.plot import smooth
from nanopar_sft.tables import pipe_table

WAYS = {"nothing": "no balancing", "loss": "BalancingLoss, 0.01 per sequence", "bias": "BiasBalancer, rate 0.01"}
LAST = 0.2  # part of the steps whose median the table shows


def train(way: str, steps: int, batch_size: int) -> dict[str, list[float]]:
    """The busiest expert's multiple of the mean, and the loss, by step."""
    config = Config(batch_size=batch_size, seed=0)
    chat = load_chat(config)
    model = models.PhiMoE(model_shape(config, chat), seed=config.seed)
    torch.manual_seed(0)
    for layer in model.model.layers:
        mixture: Any = layer.mlp
        shape = model.config
        mixture.router = expert.TopKRouter(
            shape.hidden_size, shape.num_local_experts, shape.num_experts_per_tok, bias=way == "bias"
        )
    routers = expert.routers_of(model)
    load = expert.ExpertLoad(routers)
    balance = expert.BalancingLoss(routers, 0.01) if way == "loss" else None
    balancer = expert.BiasBalancer(routers, rate=0.01) if way == "bias" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    _, batches = training_batches(config, chat)
    found: dict[str, list[float]] = {"busiest": [], "loss": []}
    for step in range(steps):
        [batch] = batches.local(step, 0, 1)
        counted = batches.label_count(step)
        load.clear()
        if balance is not None:
            rows = batch.attention_mask.nonzero()[:, 0]
            balance.begin_step(tokens=rows.numel(), sequences=rows)
        labels = models.next_token_labels(batch.labels, batch.attention_mask)
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits
        loss = model.loss(logits, labels, counted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if balancer is not None:
            balancer.step()
        found["busiest"].append(max((n.max() / n.double().mean()).item() for n in load.counts().values()))
        found["loss"].append(loss.item())
        if step % 20 == 0:
            print(f"{way}: step {step}, loss {loss.item():.3f}, busiest {found['busiest'][-1]:.2f}", flush=True)
    return found


def table(runs: dict[str, dict[str, list[float]]], command: str) -> str:
    """Markdown: medians of the last steps."""
    lines = []
    for way, found in runs.items():
        last = max(1, int(LAST * len(found["loss"])))
        busiest, loss = (statistics.median(found[key][-last:]) for key in ("busiest", "loss"))
        lines.append([WAYS[way], f"{busiest:.2f}", f"{loss:.3f}"])
    steps = len(next(iter(runs.values()))["loss"])
    shown = pipe_table(("balancing", "busiest expert / mean", "loss"), lines)
    return f"Medians of the last {LAST:.0%} of {steps} steps.\n\n{shown}\n\n    {command}\n"


def draw(runs: dict[str, dict[str, list[float]]], file: Path) -> None:
    """The two curves of every run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way, found in runs.items():
        left.plot(smooth(found["busiest"]), label=WAYS[way])
        right.plot(smooth(found["loss"]), label=WAYS[way])
    left.set_ylabel("tokens of the busiest expert / mean")
    left.axhline(1.0, color="black", linewidth=0.5)
    right.set_ylabel("loss")
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(file)


def main(arguments: list[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="optimizer steps of each run [300]")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="sequences in a step [16]")
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory for table, numbers and picture")
    given = parser.parse_args(arguments)
    runs = {way: train(way, given.steps, given.batch_size) for way in WAYS}
    command = "hatch run bench:python benchmarks/balance.py " + shlex.join(arguments or sys.argv[1:])
    text = table(runs, command)
    print(text)
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "balance.md").write_text(text)
        (given.output / "balance.json").write_text(json.dumps(runs) + "\n")
        draw(runs, given.output / "balance.svg")


if __name__ == "__main__":
    main()
