"""What the parity tests train: small models in which faults show, and the loop that runs on each rank.

In stages 1 to 3 no rank has a whole gradient, in stage 3 no whole weights either: ``gradients_of`` and ``weights_of``
put them together from the parts of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, train_plainly
from nanopar_zero.buckets import Bucket

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


class Blocks(nn.Module):
    """Residual blocks of odd sizes in a nested list, whose recomputation (``reentrant``) runs block by block."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, 5)
        blocks = [nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5)) for width in (3, 9, 4, 11)]
        self.stages = nn.ModuleList([nn.ModuleList(blocks[:1]), nn.ModuleList(blocks[1:])])
        self.head = nn.Linear(5, 3, bias=False)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        for blocks in self.stages:
            for block in blocks:
                h = h + (block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant))
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
    "blocks": Blocks,
    "blocks recomputed": lambda: Blocks(reentrant=False),
    "blocks reentrant": lambda: Blocks(reentrant=True),
    "either order": EitherOrder,
    "scattered": Scattered,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
}


RECOMPUTED = ("", " recomputed", " reentrant")
# Small units, the modules themselves; whatever is not named here has the units that zero finds, or the root alone.
UNITS = {
    "mlp": ["0", "2", "4"],
    "empty": ["body", "head"],
    "tied": ["inner", "again", "head"],
    "frozen": ["below", "middle", "above"],
    "unused": ["before", "used", "after"],
    "either order": ["a", "b"],
    **{f"{kind}{how}": ["start", "layer", "head"] for kind in ("twice", "siamese") for how in RECOMPUTED},
    **{f"{which} skipped": ["layers.*", "head"] for which in ("first", "second", "third")},
    **{f"blocks{how}": ["start", "stages.*.*", "head"] for how in RECOMPUTED},
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
    stage: int = 0
    small_units: bool = False  # those of UNITS
    prefetch: int = 1
    reshard_after_forward: bool = True
    replicate: int = 1  # ranks of the second data axis

    def __str__(self) -> str:
        changed = (f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(changed) or "mlp"

    @property
    def of_one_process(self) -> Case:
        """Without everything that makes no difference to one process."""
        same = ("model", "dtype", "optimizer", "micro_batches", "max_norm", "steps")
        return Case(**{name: getattr(self, name) for name in same})

    def shard(self, model: nn.Module, **more: Any) -> zero.ZeroOptimizer:
        """Put the model on the ranks of this case's mesh."""
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        mesh = core.Mesh(dp_replicate=self.replicate, dp=size // self.replicate)
        options = {
            "axis": mesh.dp,
            "replicate": mesh.dp_replicate if self.replicate > 1 else None,
            "stage": self.stage,
            "reduce": self.reduce,
            "bucket_bytes": self.bucket_bytes,
            "units": UNITS.get(self.model) if self.small_units else None,
            "prefetch": self.prefetch,
            "reshard_after_forward": self.reshard_after_forward,
        }
        return zero.shard(model, OPTIMIZERS[self.optimizer], **{**options, **more})


def pairwise(**factors: Sequence[Any]) -> list[Case]:
    """Few cases in which any two values of two different factors meet: each case takes in what is most wanted."""
    wanted = dict.fromkeys(
        ((one, first), (two, second))
        for one, two in combinations(factors, 2)
        for first in factors[one]
        for second in factors[two]
    )
    found = []
    while wanted:
        row = dict(next(iter(wanted)))
        for name, values in factors.items():
            if name not in row:
                row[name] = max(values, key=lambda value: len(_pairs(factors, {**row, name: value}) & wanted.keys()))
        for pair in _pairs(factors, row):
            wanted.pop(pair, None)
        found.append(Case(**row))
    return found


def _pairs(factors: Iterable[str], row: Mapping[str, Any]) -> set[Any]:
    return set(combinations([(name, row[name]) for name in factors if name in row], 2))


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


@cache
def reference(case: Case) -> dict[str, Any]:
    """Plain PyTorch in one process on the global batch."""
    if case != case.of_one_process:
        return reference(case.of_one_process)
    count = ROWS * 3 * case.micro_batches
    steps = [[(x, y, count) for x, y in micros] for micros in batches(case)]
    return train_plainly(build(case), steps, squared_error, OPTIMIZERS[case.optimizer], max_norm=case.max_norm)


def on_this_rank(case: Case) -> dict[str, Any]:
    """The same with nanopar_zero; every rank starts from other weights than the first."""
    axis = core.Mesh(dp=torch.distributed.get_world_size()).dp
    model = build(case, seed=axis.rank)
    optimizer = case.shard(model)
    result = train(model, optimizer, case, axis)
    optimizer.close()
    return result


def train(model: nn.Module, optimizer: zero.ZeroOptimizer, case: Case, axis: core.Axis) -> dict[str, Any]:
    """Train on the rows of this rank of ``axis``, which has all ranks that see different rows."""
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
        gradients = gradients_of(model, optimizer)
        norm = optimizer.clip_grad_norm_(float("inf") if case.max_norm is None else case.max_norm)
        optimizer.step()
        mean = axis.size if case.reduce == "mean" else 1
        losses.append(core.all_reduce(total, axis).item() / mean)
        norms.append(norm.item())
    return {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights_of(model, optimizer)}


def gradients_of(model: nn.Module, optimizer: zero.ZeroOptimizer) -> dict[str, Tensor]:
    """The whole reduced gradient of every trained parameter; in stage 0 what ``p.grad`` shows."""
    names = names_of(model)
    found = {}
    for bucket in optimizer.reducer.buckets:
        if not bucket.reduction.divided:
            found |= {names[id(p)]: p.grad.detach().clone() for p in bucket.members if p.grad is not None}
            continue
        assert all(p.grad is None for p in bucket.members)
        if bucket.reduced is not None:
            found |= in_parameters(bucket, bucket.reduced, names)
    return {name: found[name] for name in names.values() if name in found}


def weights_of(model: nn.Module, optimizer: zero.ZeroOptimizer) -> dict[str, Tensor]:
    """All whole parameters: the model's own, and what stage 3 has freed from the masters of all ranks."""
    names = names_of(model)
    optimizer.wait()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for bucket in optimizer.windows.buckets:
        if bucket.frees_parameters:
            found |= in_parameters(bucket, bucket.masters, names)
    return found


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def in_parameters(bucket: Bucket, part: Tensor, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Values along a rank's part of a bucket, from all ranks, by parameter."""
    sizes = [part.numel()] * bucket.reduction.parts
    whole = core.all_gather(part, bucket.reduction.data_axis, sizes=sizes) if len(sizes) > 1 else part
    return {
        names[id(member)]: whole[slot.start : slot.start + slot.numel].view(slot.item.shape).clone()
        for slot, member in zip(bucket.layout.slots, bucket.members, strict=True)
    }


def all_on_this_rank(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [on_this_rank(case) for case in cases]


def assert_all(cases: Sequence[Case], by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """``assert_parity`` of every case, whose results each rank gives in their order; tells of all that deviate."""
    failures = []
    for number, case in enumerate(cases):
        axes = {"dp_replicate": case.replicate, "dp": len(by_rank) // case.replicate} if case.replicate > 1 else None
        results = [results[number] for results in by_rank]
        try:
            assert_parity(reference(case), results, axes=axes, micro_batches=case.micro_batches)
        except AssertionError as error:
            failures.append(f"{case}\n{error}")
    assert not failures, f"{len(failures)} of {len(cases)} cases deviate\n" + "\n".join(failures)
