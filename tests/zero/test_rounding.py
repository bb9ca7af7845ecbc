"""Stochastic rounding: unbiased, the same on every rank that holds a weight, and as good as fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zero.cases import mlp
from tests.zero.whole import masters_of
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import run
from nanopar_zero.rounding import key_of, round_stochastically

pytestmark = pytest.mark.long

ROUNDING = zero.PrecisionPolicy(torch.bfloat16, stochastic_rounding=True)
MASTERS = zero.PrecisionPolicy(torch.bfloat16)
STAGES = range(4)


def rounded(exact: Tensor, key: int = 1, start: int = 0) -> Tensor:
    out = torch.empty(exact.shape, dtype=torch.bfloat16)
    round_stochastically(exact.clone(), out, key=key, start=start)
    return out


def from_bits(bits: int) -> float:
    return torch.tensor(bits - 2**32 if bits >= 2**31 else bits, dtype=torch.int32).view(torch.float32).item()


# --------------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("upper", [0x3F80, 0xBF80, 0x0000, 0x4F12, 0x7F7E, 0x3FFF])  # 1, -1, below normal, large, 1.99
def test_a_number_becomes_one_of_its_two_neighbours_with_the_right_mean(upper: int) -> None:
    """Every fp32 number between two bf16 numbers, each rounded with 64 keys."""
    bits = torch.arange(2**16, dtype=torch.int64) + (upper << 16)
    exact = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    low, high = from_bits(upper << 16), from_bits((upper + 1) << 16)
    chance = torch.arange(2**16, dtype=torch.float64) / 2**16
    ups = torch.zeros(2**16, dtype=torch.float64)
    for number in range(64):
        result = rounded(exact, key_of(number)).float()
        assert bool(((result == low) | (result == high)).all())
        ups += result == high
    for group in range(16):  # each sixteenth of the way from the lower to the higher neighbour
        part = slice(group * 2**12, (group + 1) * 2**12)
        deviation = (ups[part] - 64 * chance[part]).sum()
        assert deviation.abs() < 4.5 * (64 * chance[part] * (1 - chance[part])).sum().sqrt()
    spread = (ups - 64 * chance).square().sum() / (64 * chance * (1 - chance)).sum()
    assert 0.97 < spread < 1.03, "numbers are rounded independently of each other"


def test_what_bf16_holds_stays() -> None:
    held = torch.tensor([0.0, -0.0, 1.0, -2.5, 3e38, 1e-40, float("inf"), -float("inf")]).bfloat16()
    assert torch.equal(rounded(held.float()).view(torch.int16), held.view(torch.int16))
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # CUDA's is the second
    assert all(bool(rounded(nans, key).isnan().all()) for key in range(100))


def test_the_random_bits_belong_to_the_position() -> None:
    exact = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    whole = rounded(exact, key=5)
    pieces = [(0, 7), (7, 140_000), (140_000, 300_000)]
    assert torch.equal(torch.cat([rounded(exact[a:b], key=5, start=a) for a, b in pieces]), whole)
    assert not torch.equal(rounded(exact, key=6), whole)
    far = 2**32 + 3  # positions of the largest buckets
    assert torch.equal(rounded(exact[:10], key=5, start=far)[1:], rounded(exact[1:10], key=5, start=far + 1))


def test_rounding_needs_bf16() -> None:
    with pytest.raises(ValueError, match=r"stochastic_rounding needs param_dtype=torch\.bfloat16, not torch\.float16"):
        zero.PrecisionPolicy(torch.float16, stochastic_rounding=True)


# --------------------------------------------------------------------------------------------------------- training


class Vector(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def forward(self) -> Tensor:
        return self.w.sum()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_updates_below_half_a_step_arrive_in_the_mean(stage: int) -> None:
    """100 steps of 0.001 from 1.0 where bf16 numbers are 1/256 apart: 0.9, where rounding to nearest stays at 1.0.

    A step moves a weight with chance p = 0.256: its standard deviation is sqrt(100 p (1 - p)) / 256 = 0.01705 after 100
    steps, that of the mean of 4096 weights 0.000266.
    """
    model = Vector(4096)
    optimizer = zero.shard(model, adamw, axis=core.Mesh(dp=1).dp, stage=stage, policy=ROUNDING)
    for _ in range(100):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    optimizer.close()
    weights = model.w.detach().double()
    assert weights.mean().item() == pytest.approx(0.9, abs=4 * 0.000266)
    assert weights.std().item() == pytest.approx(0.01705, rel=0.1)


def final_loss(policy: zero.PrecisionPolicy | None, dtype: torch.dtype) -> float:
    """Of a small network that learns another one's outputs, over the last steps."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)).to(dtype)
    optimizer = zero.shard(model, adamw, axis=core.Mesh(dp=1).dp, stage=2, policy=policy)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / 400)
        x = torch.randn(64, 16, generator=generator)
        loss = (model(x.bfloat16()).float() - 3 * teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50


def test_it_learns_as_well_as_with_masters() -> None:
    masters = final_loss(MASTERS, torch.float32)
    assert final_loss(ROUNDING, torch.float32) == pytest.approx(masters, rel=0.02)
    assert final_loss(None, torch.bfloat16) > 1.08 * masters, "rounding to nearest does not"


# -------------------------------------------------------------------------------------------------------- many ranks


def weights_after(stage: int, model: nn.Module, steps: int = 5, **more: Any) -> dict[str, Tensor]:
    """All ranks see the same data: the mean of their gradients is exactly that of one."""
    axis = core.Mesh(dp=torch.distributed.get_world_size()).dp
    options = {"axis": axis, "policy": ROUNDING, "bucket_bytes": 500, **more}
    optimizer = zero.shard(model, adamw, stage=stage, **options)
    for step in range(steps):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        model(x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = masters_of(model, optimizer)
    optimizer.close()
    assert all(torch.equal(masters[name], p) for name, p in model.named_parameters())
    return masters


def model_of_seed() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def in_all_stages() -> list[dict[str, Tensor]]:
    return [weights_after(stage, model_of_seed()) for stage in STAGES]


def test_the_number_of_ranks_makes_no_difference() -> None:
    alone = run(1, in_all_stages)[0]
    for ranks in (2, 4):
        for results in run(ranks, in_all_stages):
            for expected, found in zip(alone, results, strict=True):
                assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


class Tied(nn.Module):
    """A tied weight, after or before other weights: those of one end of a pipeline, or of the other."""

    def __init__(self, end: int) -> None:
        super().__init__()
        if end:
            self.tied, self.more, self.other = (nn.Parameter(torch.ones(300)) for _ in range(3))
        else:
            self.other, self.tied = (nn.Parameter(torch.ones(300)) for _ in range(2))

    def forward(self, _x: Tensor) -> Tensor:
        return sum(p.float().sum() for p in self.parameters())


def copies(kind: str) -> list[Tensor]:
    """A weight that other ranks have too, after five steps in each stage."""
    found = []
    for stage in STAGES:
        if kind == "replicate":
            mesh = core.Mesh(dp_replicate=2, dp=2)
            weights = weights_after(stage, model_of_seed(), axis=mesh.dp, replicate=mesh.dp_replicate)
            found.append(weights["2.weight"])
        elif kind == "tp":
            mesh = core.Mesh(dp=2, tp=2)
            found.append(weights_after(stage, model_of_seed(), axis=mesh.dp)["2.weight"])
        else:
            mesh = core.Mesh(pp=2, dp=2)
            specs = {"tied": core.ParamSpec(grad_sum=(mesh.pp,))}
            weights = weights_after(stage, Tied(mesh.pp.rank), axis=mesh.dp, specs=specs, bucket_bytes=1)
            assert not torch.equal(weights["tied"], weights["other"])  # equal gradients, other random bits
            found.append(weights["tied"])
    return found


@pytest.mark.parametrize("kind", ["replicate", "tp", "tied over pp"])
def test_copies_stay_equal_bit_for_bit(kind: str) -> None:
    first, *others = run(4, copies, kind)
    assert all(len(tensor.unique()) > 1 for tensor in first)
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


# ------------------------------------------------------------------------------------------------- memory and state


@pytest.mark.parametrize("stage", STAGES)
def test_only_moments_are_in_fp32_between_steps(stage: int) -> None:
    model = model_of_seed()
    optimizer = zero.shard(model, adamw, axis=core.Mesh(dp=1).dp, stage=stage, policy=ROUNDING)
    model(torch.ones(2, 7).bfloat16()).sum().backward()
    optimizer.step()
    assert {bucket.masters.dtype for bucket in optimizer.reducer.buckets} == {torch.bfloat16}
    for shard in optimizer.shards:
        assert shard.flat.dtype == torch.float32
        assert shard.flat.untyped_storage().nbytes() == 4  # one NaN that stands for all
        assert shard.flat.isnan().all()
        assert optimizer.state[shard.flat]["exp_avg_sq"].dtype == torch.float32


def test_an_optimizer_with_state_from_the_beginning() -> None:
    model = Vector(64)
    make = lambda groups: torch.optim.Adagrad(groups, lr=0.5, initial_accumulator_value=3.0)  # noqa: E731
    optimizer = zero.shard(model, make, axis=core.Mesh(dp=1).dp, stage=1, policy=ROUNDING)
    model().backward()
    optimizer.step()
    assert torch.equal(model.w.detach().float(), torch.full((64,), 0.75))  # 1 - 0.5 * 1 / sqrt(3 + 1)


def trained(model: nn.Module, optimizer: zero.ZeroOptimizer, steps: Sequence[int]) -> None:
    for step in steps:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        model(x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_resumed_run_rounds_as_the_uninterrupted_one(stage: int) -> None:
    def fresh() -> tuple[nn.Module, zero.ZeroOptimizer]:
        model = model_of_seed()
        return model, zero.shard(model, adamw, axis=core.Mesh(dp=1).dp, stage=stage, policy=ROUNDING)

    model, optimizer = fresh()
    trained(model, optimizer, [0, 1])
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    state = {**state, "state": {key: {k: v.clone() for k, v in of.items()} for key, of in state["state"].items()}}
    trained(model, optimizer, [2, 3])
    again, resumed = fresh()
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    trained(again, resumed, [2, 3])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert resumed.extra_state() == {"updates": 4}


def saved_and_resumed(path: Path) -> bool:
    model = model_of_seed()
    axis = core.Mesh(dp=torch.distributed.get_world_size()).dp
    optimizer = zero.shard(model, adamw, axis=axis, stage=3, policy=ROUNDING)
    trained(model, optimizer, [0, 1])
    zero.save(path, model, optimizer)
    trained(model, optimizer, [2, 3])
    again = mlp()
    resumed = zero.shard(again, adamw, axis=axis, stage=3, policy=ROUNDING)
    zero.load(path, again, resumed)
    trained(again, resumed, [2, 3])
    expected, found = masters_of(model, optimizer), masters_of(again, resumed)
    return all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_checkpoint_keeps_moments_in_fp32_and_counts_updates(tmp_path: Path) -> None:
    assert run(2, saved_and_resumed, tmp_path / "checkpoint") == [True, True]
