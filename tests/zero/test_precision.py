"""bf16 parameters with fp32 masters: equal to the same loop written by hand in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.cases import mlp
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run

BF16 = zero.PrecisionPolicy(param_dtype=torch.bfloat16)
BF16_THROUGHOUT = zero.PrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP16 = zero.PrecisionPolicy(torch.float16, loss_scale=zero.LossScale(initial=1024.0))  # the gradients here are large
STEPS, MICROS, RANKS = 4, 3, 2


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def shard(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], **more: Any) -> zero.ZeroOptimizer:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return zero.shard(model, make, axis=core.Mesh(dp=size).dp, stage=0, bucket_bytes=500, **more)


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return mlp().to(dtype)


def local_loss(model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    x = torch.randn(4, 7, generator=generator).bfloat16()
    return model(x).float().square().mean() / MICROS


def masters_by_hand(dtype: torch.dtype, reduce_dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Weights in bf16, masters in fp32, gradients of each rank added up and sent in ``reduce_dtype``."""
    model = model_of(dtype)
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
    model.bfloat16()
    optimizer = adamw(masters.values())
    for step in range(STEPS):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
        for rank in range(RANKS):
            mine = {name: torch.zeros_like(p, dtype=reduce_dtype) for name, p in model.named_parameters()}
            for micro in range(MICROS):
                gradients = torch.autograd.grad(local_loss(model, rank, step, micro), list(model.parameters()))
                for name, gradient in zip(mine, gradients, strict=True):
                    mine[name] += gradient.to(reduce_dtype)
            for name in total:
                total[name] += mine[name].float()
        for name, master in masters.items():
            master.grad = (total[name].to(reduce_dtype) / RANKS).float()
        optimizer.step()
    return {
        "gradients": {name: master.grad for name, master in masters.items() if master.grad is not None},
        "weights": {name: master.detach() for name, master in masters.items()},
    }


def on_this_rank(dtype: torch.dtype, policy: zero.PrecisionPolicy) -> dict[str, dict[str, Tensor]]:
    model = model_of(dtype)
    optimizer = shard(model, adamw, policy=policy)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICROS):
            if micro < MICROS - 1:
                with optimizer.no_sync():
                    local_loss(model, torch.distributed.get_rank(), step, micro).backward()
            else:
                local_loss(model, torch.distributed.get_rank(), step, micro).backward()
        optimizer.step()
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "masters": zero.full_state_dict(model, optimizer),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", [BF16, BF16_THROUGHOUT])
def test_equals_master_weights_by_hand(dtype: torch.dtype, policy: zero.PrecisionPolicy) -> None:
    reduce_dtype = policy.reduce_dtype or torch.float32
    expected = masters_by_hand(dtype, reduce_dtype)
    results = run(RANKS, on_this_rank, dtype, policy)
    masters, nothing = (result.pop("masters") for result in results)
    assert not nothing
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert_parity(expected, {"gradients": results[0]["gradients"], "weights": masters}, rtol=1e-6)
    rounded = {name: master.bfloat16() for name, master in masters.items()}
    assert_parity({"gradients": results[0]["gradients"], "weights": rounded}, results, rtol=0.0)
    assert {gradient.dtype for gradient in results[0]["gradients"].values()} == {reduce_dtype}
    assert {weight.dtype for weight in results[0]["weights"].values()} == {torch.bfloat16}
    # The masters hold more than the weights do: they are not weights rounded and widened.
    assert any(not torch.equal(master, rounded[name].float()) for name, master in masters.items())


class One(nn.Module):
    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), value, dtype=dtype))


def updates_below_half_a_step(policy: zero.PrecisionPolicy | None) -> tuple[float, float]:
    model = One(1.0, torch.bfloat16)
    optimizer = shard(model, lambda g: torch.optim.AdamW(g, lr=1e-3, weight_decay=0.0), policy=policy)
    for _ in range(100):
        optimizer.zero_grad()
        model.w.sum().backward()
        optimizer.step()
    return model.w.item(), zero.full_state_dict(model, optimizer)["w"].item()


