"""Every schedule trains as one process does: loss, every gradient, weights after several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_pipeline as pipeline
from nanopar_core.testing import assert_parity, run, train_plainly
from nanopar_pipeline import schedules
from nanopar_pipeline.weights_later import WeightsLater

pytestmark = pytest.mark.long

STEPS, ROWS, LENGTH, VOCABULARY = 3, 9, 5, 23


class Layer(nn.Module):
    """Gives two tensors, of which one is of whole numbers; its weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 11), nn.Linear(11, 6, bias=False)
        self.recompute = False

    def forward(self, hidden: Tensor, counts: Tensor, mask: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
        if self.recompute:
            return checkpoint(self.compute, hidden, counts, mask, factor, use_reentrant=False)  # type: ignore[no-any-return]
        return self.compute(hidden, counts, mask, factor)

    def compute(self, hidden: Tensor, counts: Tensor, mask: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
        y = self.up(self.norm(hidden)).tanh() + self.up(hidden * 0.5)
        if mask is not None:
            y = y * mask[:, :, None]
        hidden = hidden + factor * self.down(y)
        return hidden.transpose(0, 1).contiguous().transpose(0, 1), counts + 1


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 6)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), torch.zeros_like(ids)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor, counts: Tensor) -> Tensor:
        return self.out(self.norm(hidden)) + 0.01 * counts[:, :, None]  # type: ignore[no-any-return]


