"""Data and pipeline parallelism: nanopar-zero on the stages of nanopar-pipeline trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nanopar_core as core
import nanopar_models as models
import nanopar_pipeline as pipeline
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run, train_plainly
from nanopar_pipeline import schedules

STEPS, ROWS, LENGTH, VOCABULARY = 3, 8, 6, 37


def build() -> models.PhiMoE:
    shape = models.PhiMoEConfig.preset("nano", vocab_size=VOCABULARY, num_hidden_layers=4)
    return models.PhiMoE(shape, seed=4).double().train()


def ids_of(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / (ROWS * LENGTH)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def on_this_rank(name: str, chunks: int, stage: int, held: bool) -> dict[str, Any]:
    mesh = core.Mesh(pp=2, dp=2)
    schedule = schedules.NAMED[name](2, chunks, 4)
    stages, _ = pipeline.split(build(), None, mesh.pp, chunks=chunks, placement=schedule.placement)
    optimizers = {
        number: zero.shard(module, adamw, axis=mesh.dp, stage=stage, reduce="sum", bucket_bytes=30_000)
        for number, module in zip(schedule.stages_of(mesh.pp.rank), stages, strict=True)
    }
    held_back: dict[int, Any] = {}

    def first(number: int) -> None:
        if held:
            optimizers[number].hold()
        held_back[number] = optimizers[number].no_sync()
        held_back[number].__enter__()

    def last(number: int) -> None:
        held_back.pop(number).__exit__(None, None, None)

    runner = pipeline.Runner(stages, schedule, mesh.pp, loss_fn, on_first_forward=first, on_last_backward=last)
    losses = []
    for step in range(STEPS):
        ids = ids_of(step).chunk(2)[mesh.dp.rank]
        loss = runner.step({"input_ids": ids}, ids.roll(1, 1))
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(core.all_reduce(loss, mesh.dp).item())
    weights: dict[str, Tensor] = {}
    for optimizer, module in zip(optimizers.values(), stages, strict=True):
        optimizer.wait()
        with zero.gathered(module):
            weights |= {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    lists: list[Any] = [None, None]
    torch.distributed.all_gather_object(lists, weights, group=mesh.pp.group)
    return {"loss": losses, "weights": lists[0] | lists[1]}


@pytest.mark.parametrize(
    ("name", "chunks", "stage", "held"),
    [
        ("1f1b", 1, 0, False),
        ("1f1b", 1, 1, False),
        ("interleaved", 2, 2, False),
        ("zb_h1", 1, 1, False),
        ("1f1b", 1, 3, True),
        ("zbv", 2, 0, False),
    ],
)
def test_stages_of_a_pipeline_train_as_one_process(name: str, chunks: int, stage: int, held: bool) -> None:
    right = train_plainly(
        build(),
        [[(ids_of(step),)] for step in range(STEPS)],
        lambda model, ids: loss_fn(model(ids).logits, ids.roll(1, 1)),
        adamw,
    )
    found = run(4, on_this_rank, name, chunks, stage, held)
    assert_parity({key: right[key] for key in ("loss", "weights")}, found, axes={"pp": 2, "dp": 2})
