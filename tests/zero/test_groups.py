"""Parameter groups by parameter, name and pattern: which of them trains what."""

from typing import Any

import pytest
import torch
from tests.zero.cases import weights_of
from torch import nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run


class Net(nn.Module):
    """Sizes 5, 7 and 3, as in a known failure of merged groups; and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(5, generator=generator).double())
        self.b = nn.Parameter(torch.randn(7, generator=generator).double())
        self.c = nn.Parameter(torch.randn(3, generator=generator).double())
        self.frozen = nn.Parameter(torch.zeros(2).double(), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.a.cos().sum() + self.b.sin().sum() * self.c.exp().sum()


def options() -> list[dict[str, Any]]:
    return [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.0, "weight_decay": 0.0}]


def train(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for step in range(3):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if step == 0:
            optimizer.param_groups[2]["lr"] = 0.05
    if isinstance(optimizer, zero.ZeroOptimizer):
        return weights_of(model, optimizer)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def shard(model: nn.Module, groups: Any, **more: Any) -> zero.ZeroOptimizer:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    options = {"axis": core.Mesh(dp=size).dp, "stage": 0, **more}
    return zero.shard(model, lambda g: torch.optim.Adam(g, lr=1.0), groups=groups, **options)


# The order of groups, bucket_bytes, stage. The sizes put some groups on some ranks only.
WAYS = [
    (order, bucket_bytes, stage)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0))
    for bucket_bytes in (1, 64, 10**6)
    for stage in (0, 1, 2, 3)
]


def options_in(order: tuple[int, int, int]) -> dict[str, dict[str, Any]]:
    return dict(zip("abc", (options()[i] for i in order), strict=True))


def train_all() -> list[dict[str, Any]]:
    found = []
    for order, bucket_bytes, stage in WAYS:
        model = Net()
        by = {"a": [model.a, model.frozen], "b": "b", "c": ["c*"]}
        groups = [{"params": by[name], **option} for name, option in options_in(order).items()]
        found.append({"weights": train(model, shard(model, groups, bucket_bytes=bucket_bytes, stage=stage))})
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_train_as_in_torch(ranks: int) -> None:
    for (order, *_), *results in zip(WAYS, *run(ranks, train_all), strict=True):
        plain = Net()
        of_torch = [{"params": [getattr(plain, name)], **option} for name, option in options_in(order).items()]
        expected = train(plain, torch.optim.Adam(of_torch))
        assert_parity({"weights": expected}, results, rtol=1e-12)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size).double()) for size in (5, 7, 3)])

    def forward(self) -> torch.Tensor:
        return sum(p.sum() for p in self.parts)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_adam_step_has_size_lr(stage: int) -> None:
    model = Sum()
    groups = [{"params": f"parts.{i}", "lr": lr} for i, lr in enumerate((0.1, 0.01, 0.001))]
    optimizer = shard(model, groups, bucket_bytes=1, stage=stage)
    model().backward()
    optimizer.step()
    for value, lr in zip(weights_of(model, optimizer).values(), (0.1, 0.01, 0.001), strict=True):
        torch.testing.assert_close(value, torch.full_like(value, -lr), rtol=1e-7, atol=0.0)


def test_make_optimizer_gets_the_groups_in_order_with_their_options() -> None:
    model, seen = Net(), []

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        seen.extend(groups)
        return torch.optim.SGD(groups, lr=0.5)

    groups = [{"params": ["c"], "lr": 0.1}, {"params": [], "tag": "empty"}, {"params": (model.a, "b"), "momentum": 0.9}]
    optimizer = zero.shard(model, make, axis=core.Mesh().dp, stage=0, groups=groups)
    assert [{key: value for key, value in group.items() if key in ("lr", "tag", "momentum")} for group in seen] == [
        {"lr": 0.1, "momentum": 0},
        {"lr": 0.5, "tag": "empty", "momentum": 0},
        {"lr": 0.5, "momentum": 0.9},
    ]
    assert [sum(p.numel() for p in group["params"]) for group in seen] == [32, 0, 64]  # padded to 32 elements each
    assert groups[1] == {"params": [], "tag": "empty"}, "the caller's groups must stay as they were"
    model().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"params": ["a", "b"]}], "1 trainable parameters are in no group, the first is c: freeze or add it"),
        ([{"params": ["a*", "x.*"]}], r"groups: 'x\.\*' matches no trainable parameter"),
        ([{"params": "frozen"}], "groups: 'frozen' matches no trainable parameter"),
        ([{"params": "*"}, {"params": "b"}], "parameter b is in groups 0 and 1"),
        ([{"params": [nn.Parameter(torch.ones(2, 3))]}], r"shape \[2, 3\] that the model does not have"),
        ([{"params": [3]}], "parameters, names or patterns, not int"),
        ([{"lr": 0.1}], "each with a key 'params'"),
        ({"params": ["*"]}, "must be a list of dictionaries"),
    ],
)
def test_groups_that_do_not_fit(groups: Any, message: str) -> None:
    model = Net()
    before = model.a.data_ptr()
    with pytest.raises(ValueError, match=message):
        shard(model, groups)
    assert model.a.data_ptr() == before, "nothing may be touched before the groups are checked"
    shard(model, None)
