"""fp16 with dynamic loss scaling: equal to torch's own GradScaler in one process, and decided by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zero.cases import mlp
from tests.zero.whole import masters_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run
from nanopar_zero.loss_scale import LossScaler

pytestmark = pytest.mark.long

# ------------------------------------------------------------------------------------------------------- the rule


def scales(rule: zero.LossScale, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is a step that overflowed."""
    scaler = LossScaler(rule)
    scaler.scaled(torch.ones(()))
    found = []
    for step in overflows:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


def test_the_scale_as_torch_moves_it() -> None:
    overflows = "..x...x..xx.....xxxxxxxxxxxxxxxxxx......"
    ours = scales(zero.LossScale(initial=64.0, window=3, floor=2.0**-30), overflows)
    scale, tracker = torch.tensor(64.0), torch.tensor(0, dtype=torch.int32)
    expected = []
    for step in overflows:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(step == "x")), 2.0, 0.5, 3)
        expected.append(scale.item())
    assert ours == expected
    assert len(set(ours)) > 10


def test_hysteresis_spares_the_scale_until_it_has_grown() -> None:
    rule = zero.LossScale(initial=8.0, window=2, hysteresis=2)
    assert scales(rule, "x.x.x..x.xx") == [8, 8, 4, 4, 2, 2, 4, 4, 4, 2, 1]


def test_the_floor_holds_and_a_static_scale_stays() -> None:
    assert scales(zero.LossScale(initial=4.0, floor=2.0), "xxx") == [2, 2, 2]
    assert scales(zero.LossScale(initial=1024.0, factor=1.0, window=1), "x..x") == [1024] * 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"factor": 0.5}, "factor must be at least 1, not 0.5"),
        ({"window": 0}, "window must be at least 1, not 0"),
        ({"hysteresis": 0}, "hysteresis must be at least 1, not 0"),
        ({"initial": 0.5}, "initial must be finite and at least floor, floor above 0, not 0.5, 1.0"),
        ({"initial": math.inf}, "initial must be finite"),
        ({"floor": 0.0}, "floor above 0, not 65536.0, 0.0"),
        ({"factor": math.nan}, "factor must be at least 1, not nan"),
    ],
)
def test_a_rule_without_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero.LossScale(**values)


def test_gradients_in_fp16_have_no_room_for_unscaling() -> None:
    with pytest.raises(ValueError, match=r"reduce_dtype must not be torch\.float16 with a loss scale"):
        zero.PrecisionPolicy(torch.float16, torch.float16)
    assert zero.PrecisionPolicy(torch.float16).loss_scale == zero.LossScale()
    assert zero.PrecisionPolicy(torch.bfloat16).loss_scale is None


# ------------------------------------------------------------------------------------- one process, many processes

STAGES = range(4)
STEPS, MICROS, OVERFLOWING_STEP = 6, 4, 1
RULE = zero.LossScale(initial=2.0**16, window=3)


@dataclass(frozen=True)
class Bad:
    """Where the second step overflows: which data, and in the gradient of which elements of ``Line``."""

    rank: int = 1
    micro: int = 1
    element: int = 0