def test_small_updates_are_not_lost() -> None:
    weight, master = updates_below_half_a_step(BF16)
    assert weight == 0.8984375
    assert master == pytest.approx(0.9, rel=1e-4)
    assert updates_below_half_a_step(None) == (1.0, 1.0), "without masters each update is rounded away"


def small_gradients(policy: zero.PrecisionPolicy) -> float:
    model = One(1.0, torch.float32)
    optimizer = shard(model, sgd, policy=policy)
    for number in range(64):
        with optimizer.no_sync():
            (model.w * (1.0 if number == 0 else 0.003)).sum().backward()
    optimizer.clip_grad_norm_(float("inf"))
    assert model.w.grad is not None
    return model.w.grad.item()


def test_small_gradients_are_not_lost() -> None:
    assert small_gradients(BF16) == pytest.approx(1.189, abs=5e-4)
    assert small_gradients(BF16_THROUGHOUT) == 1.0, "this is what reduce_dtype=bf16 costs"


def by_load_state_dict(model: One, optimizer: zero.ZeroOptimizer) -> None:
    model.load_state_dict({"w": torch.tensor([2.0])})


def by_an_edit_in_place(model: One, optimizer: zero.ZeroOptimizer) -> None:
    with torch.no_grad():
        model.w.fill_(2.0)


def by_another_tensor(model: One, optimizer: zero.ZeroOptimizer) -> None:
    model.w.data = torch.full_like(model.w, 2.0)


def by_reload_from_model(model: One, optimizer: zero.ZeroOptimizer) -> None:
    model.w.data.fill_(2.0)  # torch does not count such writes
    optimizer.reload_from_model()


EDITS = [by_load_state_dict, by_an_edit_in_place, by_another_tensor, by_reload_from_model]


@pytest.mark.parametrize("policy", [None, BF16, FP16])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_weights_written_into_the_model_are_trained_on(edit: Any, policy: Any, steps_before: int) -> None:
    model = One(0.0, torch.float32)
    optimizer = shard(model, sgd, policy=policy)
    for _ in range(steps_before):
        optimizer.scale(model.w.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    edit(model, optimizer)
    optimizer.scale(model.w.sum()).backward()
    optimizer.step()
    assert zero.full_state_dict(model, optimizer)["w"].item() == pytest.approx(1.9, rel=1e-6)
    assert model.w.item() == pytest.approx(1.9, rel=1e-6 if policy is None else 1e-2)


def test_weights_of_another_dtype_are_refused() -> None:
    model = One(0.0, torch.float32)
    optimizer = shard(model, sgd)
    model.bfloat16()
    model.w.sum().backward()
    with pytest.raises(RuntimeError, match=r"w became torch.bfloat16 \[1\] on cpu after it was given to shard as"):
        optimizer.step()


def test_frozen_parameters_compute_in_param_dtype_and_buffers_stay() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model.register_buffer("count", torch.ones(2))
    shard(model, sgd, policy=BF16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.count.dtype == torch.float32


def test_after_close_the_model_trains_in_plain_torch() -> None:
    model = model_of(torch.float32)
    shard(model, sgd, policy=BF16).close()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7).bfloat16()).sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    optimizer.step()


def test_gradients_of_another_dtype_do_not_stay_in_memory() -> None:
    model = model_of(torch.float32)
    optimizer = shard(model, sgd, policy=BF16_THROUGHOUT)
    model(torch.ones(2, 7).bfloat16()).sum().backward()
    optimizer.step()
    assert all(shard.flat.grad is None for shard in optimizer.shards)


@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16"])
def test_a_policy_needs_floating_point_dtypes(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"param_dtype must be a floating-point torch\.dtype, not"):
        zero.PrecisionPolicy(dtype)
    with pytest.raises(ValueError, match=r"reduce_dtype must be a floating-point torch\.dtype, not"):
        zero.PrecisionPolicy(torch.bfloat16, dtype)
