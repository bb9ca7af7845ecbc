"""What the parity tests train: small models in which faults show, and the loop that runs on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import train_plainly

WIDTH = 7  # of every model's input; the last column is a flag that some models branch on
ROWS = 8  # of the global batch: 2 ranks get 4 each, 4 ranks get 2


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 15), nn.Tanh(), nn.Linear(15, 9), nn.Tanh(), nn.Linear(9, 3))


class WithEmpty(nn.Module):
    """Trainable tensors without elements: first, in the middle, used in forward, and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0))
        self.body = nn.Linear(WIDTH, 15)
        self.middle = nn.Parameter(torch.empty(0, 8))
        self.head = nn.Linear(15, 3)
        self.last = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        nothing = (x[:, :0] @ torch.empty(0, 8, dtype=x.dtype)) @ self.middle.T  # [rows, 0]
        return self.head(torch.tanh(self.body(x))) + nothing.sum() + self.first.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.inner.weight
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.inner(x))))


class Twice(nn.Module):
    """One layer used twice, optionally with its uses recomputed in backward (``reentrant`` True or False)."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        for _ in range(2):
            h = torch.relu(self._layer(h))
        return self.head(h)

    def _layer(self, h: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.layer(h)
        return checkpoint(self.layer, h, use_reentrant=self.reentrant)


class Siamese(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - super().forward(x.flip(1))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(WIDTH, 6).requires_grad_(False)
        self.middle = nn.Linear(6, 6)
        self.above = nn.Linear(6, 3)
        self.above.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(torch.tanh(self.middle(self.below(x))))


class Unused(nn.Module):
    """A layer that no rank ever uses, first and last in model order."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.used = nn.Linear(WIDTH, 3)
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Skipping(nn.Module):
    """A stack of layers, of which layer ``skipped`` works only on rows whose flag is set; without any it is not run."""

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)
        self.skipped = skipped

    def forward(self, x: Tensor) -> Tensor:
        flag = x[:, -1:] > 0
        h = x
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                h = torch.tanh(layer(h))
            elif flag.any():
                h = torch.where(flag, torch.tanh(layer(h)), h)
        return self.head(h)


class EitherOrder(nn.Module):
    """Two layers of one size that flagged rows pass as a(b(x)), others as b(a(x)): backward order differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flag = x[:, -1:] > 0
        if flag.all():
            return self.a(torch.tanh(self.b(x)))[:, :3]
        if not flag.any():
            return self.b(torch.tanh(self.a(x)))[:, :3]
        return torch.where(flag, self.a(torch.tanh(self.b(x))), self.b(torch.tanh(self.a(x))))[:, :3]


class Scattered(nn.Module):
    """Parameters and a buffer that are not contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(15, WIDTH).t())
        self.head = nn.Parameter(torch.randn(3, 30)[:, ::2])
        self.register_buffer("shift", torch.randn(15, 2)[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.shift) @ self.head.T


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "empty": WithEmpty,
    "tied": Tied,
    "twice": Twice,
    "twice recomputed": lambda: Twice(reentrant=False),
    "twice reentrant": lambda: Twice(reentrant=True),
    "siamese": Siamese,
    "siamese recomputed": lambda: Siamese(reentrant=False),
    "siamese reentrant": lambda: Siamese(reentrant=True),
    "frozen": Frozen,
    "unused": Unused,
    "first skipped": lambda: Skipping(0),
    "second skipped": lambda: Skipping(1),
    "third skipped": lambda: Skipping(2),
    "either order": EitherOrder,
    "scattered": Scattered,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
}


@dataclass(frozen=True)
class Case:
    """One training run of ``steps`` steps, the same on one process and on many ranks."""

    model: str = "mlp"
    dtype: torch.dtype = torch.float64
    optimizer: str = "sgd"
    reduce: str = "mean"
    micro_batches: int = 1
    no_sync: bool = True  # for all micro-batches but the last; otherwise each one is reduced
    max_norm: float | None = None
    bucket_bytes: int = 25 * 2**20
    steps: int = 5


def build(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[case.model]().to(case.dtype)


def batches(case: Case) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step its micro-batches: inputs [ROWS, WIDTH] and targets [ROWS, 3] of all ranks together.

    Flags: rank 0 of two has them on odd steps, rank 1 on even ones, and no rank in the last step but one.
    """
    generator = torch.Generator().manual_seed(1)
    steps = []
    for step in range(case.steps):
        micros = []
        for _ in range(case.micro_batches):
            x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
            y = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
            first_half = torch.arange(ROWS) < ROWS // 2
            flagged = first_half == (step % 2 == 1)
            x[:, -1] = torch.where(flagged, 1.0, -1.0)
            if step == case.steps - 2:
                x[:, -1] = -1.0
            micros.append((x.to(case.dtype), y.to(case.dtype)))
        steps.append(micros)
    return steps


def squared_error(model: nn.Module, x: Tensor, y: Tensor, count: int) -> Tensor:
    """Sum over these rows, divided by a count that may be that of a larger batch."""
    return (model(x) - y).square().sum() / count


def reference(case: Case) -> dict[str, Any]:
    """Plain PyTorch in one process on the global batch."""
    count = ROWS * 3 * case.micro_batches
    steps = [[(x, y, count) for x, y in micros] for micros in batches(case)]
    return train_plainly(build(case), steps, squared_error, OPTIMIZERS[case.optimizer], max_norm=case.max_norm)


def on_this_rank(case: Case) -> dict[str, Any]:
    """The same with nanopar_zero; every rank starts from other weights than the first."""
    axis = core.Mesh(dp=torch.distributed.get_world_size()).dp
    model = build(case, seed=axis.rank)
    optimizer = zero.shard(
        model, OPTIMIZERS[case.optimizer], axis=axis, stage=0, reduce=case.reduce, bucket_bytes=case.bucket_bytes
    )
    result = train(model, optimizer, case, axis)
    optimizer.close()
    return result


def train(model: nn.Module, optimizer: zero.ZeroOptimizer, case: Case, axis: core.Axis) -> dict[str, Any]:
    losses, norms, gradients = [], [], {}
    rows = slice(axis.rank * ROWS // axis.size, (axis.rank + 1) * ROWS // axis.size)
    count = ROWS * 3 * case.micro_batches // (axis.size if case.reduce == "mean" else 1)
    for micros in batches(case):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=case.dtype)
        for number, (x, y) in enumerate(micros):
            local = case.no_sync and number < len(micros) - 1
            with optimizer.no_sync() if local else nullcontext():
                loss = squared_error(model, x[rows], y[rows], count)
                loss.backward()
            total += loss.detach()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = optimizer.clip_grad_norm_(float("inf") if case.max_norm is None else case.max_norm)
        optimizer.step()
        mean = axis.size if case.reduce == "mean" else 1
        losses.append(core.all_reduce(total, axis).item() / mean)
        norms.append(norm.item())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights}


def all_on_this_rank(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [on_this_rank(case) for case in cases]
