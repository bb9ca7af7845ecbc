"""The README's example runs, and its timeline is what a step really does."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import run

README = (Path(__file__).parents[2] / "packages" / "zero" / "README.md").read_text()


def block(kind: str, number: int) -> str:
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)[number]


def test_the_example_runs(monkeypatch: Any) -> None:
    example = block("python", 0)
    assert len([line for line in example.splitlines() if line]) <= 15
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"].item() < 0.2


def timeline() -> list[str]:
    """One step of three layers on two ranks, one bucket each: gradients as they come, and what goes out between."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    lines: list[str] = []

    def sent() -> None:
        lines.extend(f"{'':26}--> {record.op} over {record.axis}, {record.bytes:,} bytes" for record in book.records)
        book.clear()

    def arrived(name: str) -> None:
        sent()
        lines.append(f"  gradient of {name}")

    for name, parameter in model.named_parameters():  # before shard, so that these hooks run first
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived(name))
    axis = core.Mesh(dp=2).dp
    optimizer = zero.shard(model, lambda g: torch.optim.SGD(g, lr=0.1), axis=axis, stage=0, bucket_bytes=16_000)
    with core.ledger() as book:
        loss = model(torch.ones(2, 64)).sum()
        for what, call in (
            ("loss.backward()", loss.backward),
            ("optimizer.clip_grad_norm_(1.0)", lambda: optimizer.clip_grad_norm_(1.0)),
            ("optimizer.step()", optimizer.step),
        ):
            sent()
            lines.append(what)
            call()
        sent()
    return lines


def test_the_timeline_is_that_of_a_real_step() -> None:
    first, second = run(2, timeline)
    assert first == second
    assert block("text", 1) == "\n".join(first) + "\n"
