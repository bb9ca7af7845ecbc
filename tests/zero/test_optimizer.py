"""The returned object is a torch optimizer: schedulers, hooks, closures and states work as users of torch expect."""

import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.cases import gradients_of, mlp, weights_of
from torch import nn
from torch.optim import lr_scheduler

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run

X = torch.randn(8, 7, generator=torch.Generator().manual_seed(0)).double()


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return mlp().double()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def shard(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] = adamw, **more: Any) -> zero.ZeroOptimizer:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return zero.shard(model, make, **{"axis": core.Mesh(dp=size).dp, "stage": 0, "bucket_bytes": 500, **more})


def sgd_of(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=lr)


def weights(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, zero.ZeroOptimizer):
        return weights_of(model, optimizer)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).square().mean().backward()
    optimizer.step()


in_all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])

SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8),
    "warm-up, then cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)],
        milestones=[2],
    ),
}


@in_all_stages
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedules_act_as_on_torchs_own(name: str, stage: int) -> None:
    plain, model = model_of(), model_of()
    sharded = shard(model, stage=stage)
    pairs = [(plain, adamw(plain.parameters())), (model, sharded)]
    rates: list[list[Any]] = []
    for trained, optimizer in pairs:
        schedule = SCHEDULERS[name](optimizer)
        rates.append([])
        for _ in range(5):
            one_step(trained, optimizer)
            schedule.step()
            rates[-1].append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
    assert rates[0] == rates[1]
    assert len(set(rates[0])) >= 4
    assert_parity({"weights": weights(plain)}, {"weights": weights(model, sharded)}, rtol=1e-10)


def test_it_is_a_torch_optimizer_that_shares_groups_and_state() -> None:
    made: list[torch.optim.Optimizer] = []

    def make(groups: Any) -> torch.optim.Optimizer:
        made.append(adamw(groups))
        return made[0]

    model = model_of()
    optimizer = shard(model, make)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is made[0].param_groups
    one_step(model, optimizer)
    assert optimizer.state is made[0].state
    assert len(optimizer.state) == len(optimizer.reducer.buckets)
    assert "AdamW" not in repr(optimizer)
    assert "weight_decay: 0.1" in repr(optimizer)