class Line(nn.Module):
    """Its gradient is the row that it is given, so that one element can overflow alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1, 1, 40))
        self.b = nn.Parameter(torch.linspace(1, 2, 100))

    def forward(self, row: Tensor) -> Tensor:
        return (
            torch.cat([self.a, self.b]) * row
        ).float().sum() / 8  # with scale 65536, after the division by MICROS, fp16 sees 2048


def row_of(rank: int, step: int, micro: int, bad: Bad) -> Tensor:
    row = torch.randn(140, generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro))
    if step == OVERFLOWING_STEP and (rank, micro) == (bad.rank, bad.micro):
        row[bad.element] = 64.0  # 2048 * 64 is above 65504
    return row.half()


def loss_of_line(model: nn.Module, rank: int, step: int, micro: int, bad: Bad) -> Tensor:
    return model(row_of(rank, step, micro, bad)) / MICROS


def loss_of_mlp(model: nn.Module, rank: int, step: int, micro: int, bad: Bad) -> Tensor:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro))
    if step == OVERFLOWING_STEP and (rank, micro) == (bad.rank, bad.micro):
        x[0, 0] = math.inf
    return model(x.half()).float().square().mean() / MICROS


LOSSES = {"line": loss_of_line, "mlp": loss_of_mlp}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Line() if kind == "line" else mlp()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def finite(norm: Tensor) -> float:
    return norm.item() if norm.isfinite() else -1.0


@cache
def with_grad_scaler(kind: str, ranks: int, bad: Bad, max_norm: float) -> dict[str, Any]:
    """Plain torch: fp16 model, fp32 masters, ``torch.amp.GradScaler``; the gradients of all ranks' data averaged."""
    model = model_of(kind)
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    model.half()
    optimizer = adam(masters.values())
    scheduler = falling(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=RULE.initial, growth_interval=RULE.window)
    found: dict[str, Any] = {"norm": [], "scale": [], "skipped": [], "lr": []}
    for step in range(STEPS):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
                masters[name].grad = torch.zeros_like(masters[name])
        for micro in range(MICROS):
            for rank in range(ranks):
                model.zero_grad()
                scaler.scale(LOSSES[kind](model, rank, step, micro, bad)).backward()
                for name, p in model.named_parameters():
                    masters[name].grad += p.grad.float() / ranks
        scaler.unscale_(optimizer)
        found["norm"].append(finite(nn.utils.clip_grad_norm_(masters.values(), max_norm)))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
        if not skipped:
            scheduler.step()
        found["scale"].append(scaler.get_scale())
        found["skipped"].append(float(skipped))
        found["lr"].append(optimizer.param_groups[0]["lr"])
    return {**found, "weights": {name: master.detach() for name, master in masters.items()}}


def everything(model: nn.Module, optimizer: zero.ZeroOptimizer) -> list[Tensor]:
    """Weights, masters, moments and step counts, copied."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    masters = [bucket.masters for bucket in optimizer.reducer.buckets]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *masters, *state)]


def equal(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    pairs = zip(before, after, strict=True)
    return all(torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in pairs)


def with_zero(kind: str, stage: int, bad: Bad, max_norm: float, no_sync: bool) -> dict[str, Any]:
    axis = core.Mesh(dp=torch.distributed.get_world_size()).dp
    model = model_of(kind)
    policy = zero.PrecisionPolicy(torch.float16, loss_scale=RULE)
    units = None if kind == "line" else ["0", "2", "4"]
    optimizer = zero.shard(model, adam, axis=axis, stage=stage, policy=policy, units=units, bucket_bytes=500)
    scheduler = falling(optimizer)
    by_hook = stage % 2 == 1  # both ways to leave the schedule where it is
    if by_hook:
        optimizer.inner.register_step_post_hook(lambda *_: scheduler.step())
    found: dict[str, Any] = {"norm": [], "scale": [], "skipped": [], "lr": []}
    for step in range(STEPS):
        for micro in range(MICROS):
            with optimizer.no_sync() if no_sync and micro < MICROS - 1 else nullcontext():
                optimizer.scale(LOSSES[kind](model, axis.rank, step, micro, bad)).backward()
        found["norm"].append(finite(optimizer.clip_grad_norm_(max_norm)))
        before = everything(model, optimizer)
        optimizer.step()
        optimizer.wait()
        assert not optimizer.skipped or equal(before, everything(model, optimizer))
        if not by_hook and not optimizer.skipped:
            scheduler.step()
        optimizer.zero_grad()
        found["scale"].append(optimizer.loss_scale)
        found["skipped"].append(float(optimizer.skipped))
        found["lr"].append(optimizer.param_groups[0]["lr"])
    return {**found, "weights": masters_of(model, optimizer)}


def all_with_zero(kind: str, variants: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [with_zero(kind, *variant) for variant in variants]


PLACES = [Bad(), Bad(rank=0, micro=3), Bad(element=139)]  # elements of the first rank's part and of the last one's


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_overflow_anywhere_skips_the_step_everywhere(ranks: int) -> None:
    variants = [(stage, bad, math.inf, stage % 2 == 0) for stage in STAGES for bad in PLACES]
    by_rank = run(ranks, all_with_zero, "line", variants)
    for number, (_, bad, max_norm, _) in enumerate(variants):
        expected = with_grad_scaler("line", ranks, bad, max_norm)
        assert expected["skipped"] == [0, 1, 0, 0, 0, 0]
        assert expected["scale"] == [65536, 32768, 32768, 32768, 65536, 65536]
        assert_parity(expected, [results[number] for results in by_rank], micro_batches=MICROS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_grad_scaler(ranks: int) -> None:
    variants = [
        (stage, Bad(), max_norm, no_sync)
        for stage in STAGES
        for max_norm, no_sync in ((math.inf, True), (0.05, True), (0.05, False))
    ]
    by_rank = run(ranks, all_with_zero, "mlp", variants)
    for number, (_, bad, max_norm, _) in enumerate(variants):
        expected = with_grad_scaler("mlp", ranks, bad, max_norm)
        assert expected["skipped"][OVERFLOWING_STEP] == 1
        assert all(norm > max_norm for norm in expected["norm"] if norm >= 0) or max_norm == math.inf
        assert_parity(expected, [results[number] for results in by_rank], micro_batches=MICROS)


# ------------------------------------------------------------------------------------------------------ other axes


class Parts(nn.Module):
    """A weight that all ranks share, and a piece that is this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.ones(5))
        self.piece = nn.Parameter(torch.ones(3))

    def forward(self, x: float) -> Tensor:
        return (self.shared.sum() + (self.piece * x).sum()).float() / 8


