"""The README's example runs, and its timeline is what a step really does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import run

ROOT = Path(__file__).parents[2]
README = (ROOT / "packages" / "zero" / "README.md").read_text()


def block(kind: str, number: int) -> str:
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)[number]


@pytest.mark.parametrize(
    ("number", "needs", "largest_loss"),
    [(0, "torch", 0.2), (1, "transformers", 1.0), (2, "peft", 5.5)],
    ids=["Linear", "Qwen3", "LoRA"],
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's
def test_the_examples_run(
    number: int, needs: str, largest_loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needs)
    monkeypatch.chdir(tmp_path)
    example = block("python", number)
    assert len([line for line in example.splitlines() if line]) <= 18
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"].item() < largest_loss


def test_the_measured_memory_is_that_of_the_published_benchmark() -> None:
    report = json.loads((ROOT / "docs" / "benchmarks" / "compare-dense.json").read_text())
    peaks = {row["strategy"]: row["peak_memory_bytes"] for row in report["rows"]}
    rows = re.findall(r"^\| (zero\S+) \| .* \| ([\d.]+) \| ([\d.]+) \|$", README, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == ["zero0", "zero1", "zero2", "zero3", "zero3-keep"]
    for name, computed, measured in rows:
        assert measured == f"{peaks[name] / 2**20:.1f}"
        assert abs(float(computed) - float(measured)) <= 0.11


def timeline(stage: int) -> list[str]:
    """The second step of three layers on two ranks, one bucket each: what is computed, and what goes out between."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    lines: list[str] = []

    def sent() -> None:
        lines.extend(f"{'':26}--> {record.op} of {record.label}, {record.bytes:,} bytes" for record in book.records)
        book.clear()

    def event(text: str) -> None:
        sent()
        lines.append(text)

    for name, layer in model.named_children():  # before shard, so that these hooks run first in backward
        layer.weight.register_post_accumulate_grad_hook(lambda _, name=name: event(f"  gradients of layer {name}"))
    axis = core.Mesh(dp=2).dp
    optimizer = zero.shard(model, lambda g: torch.optim.SGD(g, lr=0.1), axis=axis, stage=stage, bucket_bytes=16_000)
    for name, layer in model.named_children():  # after shard, so that these run after its hooks: the layer starts
        layer.register_forward_pre_hook(lambda *_, name=name: event(f"  forward of layer {name}"))
    with core.ledger() as book:
        for _ in range(2):
            lines.clear()
            event("loss = model(x).sum()")
            loss = model(torch.ones(2, 64)).sum()
            for what, call in (
                ("loss.backward()", loss.backward),
                ("optimizer.clip_grad_norm_(1.0)", lambda: optimizer.clip_grad_norm_(1.0)),
                ("optimizer.step()", optimizer.step),
                ("optimizer.zero_grad()", optimizer.zero_grad),
            ):
                event(what)
                call()
            sent()
    return lines


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_timeline_is_that_of_a_real_step(stage: int) -> None:
    first, second = run(2, timeline, stage)
    assert first == second
    heading = "stage 1, and 2\n" if stage in (1, 2) else f"stage {stage}\n"
    drawn = next(text for text in re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL) if text.startswith(heading))
    assert drawn.removeprefix(heading) == "\n".join(first) + "\n"
