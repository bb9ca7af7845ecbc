"""bf16 parameters with fp32 masters: equal to the same loop written by hand in plain PyTorch, in all stages."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.zero.cases import mlp
from tests.zero.whole import masters_of, reduced_of
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run

pytestmark = pytest.mark.long

BF16 = zero.PrecisionPolicy(param_dtype=torch.bfloat16)
BF16_THROUGHOUT = zero.PrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP16 = zero.PrecisionPolicy(torch.float16, loss_scale=zero.LossScale(initial=1024.0))  # the gradients here are large
STEPS, MICROS = 4, 3
STAGES = range(4)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def shard(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], stage: int = 0, **more: Any
) -> zero.ZeroOptimizer:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return zero.shard(model, make, axis=core.Mesh(dp=size).dp, stage=stage, bucket_bytes=500, **more)


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return mlp().to(dtype)


def local_loss(model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    x = torch.randn(4, 7, generator=generator).bfloat16()
    return model(x).float().square().mean() / MICROS


def masters_by_hand(dtype: torch.dtype, reduce_dtype: torch.dtype, ranks: int, stage: int) -> dict[str, Any]:
    """Weights in bf16, masters in fp32; gradients are added up and sent in ``reduce_dtype``.

    In stages 0 and 1 each rank adds up its passes, and their sum is sent; in stages 2 and 3 each pass is sent.
    """
    model = model_of(dtype)
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
    model.bfloat16()
    optimizer = adamw(masters.values())
    for step in range(STEPS):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        passes = [
            [
                torch.autograd.grad(local_loss(model, rank, step, micro), list(model.parameters()))
                for rank in range(ranks)
            ]
            for micro in range(MICROS)
        ]
        for index, master in enumerate(masters.values()):
            one = torch.zeros_like(master, dtype=reduce_dtype)
            of_pass = [[gradients[index].to(reduce_dtype) for gradients in each] for each in passes]
            if stage < 2:
                of_pass = [[sum(of_rank, one) for of_rank in zip(*of_pass, strict=True)]]
            reduced = [(sum(part.float() for part in parts).to(reduce_dtype) / ranks) for parts in of_pass]
            master.grad = sum(reduced, one).float()
        optimizer.step()
    return {
        "gradients": {name: master.grad for name, master in masters.items() if master.grad is not None},
        "weights": {name: master.detach() for name, master in masters.items()},
    }


def on_this_rank(dtype: torch.dtype, policy: zero.PrecisionPolicy, stage: int) -> dict[str, dict[str, Tensor]]:
    model = model_of(dtype)
    optimizer = shard(model, adamw, stage, policy=policy, units=["0", "2", "4"])
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICROS):
            with optimizer.no_sync() if micro < MICROS - 1 else nullcontext():
                local_loss(model, torch.distributed.get_rank(), step, micro).backward()
        optimizer.step()
    found = {"gradients": reduced_of(model, optimizer), "masters": masters_of(model, optimizer)}
    optimizer.close()
    return {**found, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


Variant = tuple[torch.dtype, zero.PrecisionPolicy, int]


def all_on_this_rank(variants: Sequence[Variant]) -> list[dict[str, dict[str, Tensor]]]:
    return [on_this_rank(*variant) for variant in variants]


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_master_weights_by_hand(ranks: int) -> None:
    dtypes, policies = (torch.float32, torch.bfloat16), (BF16, BF16_THROUGHOUT)
    variants = [(dtype, policy, stage) for dtype in dtypes for policy in policies for stage in STAGES]
    for (dtype, policy, stage), *results in zip(variants, *run(ranks, all_on_this_rank, variants), strict=True):
        reduce_dtype = policy.reduce_dtype or torch.float32
        masters = [result.pop("masters") for result in results]
        assert {value.dtype for value in masters[0].values()} == {torch.float32}
        of_masters = [{"gradients": results[0]["gradients"], "weights": weights} for weights in masters]
        assert_parity(masters_by_hand(dtype, reduce_dtype, ranks, stage), of_masters, rtol=1e-6)
        rounded = {name: master.bfloat16() for name, master in masters[0].items()}
        assert_parity({"gradients": results[0]["gradients"], "weights": rounded}, results, rtol=0.0)
        assert {gradient.dtype for gradient in results[0]["gradients"].values()} == {reduce_dtype}
        assert {weight.dtype for weight in results[0]["weights"].values()} == {torch.bfloat16}
        # The masters hold more than the weights do: they are not weights rounded and widened.
        assert any(not torch.equal(master, rounded[name].float()) for name, master in masters[0].items())


class One(nn.Module):
    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), value, dtype=dtype))

    def forward(self) -> Tensor:
        return self.w.sum()


def updates_below_half_a_step(policy: zero.PrecisionPolicy | None, stage: int) -> tuple[float, float]:
    """What a weight of 1.0 has become after 100 steps of 0.001: the weight, and what the optimizer keeps."""
    model = One(1.0, torch.bfloat16)
    optimizer = shard(model, lambda g: torch.optim.AdamW(g, lr=1e-3, weight_decay=0.0), stage, policy=policy)
    for _ in range(100):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    master = masters_of(model, optimizer)["w"].item()
    optimizer.close()
    return model.w.item(), master


def small_gradients(policy: zero.PrecisionPolicy, stage: int) -> float:
    """The sum of 64 micro-batches' gradients, of which one is 1.0 and the others 0.003."""
    model = One(1.0, torch.float32)
    optimizer = shard(model, sgd, stage, policy=policy)
    for number in range(64):
        with optimizer.no_sync():
            (model() * (1.0 if number == 0 else 0.003)).backward()
    optimizer.clip_grad_norm_(float("inf"))
    return reduced_of(model, optimizer)["w"].item()