def on_one_rank_only(stage: int, kind: str, culprit: int) -> tuple[list[bool], list[float], float]:
    """Steps of which the second overflows in the piece of one rank, by a weight that is divided, or an expert's."""
    rank = torch.distributed.get_rank()
    if kind == "expert":
        mesh = core.Mesh(dp=4, ep=2)
        spec = core.ParamSpec(shards=(core.Shard(mesh.ep, 0),), data_axis=mesh.edp)
    else:
        mesh = core.Mesh(**{"dp": 2, kind: 2})
        spec = core.ParamSpec(shards=(core.Shard(getattr(mesh, kind), 0),))
    model = Parts()
    policy = zero.PrecisionPolicy(torch.float16)
    make = torch.optim.Adam
    optimizer = zero.shard(model, make, axis=mesh.dp, stage=stage, policy=policy, specs={"piece": spec})
    skipped, scale = [], []
    for step in range(3):
        optimizer.scale(model(16.0 if step == 1 and rank == culprit else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.skipped)
        scale.append(optimizer.loss_scale)
    return skipped, scale, masters_of(model, optimizer)["shared"][0].item()


def all_on_one_rank_only(variants: Sequence[tuple[int, str, int]]) -> list[Any]:
    return [on_one_rank_only(*variant) for variant in variants]


def test_an_overflow_in_one_expert_or_one_stage_or_one_shard() -> None:
    variants = [(stage, kind, rank) for stage in STAGES for kind in ("expert", "tp", "pp") for rank in (1, 2)]
    expected = ([False, True, False], [65536.0, 32768.0, 32768.0], pytest.approx(1 - 0.002, rel=1e-6))
    for results in run(4, all_on_one_rank_only, variants):
        for variant, result in zip(variants, results, strict=True):
            assert result == expected, variant


# ------------------------------------------------------------------------------------------------------ one process


class Reads(TorchDispatchMode):
    """Counts how often the host reads a value from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", STAGES)
def test_only_a_loss_scale_makes_the_host_wait(stage: int) -> None:
    counts = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = mlp()
        policy = zero.PrecisionPolicy(dtype)
        make = lambda groups: torch.optim.AdamW(groups, fused=True)  # noqa: E731 - without fused it reads its step count
        optimizer = zero.shard(model, make, axis=core.Mesh(dp=1).dp, stage=stage, policy=policy)
        with Reads() as reads:
            optimizer.scale(model(torch.ones(2, 7, dtype=dtype)).float().mean()).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        counts.append(reads.count)
    assert counts == [0, 0, 1]


def test_without_a_loss_scale_the_same_loop_runs() -> None:
    model = mlp()
    optimizer = zero.shard(model, adam, axis=core.Mesh(dp=1).dp, stage=0, policy=zero.PrecisionPolicy(torch.bfloat16))
    loss = model(torch.ones(2, 7).bfloat16()).sum()
    assert optimizer.scale(loss) is loss
    assert optimizer.loss_scale == 1.0
    assert not optimizer.skipped
    assert optimizer.extra_state() == {}


def test_a_loss_in_fp16_is_scaled_in_fp32() -> None:
    optimizer = zero.shard(mlp(), adam, axis=core.Mesh(dp=1).dp, stage=0, policy=zero.PrecisionPolicy(torch.float16))
    assert optimizer.scale(torch.tensor(3.0, dtype=torch.float16)).item() == 3 * 65536
    assert optimizer.scale(torch.tensor(3.0, dtype=torch.float64)).dtype == torch.float64


def test_a_loss_that_was_not_scaled_is_refused() -> None:
    model = mlp()
    optimizer = zero.shard(model, adam, axis=core.Mesh(dp=1).dp, stage=0, policy=zero.PrecisionPolicy(torch.float16))
    model(torch.ones(2, 7).half()).float().mean().backward()
    with pytest.raises(RuntimeError, match=r"no loss was scaled: call optimizer\.scale\(loss\)\.backward\(\)"):
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_goes_on_with_its_scale(stage: int) -> None:
    rule = zero.LossScale(initial=1024.0, window=3, hysteresis=2)

    def fresh() -> tuple[nn.Module, zero.ZeroOptimizer]:
        model = model_of("line")
        policy = zero.PrecisionPolicy(torch.float16, loss_scale=rule)
        return model, zero.shard(model, adam, axis=core.Mesh(dp=1).dp, stage=stage, policy=policy)

    def steps(model: nn.Module, optimizer: zero.ZeroOptimizer, overflows: str) -> list[float]:
        found = []
        for step in overflows:
            optimizer.scale(model(torch.full((140,), 6e4 if step == "x" else 0.1).half())).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.skipped == (step == "x")
            found.append(optimizer.loss_scale)
        return found

    model, optimizer = fresh()
    assert steps(model, optimizer, "x..") == [1024, 1024, 1024]
    saved = optimizer.state_dict()
    after = [".x..", "xx"]  # the third good step in a row would grow it; the second overflow lowers it
    again = []
    for rest in after:
        model, optimizer = fresh()
        optimizer.load_state_dict(saved)
        again.append(steps(model, optimizer, rest))
    assert again == [[2048, 2048, 2048, 2048], [512, 256]]


def saved_and_resumed(path: Path) -> list[dict[str, Any]]:
    """Two steps in stage 2, of which the second overflows; then three more: at once, and from a checkpoint."""
    axis = core.Mesh(dp=torch.distributed.get_world_size()).dp
    rule = zero.LossScale(initial=2.0**16, window=3)

    def fresh(stage: int) -> tuple[nn.Module, zero.ZeroOptimizer]:
        model = model_of("line")
        policy = zero.PrecisionPolicy(torch.float16, loss_scale=rule)
        return model, zero.shard(model, adam, axis=axis, stage=stage, policy=policy, bucket_bytes=500)

    def steps(model: nn.Module, optimizer: zero.ZeroOptimizer, some: Sequence[int]) -> dict[str, Any]:
        for step in some:
            optimizer.zero_grad()
            for micro in range(MICROS):
                optimizer.scale(loss_of_line(model, axis.rank, step, micro, Bad())).backward()
            optimizer.step()
        return {"scale": [optimizer.loss_scale], "weights": masters_of(model, optimizer)}

    model, optimizer = fresh(2)
    assert steps(model, optimizer, [0, 1])["scale"] == [32768]
    zero.save(path, model, optimizer)
    found = [steps(model, optimizer, [2, 3, 4])]
    for stage in STAGES:
        model, optimizer = fresh(stage)
        zero.load(path, model, optimizer)
        assert optimizer.loss_scale == 32768
        found.append(steps(model, optimizer, [2, 3, 4]))
    return found


def test_a_checkpoint_keeps_the_scale(tmp_path: Path) -> None:
    by_rank = run(2, saved_and_resumed, tmp_path / "checkpoint")
    uninterrupted = by_rank[0][0]
    assert uninterrupted["scale"] == [65536]
    for number in range(1 + len(STAGES)):
        assert_parity(uninterrupted, [results[number] for results in by_rank], rtol=1e-6)
