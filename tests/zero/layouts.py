"""What the tests of state train: a model with all that a state dict can hold, in any layout, or in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import train_plainly

STAGES = (0, 1, 2, 3)
ROWS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7, bias=False)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks (units) and a root with tied, frozen, empty, odd-sized parameters and both kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(7, 7)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.layers[1].up.weight.requires_grad_(False)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.lower.weight
        self.head = nn.Linear(7, 3)
        self.head.bias.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.places = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("shift", torch.randn(7))
        self.register_buffer("scratch", torch.randn(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lower(x + self.shift.to(x.dtype))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.again(torch.tanh(h)))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


# The second group has no momentum, so its parameters have no state. Biases and scales are few: ranks without any.
MOMENTUM = [{"params": ["*weight", "empty"], "momentum": 0.9}, {"params": ["*bias", "*scale"], "lr": 0.05}]
DECAY = [{"params": ["*weight", "empty"]}, {"params": ["*bias", "*scale"], "weight_decay": 0.0}]


@dataclass(frozen=True)
class Layout:
    """How the model is trained, apart from the number of ranks."""

    stage: int = 0
    momentum: bool = False
    replicas: int = 1
    bf16: bool = False
    more: dict[str, Any] = field(default_factory=dict, hash=False)


def world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def named_groups(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same groups for plain PyTorch: the trainable parameters whose names end so."""

    def chosen(patterns: list[str]) -> list[nn.Parameter]:
        ends = tuple(pattern.lstrip("*") for pattern in patterns)
        return [p for name, p in model.named_parameters() if p.requires_grad and name.endswith(ends)]

    return [{**group, "params": chosen(group["params"])} for group in groups]


def make(layout: Layout, seed: int = 0) -> tuple[Net, zero.ZeroOptimizer]:
    mesh = core.Mesh(dp=world() // layout.replicas, dp_replicate=layout.replicas)
    torch.manual_seed(seed)
    model = Net().to(torch.float32 if layout.bf16 else torch.float64)
    options: dict[str, Any] = {"bucket_bytes": 300, **layout.more}
    if layout.bf16:
        options["policy"] = zero.PrecisionPolicy(torch.bfloat16)
    if layout.replicas > 1:
        options["replicate"] = mesh.dp_replicate
    groups, make_optimizer = (MOMENTUM, sgd) if layout.momentum else (DECAY, adamw)
    return model, zero.shard(model, make_optimizer, axis=mesh.dp, stage=layout.stage, groups=groups, **options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, 7, generator=generator, dtype=torch.float64)
    return x, y[:, :3]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, count: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)) - y).square().sum() / count


def train(model: Net, optimizer: zero.ZeroOptimizer, steps: range) -> dict[str, Any]:
    """Some steps on this rank's rows; the losses of the global batch, and the weights as ``state_dict`` has them."""
    everybody = core.Mesh(dp=world()).dp
    losses = []
    for step in steps:
        x, y = batch(step)
        rows = slice(rank() * ROWS // world(), (rank() + 1) * ROWS // world())
        optimizer.zero_grad()
        loss = loss_of(model, x[rows], y[rows], 3 * ROWS // world())
        loss.backward()
        losses.append(core.all_reduce(loss.detach().double(), everybody).item() / world())
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + step)
        optimizer.step()
    return {"loss": losses, "weights": {name: value.clone() for name, value in model.state_dict().items()}}


def plainly(steps: int, momentum: bool = False) -> dict[str, Any]:
    """The same in one process with nothing but torch; the last step's loss."""
    torch.manual_seed(0)
    model = Net().double()
    groups, make_optimizer = (MOMENTUM, sgd) if momentum else (DECAY, adamw)
    optimizer = make_optimizer(named_groups(model, groups))
    result: dict[str, Any] = {}
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + step)
        result = train_plainly(model, [[(*batch(step), 3 * ROWS)]], loss_of, lambda _: optimizer)
    return {"loss": result.get("loss", []), "weights": dict(model.state_dict())}
