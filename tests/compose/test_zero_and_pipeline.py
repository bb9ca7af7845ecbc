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


# ---------------------------------------------------------------- a tied embedding: its two copies train as one weight


class Tied(torch.nn.Module):
    pp_plan = {  # noqa: RUF012
        "embed": (["ids"], ["hidden"]),
        "layers": (["hidden"], ["hidden"]),
        "head": (["hidden"], ["logits"]),
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(5, 3)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(3)])
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def tied_ids(step: int) -> Tensor:
    return torch.randint(5, (8, 4), generator=torch.Generator().manual_seed(step))


def tied_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * 8 * 4)


def tied_on_this_rank(name: str, stage: int, calls: int) -> dict[str, Any]:
    mesh = core.Mesh(pp=2, dp=2)
    schedule = schedules.NAMED[name](2, 1, 2)
    [module], specs = pipeline.split(Tied().double(), None, mesh.pp)
    optimizer = zero.shard(module, adamw, axis=mesh.dp, stage=stage, specs=specs, reduce="sum", bucket_bytes=1)
    runner = pipeline.Runner([module], schedule, mesh.pp, tied_loss)
    for step in range(5):
        for call in range(calls):  # accumulation over several runs of the schedule
            ids = tied_ids(10 * step + call).chunk(2)[mesh.dp.rank]
            with optimizer.no_sync():
                runner.step(ids, ids.roll(1, 1))
        optimizer.step()  # reduces: the two stages meet here, not somewhere in backward
        optimizer.zero_grad()
    optimizer.wait()
    with zero.gathered(module):
        mine = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    lists: list[Any] = [None, None]
    torch.distributed.all_gather_object(lists, mine, group=mesh.pp.group)
    weights = lists[0] | lists[1]
    assert torch.equal(weights.pop("head.weight"), weights["embed.weight"])
    return {"weights": weights}


@pytest.mark.parametrize(("name", "stage", "calls"), [("gpipe", 0, 2), ("1f1b", 1, 1), ("zb_h1", 1, 2)])
def test_a_tied_embedding(name: str, stage: int, calls: int) -> None:
    right = train_plainly(
        Tied().double(),
        [[(tied_ids(10 * step + call),) for call in range(calls)] for step in range(5)],
        lambda model, ids: tied_loss(model(ids), ids.roll(1, 1)),
        adamw,
    )
    found = run(4, tied_on_this_rank, name, stage, calls)
    assert_parity({"weights": right["weights"]}, found, axes={"pp": 2, "dp": 2})