class Model(nn.Module):
    pp_plan = {  # noqa: RUF012
        "embed": (["ids"], ["hidden", "counts"]),
        "layers": (["hidden", "counts", "mask", "factor"], ["hidden", "counts"]),
        "head": (["hidden", "counts"], ["logits"]),
    }

    def __init__(self, layers: int = 6, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed = Embed()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = Head()
        self.layers[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
        if tied:
            self.head.out.weight = self.embed.table.weight
        for layer in self.layers:
            layer.recompute = recompute  # type: ignore[assignment]

    def forward(self, ids: Tensor, mask: Tensor | None, factor: float) -> Tensor:
        hidden, counts = self.embed(ids)
        for layer in self.layers:
            hidden, counts = layer(hidden, counts, mask, factor)
        return self.head(hidden, counts)  # type: ignore[no-any-return]


def build(tied: bool = False, recompute: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(tied=tied, recompute=recompute).double()


def batch(step: int) -> tuple[dict[str, Any], Tensor]:
    """In the second step sequences are longer, in the third there are fewer rows."""
    rows, length = (ROWS, ROWS, 8)[step % 3], (LENGTH, LENGTH + 2, LENGTH)[step % 3]
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (rows, length), generator=random)
    mask = (torch.rand(rows, length, generator=random) < 0.8).double()
    return {"ids": ids, "mask": mask, "factor": 0.7}, ids.roll(1, 1)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 50


def plain_loss(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    return loss_fn(model(**inputs), labels)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def gathered(values: dict[str, Tensor], axis: core.Axis) -> dict[str, Tensor]:
    """What all ranks have, by name."""
    lists: list[Any] = [None] * axis.size
    torch.distributed.all_gather_object(lists, values, group=axis.group)
    return {name: value for of_rank in lists for name, value in of_rank.items()}


Make = Callable[[int, int, int], pipeline.Schedule]


def on_this_rank(
    make: Make, ranks: int, chunks: int, microbatches: int, tied: bool = False, recompute: bool = False
) -> dict[str, Any]:
    axis = core.Mesh(pp=ranks).pp
    schedule = make(ranks, chunks, microbatches)
    model = build(tied, recompute)
    stages, specs = pipeline.split(model, None, axis, chunks=chunks, placement=schedule.placement)
    called: list[str] = []
    runner = pipeline.Runner(
        stages,
        schedule,
        axis,
        loss_fn,
        on_first_forward=lambda stage: called.append(f"first {stage}"),
        on_last_backward=lambda stage: called.append(f"last {stage}"),
    )
    parameters = dict(nn.ModuleList(stages).named_parameters())  # tied ones of one rank once
    parameters = {name.partition(".")[2]: parameter for name, parameter in parameters.items()}
    optimizer = adamw([p for p in parameters.values() if p.requires_grad])
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(runner.step(*batch(step)).item())
        for name, parameter in parameters.items():
            for over in specs[name].grad_sum if name in specs else ():
                core.all_reduce(parameter.grad, over, out=parameter.grad)
        gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        first = [g for n, g in gradients.items() if all(axis.rank == 0 for axis in specs[n].grad_sum)]
        squares = torch.stack([torch.zeros((), dtype=torch.float64), *(g.square().sum() for g in first)]).sum()
        norm = core.all_reduce(squares, axis).sqrt()
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        norms.append(norm.item())
    own = schedule.stages_of(axis.rank)
    assert sorted(called) == sorted([f"{kind} {stage}" for kind in ("first", "last") for stage in own] * STEPS)
    outputs = runner.forward(batch(STEPS)[0])
    assert (outputs is None) == (schedule.stages - 1 not in own)
    found = gathered({} if outputs is None else {"logits": outputs}, axis)
    evaluated = runner.evaluate(*batch(STEPS)).item()
    weights = gathered({name: p.detach() for name, p in parameters.items()}, axis)
    return {
        "loss": [*losses, evaluated],
        "norm": norms,
        "gradients": gathered(gradients, axis),
        "weights": {name: value for name, value in weights.items() if not (tied and name == "head.out.weight")},
        "outputs": found,
    }


def reference(tied: bool = False) -> dict[str, Any]:
    model = build(tied)
    found = train_plainly(model, [[batch(step)] for step in range(STEPS)], plain_loss, adamw, max_norm=1.0)
    inputs, labels = batch(STEPS)
    logits = model(**inputs).detach()
    return {**found, "loss": [*found["loss"], loss_fn(logits, labels).item()], "outputs": {"logits": logits}}


CASES = [
    *[(make, ranks, chunks, microbatches)
      for make, chunks in ((schedules.gpipe, 1), (schedules.gpipe, 2), (schedules.one_f_one_b, 1),
                           (schedules.interleaved, 2), (schedules.zb_h1, 1), (schedules.zbv, 2),
                           (schedules.dualpipe_v, 2))
      for ranks, microbatches in ((2, 1), (2, 5), (4, 8))],
    *[(make, 4, chunks, 3) for make, chunks in ((schedules.interleaved, 2), (schedules.zb_h1, 1), (schedules.zbv, 2))],
    (schedules.one_f_one_b, 1, 1, 3),
    (schedules.zbv, 1, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize(("make", "ranks", "chunks", "microbatches"), CASES)
def test_trains_as_in_one_process(make: Make, ranks: int, chunks: int, microbatches: int) -> None:
    found = run(ranks, on_this_rank, make, ranks, chunks, microbatches)
    right = reference()
    right["gradients"] = {name: g for name, g in right["gradients"].items() if name in found[0]["gradients"]}
    assert_parity(right, found, axes={"pp": ranks})


@pytest.mark.parametrize(("make", "chunks"), [(schedules.one_f_one_b, 1), (schedules.zb_h1, 1), (schedules.zbv, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_recomputed(make: Make, chunks: int, tied: bool) -> None:
    found = run(2, on_this_rank, make, 2, chunks, 4, tied, True)
    right = reference(tied)
    for result in found:
        result["gradients"].pop("head.out.weight" if tied else "", None)
    right["gradients"] = {name: g for name, g in right["gradients"].items() if name in found[0]["gradients"]}
    assert_parity(right, found, axes={"pp": 2})


# ----------------------------------------------------------------------------------------------------------- details


def sent(make: Make, chunks: int, microbatches: int, again: bool) -> list[tuple[str, int]]:
    axis = core.Mesh(pp=2).pp
    schedule = make(2, chunks, microbatches)
    stages, _ = pipeline.split(build(), None, axis, chunks=chunks, placement=schedule.placement)
    runner = pipeline.Runner(stages, schedule, axis, loss_fn)
    if again:
        runner.step(*batch(0))
    with core.ledger() as book:
        runner.step(*batch(0))
    return [(record.label, record.bytes) for record in book.records if record.bytes]


@pytest.mark.parametrize(
    ("make", "chunks"), [(schedules.one_f_one_b, 1), (schedules.interleaved, 2), (schedules.zb_h1, 1)]
)
def test_one_activation_and_one_gradient_for_each_micro_batch_and_boundary(make: Make, chunks: int) -> None:
    hidden, counts = LENGTH * 6 * 8, LENGTH * 8
    rows = 3
    for rank, messages in enumerate(run(2, sent, make, chunks, 3, True)):
        activations = [size for label, size in messages if label == "activations"]
        gradients = [size for label, size in messages if label == "gradients"]
        crossings = {1: (1, 0), 2: (2, 1)}[chunks][rank]  # from this rank to the other, forward
        back = {1: (0, 1), 2: (1, 2)}[chunks][rank]
        assert activations == [rows * (hidden + counts)] * 3 * crossings
        assert gradients == [rows * hidden] * 3 * back
    first, again = (run(2, sent, make, chunks, 3, again)[0] for again in (False, True))
    assert len(first) == len(again) + chunks  # a header for every boundary, once


def failing(rank_that_fails: int) -> None:
    axis = core.Mesh(pp=2).pp
    stages, _ = pipeline.split(build(), None, axis)
    runner = pipeline.Runner(stages, schedules.one_f_one_b(2, 1, 4), axis, loss_fn)
    if axis.rank == rank_that_fails:
        stages[0].register_forward_pre_hook(_fail)
    runner.step(*batch(0))


def _fail(*_: Any) -> None:
    raise FloatingPointError("this stage fails")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_stage_ends_all_with_its_error(rank: int) -> None:
    with pytest.raises(FloatingPointError, match="this stage fails"):
        run(2, failing, rank, timeout_s=60)


def test_weights_later_run_hooks_once_and_put_products_aside() -> None:
    torch.manual_seed(0)
    layer, later = nn.Linear(4, 3).double(), WeightsLater()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    seen: list[str] = []
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append("weight"))
    layer.bias.register_post_accumulate_grad_hook(lambda _: seen.append("bias"))
    with later.recording(0, 0):
        y = layer(x).sin().sum()
    y.backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    assert seen == ["bias"]
    later.run(0, 0)
    later.run(0, 0)  # nothing is left
    assert seen == ["bias", "weight"]
    found = {"x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    x.grad = layer.weight.grad = layer.bias.grad = None
    layer(x).sin().sum().backward()
    right = {"x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    assert_parity({"gradients": right}, {"gradients": found})


def misused(how: str) -> None:
    axis = core.Mesh(pp=2).pp
    stages, _ = pipeline.split(build(), None, axis)
    if how == "chunks":
        pipeline.Runner(stages, schedules.interleaved(2, 2, 2), axis, loss_fn)
    if how == "ranks":
        pipeline.Runner(stages, schedules.gpipe(3, 1, 2), axis, loss_fn)
    runner = pipeline.Runner(stages, schedules.gpipe(2, 1, 10), axis, loss_fn)
    runner.step(*batch(0))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("chunks", r"has the stages \[\d, \d\], but 1 modules were given"),
        ("ranks", "the schedule is for 3 ranks, axis pp has 2"),
        ("rows", "a batch of 9 rows cannot be cut into 10 micro-batches"),
    ],
)
def test_misuse(how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(2, misused, how)


def several_calls(name: str) -> dict[str, Any]:
    """Three runs of a schedule before one update, each with another length."""
    axis = core.Mesh(pp=2).pp
    [stage], _ = pipeline.split(build(), None, axis)
    one = pipeline.Runner([stage], schedules.NAMED[name](2, 1, 4), axis, loss_fn)
    loss = sum(one.step(*batch(call)).item() for call in range(3))
    gradients = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    return {"loss": [loss], "gradients": gathered(gradients, axis)}


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_gradients_add_up_over_several_runs(name: str) -> None:
    model = build()
    losses = [plain_loss(model, *batch(call)) for call in range(3)]
    torch.stack(losses).sum().backward()
    right = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    reference = {"loss": [torch.stack(losses).sum().item()], "gradients": right}
    assert_parity(reference, run(2, several_calls, name), axes={"pp": 2})
