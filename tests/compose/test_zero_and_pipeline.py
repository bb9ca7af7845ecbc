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


# -------------------------------------------------------------------- all stages of a rank as one module; checkpoints


def with_stages(name: str, chunks: int, stage: int, held: bool) -> dict[str, Any]:
    """One optimizer over all stages of a rank: weights after some steps, norms, and what was sent in the last step."""
    mesh = core.Mesh(pp=2, dp=2)
    schedule = schedules.NAMED[name](2, chunks, 4)
    parts, specs = pipeline.split(build(), None, mesh.pp, chunks=chunks, placement=schedule.placement)
    stages = pipeline.Stages(parts)
    optimizer = zero.shard(stages, adamw, axis=mesh.dp, stage=stage, specs=specs, reduce="sum", bucket_bytes=30_000)
    runner = pipeline.Runner(stages, schedule, mesh.pp, loss_fn)
    losses, norms = [], []
    for step in range(STEPS):
        ids = ids_of(step).chunk(2)[mesh.dp.rank]
        if held:
            optimizer.hold(gradients=True)
        with core.ledger() as book, optimizer.no_sync():
            loss = runner.step({"input_ids": ids}, ids.roll(1, 1))
            norms.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.release()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(core.all_reduce(loss, mesh.dp).item())
    if held and stage > 1:
        reduced = book.totals()["reduce_scatter", "dp"].calls
        assert reduced == len(optimizer.reducer.buckets), "once in a step, whatever the micro-batches and chunks"
    optimizer.wait()
    with zero.gathered(stages):
        weights = {name: parameter.detach().clone() for name, parameter in stages.named_parameters()}
    lists: list[Any] = core.gather_objects(weights, mesh.pp)
    return {"loss": losses, "norm": norms, "weights": lists[0] | lists[1]}


@pytest.mark.parametrize(
    ("name", "chunks", "stage", "held"),
    [("interleaved", 2, 1, False), ("zbv", 2, 3, True), ("1f1b", 1, 2, True), ("1f1b", 1, 3, False)],
)
def test_all_stages_of_a_rank_in_one_optimizer(name: str, chunks: int, stage: int, held: bool) -> None:
    right = train_plainly(
        build(),
        [[(ids_of(step),)] for step in range(STEPS)],
        lambda model, ids: loss_fn(model(ids).logits, ids.roll(1, 1)),
        adamw,
        max_norm=0.5,
    )
    found = run(4, with_stages, name, chunks, stage, held)
    assert_parity({key: right[key] for key in ("loss", "norm", "weights")}, found, axes={"pp": 2, "dp": 2})


def tied_and_saved(path: str) -> dict[str, Any]:
    """A step, a checkpoint, another step; from the checkpoint again, in new objects: the same."""
    mesh = core.Mesh(pp=2)

    def make() -> tuple[Any, Any, Any]:
        [module], specs = pipeline.split(Tied().double(), None, mesh.pp)
        optimizer = zero.shard(module, adamw, axis=mesh.dp, stage=1, specs=specs, reduce="sum")
        return module, optimizer, pipeline.Runner([module], schedules.gpipe(2, 1, 2), mesh.pp, tied_loss)

    def train(optimizer: Any, runner: Any, step: int) -> Any:
        with optimizer.no_sync():
            loss = runner.step(tied_ids(step), tied_ids(step).roll(1, 1))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    module, optimizer, runner = make()
    train(optimizer, runner, 0)
    zero.save(path, module, optimizer)
    right = [train(optimizer, runner, step).item() for step in (1, 2)]
    module, optimizer, runner = make()
    zero.load(path, module, optimizer)
    return {"right": right, "found": [train(optimizer, runner, step).item() for step in (1, 2)]}


def test_a_tied_embedding_is_saved_for_every_stage_and_for_one_process(tmp_path: Any) -> None:
    pytest.importorskip("safetensors")
    for result in run(2, tied_and_saved, str(tmp_path / "c")):
        assert result["found"] == result["right"]
    model = Tied().double()
    before = model.embed.weight.detach().clone()
    optimizer = zero.shard(model, adamw, axis=core.Mesh().dp, stage=0)
    zero.load(tmp_path / "c", model, optimizer)
    assert not torch.equal(model.embed.weight, before)
    zero.save(tmp_path / "d", model, optimizer)  # of one process, which knows both names
    run(2, load_tied, str(tmp_path / "d"))


def load_tied(path: str) -> None:
    mesh = core.Mesh(pp=2)
    [module], specs = pipeline.split(Tied().double(), None, mesh.pp)
    zero.load(path, module, zero.shard(module, adamw, axis=mesh.dp, stage=1, specs=specs, reduce="sum"))


def misfitting(path: str) -> str:
    """One stage has another width than the checkpoint: all ranks hear of it, before anything has changed."""
    mesh = core.Mesh(pp=2)
    model = Tied().double()
    if mesh.pp.rank:
        model.layers[2] = torch.nn.Linear(3, 3, bias=False).double()
        model.layers[2].extra = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    [module], specs = pipeline.split(model, None, mesh.pp)
    optimizer = zero.shard(module, adamw, axis=mesh.dp, stage=1, specs=specs, reduce="sum")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=r"has no model\.layers\.2\.extra|holds layers\.2\.bias") as caught:
        zero.load(path, module, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))
    return str(caught.value)


def test_a_checkpoint_that_does_not_fit_one_stage_is_refused_by_all(tmp_path: Any) -> None:
    pytest.importorskip("safetensors")
    run(2, tied_and_saved, str(tmp_path / "c"))
    assert len(set(run(2, misfitting, str(tmp_path / "c"), timeout_s=60))) == 1
