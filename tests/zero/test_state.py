"""Whole weights under the model's own names, in memory and in checkpoints for another number of ranks."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zero.cases import Case, batches, squared_error
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run, train_plainly

needs_safetensors = pytest.mark.skipif(find_spec("safetensors") is None, reason="save and load need safetensors")

CASE = Case(dtype=torch.float64, steps=4)


class Net(nn.Module):
    """Tied, frozen, empty and odd-sized parameters, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.lower.weight
        self.head = nn.Linear(7, 3)
        self.head.bias.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.register_buffer("shift", torch.ones(7))
        self.register_buffer("scratch", torch.ones(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.lower(x + self.shift))))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def make(seed: int, dtype: torch.dtype = torch.float64, **more: Any) -> tuple[Net, zero.ZeroOptimizer]:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    torch.manual_seed(seed)
    model = Net().to(dtype)
    return model, zero.shard(model, adamw, axis=core.Mesh(dp=size).dp, stage=0, **{"bucket_bytes": 300, **more})


def train(model: Net, optimizer: zero.ZeroOptimizer, steps: range) -> None:
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if size_of() > 1 else (0, 1)
    for step in steps:
        (x, y), *_ = batches(CASE)[step]
        rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
        optimizer.zero_grad()
        squared_error(model, x[rows], y[rows], 24 // size).backward()
        optimizer.step()


def global_batches(steps: range) -> list[list[tuple[Tensor, Tensor, int]]]:
    return [[(x, y, 24) for x, y in batches(CASE)[step]] for step in steps]


def size_of() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def gathered_weights() -> dict[str, Tensor]:
    model, optimizer = make(seed=torch.distributed.get_rank())
    train(model, optimizer, range(2))
    return {name: value.clone() for name, value in zero.full_state_dict(model, optimizer).items()}


def test_full_state_dict_is_the_models_own_on_the_first_rank_only() -> None:
    first, second = run(2, gathered_weights)
    assert second == {}
    torch.manual_seed(0)
    plain = Net().double()
    assert list(first) == list(plain.state_dict())
    assert "scratch" not in first
    train_plainly(plain, global_batches(range(2)), squared_error, adamw)
    assert_parity({"weights": plain.state_dict()}, {"weights": first})
    plain.load_state_dict(first)


def test_masters_are_given_rather_than_rounded_weights() -> None:
    policy = zero.PrecisionPolicy(torch.bfloat16)
    model, optimizer = make(seed=0, dtype=torch.float32, policy=policy)
    full = zero.full_state_dict(model, optimizer)
    torch.manual_seed(0)
    for name, value in Net().state_dict().items():
        expected = value.bfloat16() if name == "head.bias" else value  # frozen: has no master
        assert torch.equal(full[name], expected), name
        assert full[name].dtype == expected.dtype


def saved_after(steps: int, path: str, more: dict[str, Any]) -> dict[str, Tensor]:
    """Train, save, train on; the weights at the end."""
    model, optimizer = make(seed=0, **more)
    train(model, optimizer, range(steps))
    optimizer.param_groups[0]["lr"] = 0.02
    zero.save(path, model, optimizer, extra={"step": steps})
    train(model, optimizer, range(steps, CASE.steps))
    return {name: value.clone() for name, value in model.state_dict().items()}


def resumed(steps: int, path: str, more: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = make(seed=1, **more)
    zero.load(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.02
    train(model, optimizer, range(steps, CASE.steps))
    return {name: value.clone() for name, value in model.state_dict().items()}


def without_a_break(steps: int) -> dict[str, Tensor]:
    """The same in plain PyTorch: the weights of all steps, of which the later ones have another learning rate."""
    torch.manual_seed(0)
    plain = Net().double()
    optimizer = adamw([p for p in plain.parameters() if p.requires_grad])
    train_plainly(plain, global_batches(range(steps)), squared_error, lambda _: optimizer)
    optimizer.param_groups[0]["lr"] = 0.02
    train_plainly(plain, global_batches(range(steps, CASE.steps)), squared_error, lambda _: optimizer)
    return dict(plain.state_dict())


@needs_safetensors
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 4)])
def test_a_run_resumed_on_other_ranks_and_buckets_goes_on_as_before(
    before: int, after: int, steps: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    expected = {"weights": without_a_break(steps)}
    saved = [{"weights": weights} for weights in run(before, saved_after, steps, path, {"bucket_bytes": 300})]
    assert_parity(expected, saved)
    for bucket_bytes in (300, 10**6):
        options = {"bucket_bytes": bucket_bytes}
        found = [{"weights": weights} for weights in run(after, resumed, steps, path, options)]
        assert_parity(expected, found)
        if before == after:
            assert_parity(saved[0], found, rtol=0.0)


@needs_safetensors
def test_masters_are_what_is_saved(tmp_path: Path) -> None:
    policy = zero.PrecisionPolicy(torch.bfloat16)
    model, optimizer = make(seed=0, dtype=torch.float32, policy=policy)
    expected = {name: value.clone() for name, value in zero.full_state_dict(model, optimizer).items()}
    zero.save(tmp_path / "c", model, optimizer)
    other, again = make(seed=1, dtype=torch.float32, policy=policy)
    zero.load(tmp_path / "c", other, again)
    found = zero.full_state_dict(other, again)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(other.state_dict()[name], value.to(other.state_dict()[name].dtype)), name


@needs_safetensors
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    class Larger(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    model, optimizer = make(seed=0)
    zero.save(tmp_path / "small", model, optimizer)
    larger = Larger().double()
    optimizer_of_larger = zero.shard(larger, adamw, axis=core.Mesh().dp, stage=0)
    zero.save(tmp_path / "large", larger, optimizer_of_larger)
    with pytest.raises(ValueError, match=r"extra\.(weight|bias)"):
        zero.load(tmp_path / "small", larger, optimizer_of_larger)
    with pytest.raises(ValueError, match=r"holds extra\.(weight|bias), which the model does not have"):
        zero.load(tmp_path / "large", model, optimizer)
    two_groups = [{"params": "*.weight"}, {"params": ["*.bias", "empty"]}]
    optimizer.close()
    model, optimizer = make(seed=0, groups=two_groups)
    with pytest.raises(ValueError, match="small has 1 parameter groups, the optimizer 2"):
        zero.load(tmp_path / "small", model, optimizer)
    with pytest.raises(ValueError, match="missing"):
        zero.load(tmp_path / "missing", model, optimizer)