def test_step_hooks_are_called_once_per_step() -> None:
    model, calls = model_of(), []
    optimizer = shard(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    one_step(model, optimizer)
    one_step(model, optimizer)
    assert calls == ["before", "after"] * 2


@in_all_stages
def test_a_closure_recomputes_the_loss_once_with_gradients_on(stage: int) -> None:
    plain, model = model_of(), model_of()
    calls = []

    def closure_for(trained: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = trained(X).square().mean()
            loss.backward()
            calls.append(torch.is_grad_enabled())
            return loss

        return closure

    results = []
    for trained, optimizer in ((plain, adamw(plain.parameters())), (model, shard(model, stage=stage))):
        with torch.no_grad():
            losses = [optimizer.step(closure_for(trained, optimizer)).item() for _ in range(3)]
        results.append({"loss": losses, "weights": weights(trained, optimizer)})
    assert calls == [True] * 6
    assert_parity(results[0], results[1], rtol=1e-12)


def test_state_dict_continues_bit_for_bit_in_the_same_layout() -> None:
    model = model_of()
    optimizer = shard(model)
    for _ in range(3):
        one_step(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    optimizer.param_groups[0]["lr"] = 0.02
    one_step(model, optimizer)
    file.seek(0)
    stored = torch.load(file)
    again = model_of(seed=1)
    resumed = shard(again)
    schedule = lr_scheduler.ConstantLR(resumed, factor=1.0)
    again.load_state_dict(stored["model"])
    resumed.load_state_dict(stored["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.01
    assert schedule.optimizer.param_groups is resumed.inner.param_groups
    resumed.param_groups[0]["lr"] = 0.02
    one_step(again, resumed)
    assert_parity({"weights": weights(model)}, {"weights": weights(again)}, rtol=0.0)


def train_as_a_script_would(stage: int | None) -> dict[str, Any]:
    """Two ranks see the same rows, so that one process does the same; each step does something of its own."""
    model = model_of()
    groups = [
        {"params": ["4.bias"], "lr": 0.1, "weight_decay": 0.0},  # of three elements: nothing on most ranks
        {"params": []},
        {"params": ["0.*", "2.*"], "lr": 0.02},
        {"params": "4.weight", "lr": 0.0},
    ]
    if stage is None:
        named = dict(model.named_parameters())
        chosen = [["4.bias"], [], ["0.weight", "0.bias", "2.weight", "2.bias"], ["4.weight"]]
        of_torch = [{**group, "params": [named[n] for n in names]} for group, names in zip(groups, chosen, strict=True)]
        optimizer: torch.optim.Optimizer = adamw(of_torch)
    else:
        optimizer = shard(model, stage=stage, groups=groups)
    schedule = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    losses = []

    def backward() -> torch.Tensor:
        loss: torch.Tensor = model(X).square().mean()
        losses.append(loss.item())
        loss.backward()
        return loss

    backward()
    optimizer.step()
    backward()  # zero_grad was forgotten: gradients add up
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if stage is None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # nanopar's rule for a parameter that was not used
    optimizer.step()  # no backward at all
    schedule.step()
    optimizer.param_groups[3]["lr"] = 0.05
    optimizer.zero_grad()
    optimizer.step(backward)
    loss = model(X).square().mean()
    optimizer.zero_grad()  # between forward and backward
    loss.backward()
    optimizer.step()
    return {"loss": losses, "weights": weights(model, optimizer)}


@in_all_stages
def test_groups_schedules_closures_and_forgotten_calls_on_ranks(stage: int) -> None:
    assert_parity(train_as_a_script_would(None), run(2, train_as_a_script_would, stage))
    if stage == 3:
        assert_parity(train_as_a_script_would(None), run(4, train_as_a_script_would, stage))


def test_no_new_parameters_after_the_start() -> None:
    optimizer = shard(model_of())
    with pytest.raises(RuntimeError, match="takes no new parameters: close"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1


# ----------------------------------------------------------------------------------- numbers known from other systems


class Scalar(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, factor: float = 1.0, target: float = 0.0) -> torch.Tensor:
        return self.w * factor - target


def short_last_window(stage: int) -> list[float]:
    """Six micro-batches in windows of four: the caller divides each loss by its window's real length."""
    model = Scalar()
    optimizer = shard(model, sgd_of(0.1), reduce="mean", stage=stage)
    values = []
    for length in (4, 2):
        for number in range(length):
            loss = model(target=1.0).square() / 2
            if number < length - 1:
                with optimizer.no_sync():
                    (loss / length).backward()
            else:
                (loss / length).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(weights(model, optimizer)["w"].item())
    return values


@in_all_stages
def test_a_short_last_window_counts_by_its_own_length(stage: int) -> None:
    for values in run(2, short_last_window, stage):
        assert values == pytest.approx([0.1, 0.19], rel=1e-12)


def four_micro_batches(no_sync: bool, stage: int) -> list[float]:
    """Gradients 1, 2, 3, 4 a quarter each: their mean is 2.5 in every step, the first as later ones."""
    model = Scalar()
    optimizer = shard(model, sgd_of(1.0), stage=stage)
    moved = []
    for _ in range(3):
        before = weights(model, optimizer)["w"].item()
        for gradient in (1.0, 2.0, 3.0, 4.0):
            if no_sync:
                with optimizer.no_sync():
                    (model(gradient) / 4).backward()
            else:
                (model(gradient) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(before - weights(model, optimizer)["w"].item())
    return moved


@in_all_stages
@pytest.mark.parametrize("no_sync", [True, False])
def test_no_micro_batch_is_lost(no_sync: bool, stage: int) -> None:
    assert run(2, four_micro_batches, no_sync, stage) == [[2.5] * 3] * 2


def clipped(max_norm: float, gradient: tuple[float, ...], stage: int) -> tuple[float, list[float], float]:
    """In stages 1 to 3 the 64 elements are cut in the middle: each of two ranks has one half of the norm."""
    model = nn.Linear(64, 1, bias=False).double()
    optimizer = shard(model, sgd_of(1.0), stage=stage)
    model(torch.tensor(gradient).double().repeat_interleave(16) / 4).sum().backward()
    norm = optimizer.clip_grad_norm_(max_norm)
    gradients = gradients_of(model, optimizer)["weight"][0, ::16] * 4
    return norm.item(), gradients.tolist(), optimizer.clip_grad_norm_(math.inf).item()


@in_all_stages
def test_the_norm_is_that_before_clipping(stage: int) -> None:
    for norm, gradients, norm_after in run(2, clipped, 1.0, (3.0, 0.0, 0.0, 4.0), stage):
        assert norm == 5.0
        assert gradients == pytest.approx([0.6, 0.0, 0.0, 0.8], rel=1e-6)
        assert norm_after == pytest.approx(1.0, rel=1e-6)
    assert run(2, clipped, 10.0, (3.0, 0.0, 0.0, 4.0), stage) == [(5.0, [3.0, 0.0, 0.0, 4.0], 5.0)] * 2
    assert run(1, clipped, 1.0, (0.0, 0.0, 0.0, 0.0), stage) == [(0.0, [0.0] * 4, 0.0)]


def torchs_clipping_finds_nothing(stage: int) -> tuple[float, bool]:
    model = model_of()
    optimizer = shard(model, stage=stage)
    model(X).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return norm.item(), all(p.grad is None for p in model.parameters()) and optimizer.clip_grad_norm_(1.0).item() > 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchs_own_clipping_does_nothing_where_gradients_are_divided(stage: int) -> None:
    assert run(2, torchs_clipping_finds_nothing, stage) == [(0.0, True)] * 2


def test_torchs_own_clipping_works_too() -> None:
    plain, model = model_of(), model_of()
    for trained, optimizer in ((plain, adamw(plain.parameters())), (model, shard(model))):
        trained(X).square().mean().backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 0.01)
        optimizer.step()
    assert_parity({"weights": weights(plain)}, {"weights": weights(model)}, rtol=1e-10)


def test_gradients_replaced_by_the_caller_count() -> None:
    plain, model = model_of(), model_of()
    for trained, optimizer in ((plain, sgd_of(0.1)(plain.parameters())), (model, shard(model, sgd_of(0.1)))):
        trained(X).square().mean().backward()
        trained[0].weight.grad = trained[0].weight.grad.sign()
        trained[2].weight.grad = None
        trained[4].weight.grad.mul_(3)
        optimizer.step()
    assert_parity({"weights": weights(plain)}, {"weights": weights(model)}, rtol=1e-10)


@in_all_stages
def test_a_norm_that_is_not_finite_changes_nothing_for_good(stage: int) -> None:
    plain, model = model_of(), model_of()
    optimizer = shard(model, stage=stage)
    for bad in (math.nan, math.inf):
        handle = model[0].weight.register_hook(lambda gradient, bad=bad: gradient.index_fill(0, torch.tensor(0), bad))
        model(X).sum().backward()
        handle.remove()
        before = gradients_of(model, optimizer)
        assert not optimizer.clip_grad_norm_(1.0).isfinite()
        for name, gradient in gradients_of(model, optimizer).items():
            torch.testing.assert_close(gradient, before[name], rtol=0.0, atol=0.0, equal_nan=True)
        optimizer.zero_grad()
    for trained in (plain, model):
        trained(X).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert_parity(
        {"norm": expected, "gradients": gradients(plain)},
        {"norm": optimizer.clip_grad_norm_(1.0), "gradients": gradients_of(model, optimizer)},
        rtol=1e-12,
    )


@in_all_stages
def test_a_backward_pass_through_weights_from_before_the_step_is_refused(stage: int) -> None:
    model = model_of()
    optimizer = shard(model, stage=stage)
    late = model(X).sum()
    one_step(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


@in_all_stages
def test_nothing_warns(stage: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = model_of()
        optimizer = shard(model, stage=stage)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        for _ in range(2):
            one_step(model, optimizer)
            schedule.step()
        copy.deepcopy(optimizer.state_dict())
