"""Faults that comparable libraries have had, with the right values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_expert as expert
from nanopar_core.sharding import merge_state_dict
from nanopar_core.testing import assert_parity, run

zero = pytest.importorskip("nanopar_zero")

# --------------------------------------------------- experts' gradients are not scaled by the size of the wrong group


class Scalars(nn.Module):
    """Expert e multiplies by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[2.0], [3.0]], dtype=torch.float64))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return (x[:, None] * self.scale[indices] * weights[:, :, None]).sum(1)


PLAN = {"experts.scale": "grouped_gemm", "experts": "ep_dispatch_experts"}
TOKENS = [([1.0, 2.0, 3.0], [0, 0, 1]), ([4.0, 5.0, 6.0], [0, 1, 1])]


def scalar_experts(dp: int, ep: int, stage: int, reduce: str, clip: float) -> dict[str, Any]:
    mesh = core.Mesh(dp=dp, ep=ep)
    model = nn.ModuleDict({"experts": Scalars()})
    specs = expert.parallelize(model, PLAN, mesh.ep, data_axis=mesh.edp)
    optimizer = zero.shard(
        model, lambda g: torch.optim.SGD(g, lr=1.0), axis=mesh.dp, stage=stage, specs=specs, reduce=reduce
    )
    values, indices = TOKENS[mesh.dp.rank % 2]
    x, repeats = torch.tensor(values, dtype=torch.float64)[:, None], dp // 2
    y = model["experts"](x, torch.tensor(indices)[:, None], torch.ones(3, 1, dtype=torch.float64))
    (y.sum() / (3 if reduce == "mean" else 6 * repeats)).backward()
    norm = optimizer.clip_grad_norm_(clip).item()
    optimizer.step()
    optimizer.wait()
    with zero.gathered(model):
        part = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = merge_state_dict(part, specs)["experts.scale"].flatten()
    optimizer.close()
    return {"norm": norm, "step": [2.0 - weights[0].item(), 3.0 - weights[1].item()]}


def in_all_stages(dp: int, ep: int, reduce: str) -> list[dict[str, Any]]:
    return [scalar_experts(dp, ep, stage, reduce, clip) for stage in range(4) for clip in (100.0, 1.0)]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_gradients_of_experts(dp: int, ep: int, reduce: str) -> None:
    right = [7 / 6, 14 / 6]
    length = (right[0] ** 2 + right[1] ** 2) ** 0.5
    for of_rank in run(dp, in_all_stages, dp, ep, reduce):
        for whole, clipped in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert whole == {"norm": pytest.approx(length, rel=1e-12), "step": pytest.approx(right, rel=1e-12)}
            assert clipped["step"] == pytest.approx([value / length for value in right], rel=1e-5)


# ------------------------------------------------------------------------------- a rank or an expert gets no tokens


class Net(nn.Module):
    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.moe = expert.MoE(expert.TopKRouter(4, 4, top_k, bias=True), expert.Experts(4, 4, 4))

    def forward(self, x: Tensor, recompute: bool, context_fn: Any) -> Tensor:
        if recompute:
            return checkpoint(self._layers, x, use_reentrant=False, **context_fn)  # type: ignore[no-any-return]
        return self._layers(x)

    def _layers(self, x: Tensor) -> Tensor:
        return self.moe(self.inner(x))  # type: ignore[no-any-return]


def batch(step: int) -> Tensor:
    """In steps 0 and 1 the second half is empty."""
    rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return rows if step == 2 else rows[:4]


def starved(ep: int, dp: int, top_k: int, recompute: bool, kept: bool) -> dict[str, Any]:
    mesh = core.Mesh(dp=dp, ep=ep)
    torch.manual_seed(0)
    model = Net(top_k).double()
    specs = expert.parallelize(model, None, mesh.ep, data_axis=mesh.edp)
    optimizer = zero.shard(
        model,
        lambda g: torch.optim.AdamW(g, lr=0.1, weight_decay=0.1),
        axis=mesh.dp,
        stage=2,
        specs=specs,
        reduce="sum",
    )
    for step in range(3):
        favoured = torch.tensor([100.0, 50.0, 0.0, 0.0] if step < 2 else [0.0] * 4)
        model.moe.router.bias.copy_(favoured)  # type: ignore[union-attr,operator]
        x = batch(step)
        mine = x.split([4, x.shape[0] - 4])[mesh.dp.rank] if dp == 2 else x
        context: dict[str, Any] = {"context_fn": core.keep_communicated} if kept else {}
        model(mine, recompute, context).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    part = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"weights": merge_state_dict(part, specs)}


def starved_plainly(top_k: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net(top_k).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        favoured = torch.tensor([100.0, 50.0, 0.0, 0.0] if step < 2 else [0.0] * 4)
        model.moe.router.bias.copy_(favoured)  # type: ignore[union-attr,operator]
        model(batch(step), False, {}).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # always a zero gradient, never none
    return {"weights": {name: parameter.detach() for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize(("recompute", "kept"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (2, 2)])
def test_a_rank_or_an_expert_without_tokens(dp: int, ep: int, top_k: int, recompute: bool, kept: bool) -> None:
    found = run(2, starved, ep, dp, top_k, recompute, kept, timeout_s=60)
    assert_parity(starved_plainly(top_k), found, axes={"dp": 2})


# ----------------------------------------------------------------------------- ranks that route differently never hang


def hostile(steps: int) -> int:
    """Random sizes, random and extreme choices, parts frozen or not: 4 ranks stay in step. The tokens they computed."""
    mesh, rank = core.Mesh(dp=4, ep=4), torch.distributed.get_rank()
    torch.manual_seed(0)
    plain, capped = (expert.Experts(8, 6, 4) for _ in range(2))
    model = nn.ModuleDict({"plain": plain, "capped": capped})
    for name, options in (("plain", {"chunks": 2}), ("capped", {"capacity_factor": 0.5})):
        plan = {
            f"{name}.gate_up_proj": "grouped_gemm",
            f"{name}.down_proj": "grouped_gemm",
            name: "ep_dispatch_experts",
        }
        expert.parallelize(model, plan, mesh.ep, **options)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(rank)
    total = 0
    for step in range(steps):
        together = torch.Generator().manual_seed(step)  # what all ranks decide alike
        top_k = int(torch.randint(1, 4, (), generator=together))
        tokens = int(torch.randint(0, 9, (), generator=random)) * int(torch.randint(0, 2, (), generator=random))
        x = torch.randn(tokens, 6, generator=random).requires_grad_(step % 3 > 0)
        kind = int(torch.randint(0, 4, (), generator=random))
        scores = torch.rand(tokens, 8, generator=random)
        scores[:, : [8, 1, 2, 0][kind]] += 9  # anything, one expert's rank, half of it, the last ones
        indices = scores.topk(top_k, 1).indices
        if kind == 3:
            indices = indices.masked_fill(torch.rand(tokens, top_k, generator=random) < 0.5, 8)  # no expert at all
        weights = torch.rand(tokens, top_k, generator=random).requires_grad_(step % 4 > 0)
        for name in ("plain", "capped"):
            model[name].requires_grad_(step % 5 > 0)
            y = model[name](x, indices, weights)
            assert y.shape == x.shape
            if y.requires_grad:
                y.square().sum().backward()
        total += tokens
    core.barrier(mesh.dp)
    return total


def test_ranks_that_route_differently_never_hang() -> None:
    assert sum(run(4, hostile, 200, timeout_s=120)) > 1000
