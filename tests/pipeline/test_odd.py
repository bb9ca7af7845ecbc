"""Unusual models, batches and schedules: right, or refused with a reason."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pipeline.test_split import axis
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_pipeline as pipeline
from nanopar_core.testing import assert_parity, run
from nanopar_pipeline import Action, Schedule, schedules

ROWS, WIDTH = 6, 4


class Part(nn.Module):
    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.how = how
        self.l, self.k = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint in a reentrant one":
            return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]
        if self.how == "gradient in forward":
            z = x.detach().requires_grad_()
            with torch.enable_grad():
                (g,) = torch.autograd.grad(self.l(z).square().sum(), z)
            return self.l(x).tanh() + self.k(g)  # type: ignore[no-any-return]
        if self.how == "one row":
            return torch.stack([self.l(row).tanh() for row in x]) + x
        return self.k(self.l(x).tanh()) + x  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(self.l, x, use_reentrant=False).sin()  # type: ignore[no-any-return]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=random) for _ in range(2))
    return x, y


HOW = ("", "checkpoint in a reentrant one", "gradient in forward", "one row")


def trained(name: str) -> dict[str, Any]:
    """Of two parts on two ranks; of both in one process without a name."""
    losses, gradients = [], {}
    for how in HOW:
        x, y = batch()
        if not name:
            model = nn.Sequential(Part(0, how), Part(1, how))
            loss = loss_fn(model(x.requires_grad_()), y)
            loss.backward()
            found = {f"{how} {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        else:
            mesh = core.Mesh(pp=2)
            schedule = schedules.NAMED[name](2, 1, 3)
            part = Part(mesh.pp.rank, how)
            loss = pipeline.Runner([part], schedule, mesh.pp, loss_fn).step(x.requires_grad_(), y)
            mine = {f"{how} {mesh.pp.rank}.{n}": p.grad for n, p in part.named_parameters() if p.grad is not None}
            lists: list[Any] = [None, None]
            torch.distributed.all_gather_object(lists, mine)
            found = lists[0] | lists[1]
        losses.append(loss.item())
        gradients |= found
    return {"loss": losses, "gradients": gradients}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_unusual_stages(name: str) -> None:
    assert_parity(trained(""), run(2, trained, name), axes={"pp": 2})


# ------------------------------------------------------------------------------------------------------- one process


class Named(nn.Module):
    pp_plan = {  # noqa: RUF012
        "embed": (["x"], ["hidden"]),
        "layers": (["hidden", "mask"], ["hidden"]),
    }

    def __init__(self, layers: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).double()
        self.layers = nn.ModuleList(layers or [Masked() for _ in range(2)])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.l(x) if mask is None else self.l(x) * mask  # type: ignore[no-any-return]


def runner(model: nn.Module | None = None, microbatches: int = 2, loss: Any = loss_fn) -> pipeline.Runner:
    stages, _ = pipeline.split(model or Named(), None, core.Mesh().pp)
    return pipeline.Runner(stages, schedules.gpipe(1, 1, microbatches), core.Mesh().pp, loss)


def misspelt() -> None:
    x, y = batch()
    runner().step({"x": x, "attention_mask": x}, y)


def too_many() -> None:
    x, y = batch()
    runner().step((x, x), y)


def no_gradient() -> None:
    x, y = batch()
    runner(loss=lambda output, target: loss_fn(output, target).detach()).step(x, y)


def not_a_scalar() -> None:
    x, y = batch()
    runner(loss=lambda output, target: loss_fn(output, target)[None]).step(x, y)


def after_an_error() -> None:
    one, (x, y) = runner(loss=lambda *_: 1 / 0), batch()
    with pytest.raises(ZeroDivisionError):
        one.step(x, y)
    one.step(x, y)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            misspelt,
            ValueError,
            "the batch has 'attention_mask', which no module of the plan takes; they take hidden, mask, x",
        ),
        (too_many, ValueError, r"2 inputs were given, but embed takes \['x'\]: give a dictionary"),
        (no_gradient, RuntimeError, "loss_fn gave a loss without gradient"),
        (not_a_scalar, ValueError, r"loss_fn must return a scalar, not a tensor of shape \[1\]"),
        (after_an_error, RuntimeError, "an earlier step of this runner has failed"),
    ],
)
def test_misuse(function: Callable[[], None], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function()


def test_a_step_needs_no_gradient_mode() -> None:
    model, (x, y) = Named(), batch()
    with torch.no_grad():
        runner(model).step(x, y)
    assert model.embed.weight.grad is not None


def test_outputs_come_in_the_order_of_the_batch() -> None:
    model, (x, _) = Named(), batch()
    stages, _ = pipeline.split(model, None, core.Mesh().pp)
    actions = [Action(0, kind, number) for number in (1, 0) for kind in "FB"]
    backwards = pipeline.Runner(stages, Schedule([actions], 1, 2), core.Mesh().pp, loss_fn)
    torch.testing.assert_close(backwards.forward(x), runner(model).forward(x))


def test_modes_stay_and_shared_layers_run_every_time() -> None:
    shared = Masked()
    model = Named([shared, shared, shared])
    model.train()
    model.embed.eval()
    stages, _ = pipeline.split(model, None, core.Mesh().pp)
    assert not model.embed.training
    assert shared.training
    x, _ = batch()
    one = pipeline.Runner(stages, schedules.gpipe(1, 1, 2), core.Mesh().pp, loss_fn)
    torch.testing.assert_close(one.forward(x), shared(shared(shared(model.embed(x), None), None), None))


def test_tied_parameters_outside_of_the_plan() -> None:
    model = Named()
    model.other = nn.Linear(WIDTH, WIDTH)
    model.other.weight, model.other.bias = model.embed.weight, model.embed.bias  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"other.weight belongs to no module of the plan"):
        pipeline.split(model, None, axis(2))


def test_nothing_of_a_step_is_kept() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.seen = nn.Linear(WIDTH, WIDTH).double(), []

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.l(x)
            self.seen.append(weakref.ref(y))
            return y

    module = Watched()
    one = pipeline.Runner([module], schedules.zb_h1(1, 1, 3), core.Mesh().pp, loss_fn)
    gc.disable()
    try:
        for _ in range(2):
            one.step(*batch())
            one.evaluate(*batch())
            one.forward(batch()[0])
            one.step({"x": batch()[0], "extra": None}["x"], batch()[1])
        assert [ref() for ref in module.seen if ref() is not None] == []
    finally:
        gc.enable()
    assert len(one._known) == 0


def test_messages_are_used_in_the_order_in_which_they_are_sent() -> None:
    actions = [
        [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)],
        [Action(1, "F", 1), Action(1, "F", 0), Action(1, "B", 0), Action(1, "B", 1)],
    ]
    with pytest.raises(ValueError, match="rank 0 sends activations of stage 0 for micro-batch 0 next, but rank 1 uses"):
        Schedule(actions, 1, 2)


def test_times_below_zero() -> None:
    with pytest.raises(ValueError, match="times must be at least 0, not -1"):
        schedules.gpipe(2, 1, 2).simulate(forward=-1)