def what_is_lost() -> list[Any]:
    return [
        [function(policy, stage) for stage in STAGES]
        for function, policy in [
            (updates_below_half_a_step, BF16),
            (updates_below_half_a_step, None),
            (small_gradients, BF16),
            (small_gradients, BF16_THROUGHOUT),
        ]
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_small_updates_and_small_gradients_are_not_lost(ranks: int) -> None:
    for with_masters, without, in_fp32, in_bf16 in run(ranks, what_is_lost):
        assert with_masters == [(0.8984375, pytest.approx(0.9, rel=1e-4))] * len(STAGES)
        assert without == [(1.0, 1.0)] * len(STAGES), "without masters each update is rounded away"
        assert in_fp32 == [pytest.approx(1.189, abs=5e-4)] * len(STAGES)
        assert in_bf16 == [1.0] * len(STAGES), "this is what reduce_dtype=bf16 costs"


def kept_from_backward(policy: zero.PrecisionPolicy) -> list[set[torch.dtype]]:
    return [kept_by_stage(policy, stage) for stage in STAGES]


def kept_by_stage(policy: zero.PrecisionPolicy, stage: int) -> set[torch.dtype]:
    """Dtypes of the gradients that wait for their bucket, seen when the first parameter of all has got its own."""
    model = mlp()
    optimizer = zero.shard(model, sgd, axis=core.Mesh(dp=2).dp, stage=stage, policy=policy)  # one bucket
    seen: set[torch.dtype] = set()

    def look(_parameter: Tensor) -> None:
        seen.update(p.grad.dtype for p in model.parameters() if p.grad is not None)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    with optimizer.no_sync():
        model(torch.ones(2, 7).bfloat16()).sum().backward()
    return seen


def test_gradients_are_widened_where_they_add_up_and_nowhere_else() -> None:
    expected = [{torch.float32}, {torch.float32}, {torch.bfloat16}, {torch.bfloat16}]
    assert run(2, kept_from_backward, BF16) == [expected] * 2


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, 16),
        (BF16, 18),
        (BF16_THROUGHOUT, 16),
        (zero.PrecisionPolicy(torch.float16), 18),
        (zero.PrecisionPolicy(torch.bfloat16, stochastic_rounding=True), 14),
    ],
)
def test_bytes_per_parameter(policy: zero.PrecisionPolicy | None, expected: int) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = shard(model, torch.optim.Adam, policy=policy)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.zeros(1, 64, dtype=model.weight.dtype)).float().mean()
        optimizer.scale(loss).backward()
        optimizer.step()
    [bucket] = optimizer.reducer.buckets
    [shard_] = optimizer.shards
    moments = [value for key, value in optimizer.state[shard_.flat].items() if key != "step"]
    held = [model.weight, bucket.parameters, bucket.masters, bucket.reduced, *moments]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert sum(storages.values()) == expected * model.weight.numel()


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
@pytest.mark.parametrize(("stage", "steps_before"), [(0, 0), (0, 2), (2, 2)])
def test_weights_written_into_the_model_are_trained_on(edit: Any, policy: Any, stage: int, steps_before: int) -> None:
    model = One(0.0, torch.float32)
    optimizer = shard(model, sgd, stage, policy=policy)
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


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_compute_in_param_dtype_and_buffers_stay(stage: int) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model.register_buffer("count", torch.ones(2))
    shard(model, sgd, stage, policy=BF16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.count.dtype == torch.float32


@pytest.mark.parametrize("stage", STAGES)
def test_after_close_the_model_trains_in_plain_torch(stage: int) -> None:
    model = model_of(torch.float32)
    shard(model, sgd, stage, policy=BF16).close()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7).bfloat16()).sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_another_dtype_do_not_stay_in_memory(stage: int) -> None:
    model = model_of(torch.float32)
    optimizer = shard(model, sgd, stage, policy=BF16_THROUGHOUT)
    model(torch.ones(2, 7).bfloat16()).sum().backward()
    optimizer.step()
    assert all(shard.flat.grad is None for shard in optimizer.shards)


@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16"])
def test_a_policy_needs_floating_point_dtypes(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"param_dtype must be a floating-point torch\.dtype, not"):
        zero.PrecisionPolicy(dtype)
    with pytest.raises(ValueError, match=r"reduce_dtype must be a floating-point torch\.dtype, not"):
        zero.PrecisionPolicy(torch.bfloat16, dtype)
