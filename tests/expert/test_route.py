"""Capacity, against a reference written by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanopar_core as core
import nanopar_expert as expert
from nanopar_core.testing import assert_parity, run

EXPERTS, WIDTH, TOKENS, TOP_K = 4, 3, 6, 2


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random)
    indices = (torch.rand(TOKENS, EXPERTS, generator=random) + torch.tensor([0.8, 0.4, 0, 0])).topk(TOP_K, 1).indices
    weights = torch.rand(TOKENS, TOP_K, dtype=torch.float64, generator=random)
    return x.requires_grad_(), indices, weights.requires_grad_()


def by_hand(factor: float | None, chunks: int) -> list[dict[str, Any]]:
    """Token by token: an expert takes the first ones of each rank (and chunk), up to its capacity."""
    torch.manual_seed(0)
    experts = expert.Experts(EXPERTS, WIDTH, 4).double()
    results, dropped = [], []
    for rank in range(2):
        x, indices, weights = inputs(rank)
        rows, left_out = [], torch.zeros(EXPERTS, dtype=torch.int64)
        for part in torch.arange(TOKENS).tensor_split(chunks):
            taken = [0] * EXPERTS
            most = TOKENS * TOP_K if factor is None else max(1, -int(-factor * part.numel() * TOP_K // EXPERTS))
            for token in part.tolist():
                total = torch.zeros(WIDTH, dtype=torch.float64)
                for place, number in enumerate(indices[token].tolist()):
                    if taken[number] < most:
                        gate, up = (experts.gate_up_proj[number] @ x[token]).chunk(2)
                        hidden = torch.nn.functional.silu(gate) * up
                        total = total + weights[token, place] * (experts.down_proj[number] @ hidden)
                        taken[number] += 1
                    else:
                        left_out[number] += 1
                rows.append(total)
        y = torch.stack(rows)
        y.sin().sum().backward()
        results.append({"outputs": {"y": y.detach()}, "gradients": {"x": x.grad, "weights": weights.grad}})
        dropped.append(left_out.tolist())
    whole = {name: parameter.grad for name, parameter in experts.named_parameters()}
    for result, left_out in zip(results, dropped, strict=True):
        result["gradients"] |= whole
        result["dropped"] = left_out
    return results


def on_this_rank(factor: float | None, pads: bool, chunks: int, size: int) -> dict[str, Any]:
    mesh = core.Mesh(dp=2, ep=size)
    torch.manual_seed(0)
    model = expert.MoE(nn.Identity(), expert.Experts(EXPERTS, WIDTH, 4)).double()
    specs = expert.parallelize(
        model, None, mesh.ep, data_axis=mesh.edp, capacity_factor=factor, pads=pads, chunks=chunks
    )
    x, indices, weights = inputs(mesh.dp.rank)
    with core.ledger() as book:
        y = model.experts(x, indices, weights)
    counted = [record for record in book.records if record.label.endswith("counts")]
    assert len(counted) == (0 if pads or size == 1 else 1)
    y.sin().sum().backward()
    from nanopar_core.sharding import merge_state_dict

    parts = {f"experts.{name}": core.all_reduce(p.grad, mesh.edp) for name, p in model.experts.named_parameters()}  # type: ignore[type-var]
    gradients = {name.removeprefix("experts."): value for name, value in merge_state_dict(parts, specs).items()}  # type: ignore[arg-type]
    dropped = next(iter(expert.dispatchers_of(model).values())).dropped if expert.dispatchers_of(model) else None
    return {
        "outputs": {"y": y.detach()},
        "gradients": {"x": x.grad, "weights": weights.grad, **gradients},
        "dropped": [0] * EXPERTS if dropped is None else dropped.tolist(),
    }


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("factor", "pads", "chunks"),
    [
        (None, False, 1),
        (1.0, False, 1),
        (1.0, True, 1),
        (0.5, False, 2),
        (0.4, True, 3),
        (0.01, False, 1),
        (9.0, True, 1),
    ],
)
def test_capacity(factor: float | None, pads: bool, chunks: int, size: int) -> None:
    found = run(2, on_this_rank, factor, pads, chunks, size)
    for right, here in zip(by_hand(factor, chunks), found, strict=True):
        assert here.pop("dropped") == right.pop("dropped")
        assert_parity(right, here)
    if factor == 0.01:
        assert sum(by_hand(factor, chunks)[0]["dropped"]) > 4


# ------------------------------------------------------------------------------------------------------------ errors


def axis(size: int, ranks: int = 0) -> core.Axis:
    groups = tuple(tuple(range(first, first + size)) for first in range(0, ranks or size, size))
    return core.Axis("ep", size, 0, None, groups, communicates=False)


def moe() -> expert.MoE:
    return expert.MoE(expert.TopKRouter(4, 6, 2), expert.Experts(6, 4, 4))


class Gains(expert.Experts):
    def __init__(self) -> None:
        super().__init__(6, 4, 4)
        self.register_buffer("gain", torch.ones(6))


def twins(what: str) -> nn.Module:
    pair = nn.ModuleDict({"a": moe(), "b": moe()})
    if what == "module":
        pair["b"].experts = pair["a"].experts  # type: ignore[index]
    else:
        pair["b"].experts.down_proj = pair["a"].experts.down_proj  # type: ignore[index,union-attr]
    return pair


def hooked() -> nn.Module:
    model = moe()
    model.experts.register_forward_hook(lambda *_: None)
    return model


class OneBias(expert.Experts):
    def __init__(self) -> None:
        super().__init__(6, 4, 4)
        self.bias = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("model", "plan", "options", "message"),
    [
        (moe(), None, {"axis": axis(4)}, "experts has 6 experts, which 4 ranks of axis ep do not divide"),
        (
            moe(),
            None,
            {"axis": axis(2, 4)},
            "axis ep has 2 of the job's 4 ranks, so others have the same experts: give",
        ),
        (moe(), {"experts": "colwise"}, {}, r"plan\['experts'\]: unknown style 'colwise'; there are ep_dispatch"),
        (moe(), {"experts": "ep_dispatch_experts"}, {}, "experts.gate_up_proj belongs to experts .* not grouped_gemm"),
        (
            moe(),
            {"router.weight": "grouped_gemm"},
            {},
            "router.weight is grouped_gemm by plan, but belongs to no module",
        ),
        (moe(), {"layers.*.experts": "ep_dispatch_experts"}, {}, "matches no module or parameter of MoE"),
        (moe(), None, {"chunks": 0}, "chunks must be at least 1, not 0"),
        (moe(), None, {"pads": True}, "pads=True needs a capacity_factor"),
        (moe(), None, {"capacity_factor": -1.0}, "capacity_factor must be above 0, not -1.0"),
        (nn.Linear(2, 2), None, {}, "Linear carries no expert-parallel plan: write one"),
        (twins("module"), None, {}, "a.experts.gate_up_proj and b.experts.gate_up_proj are one parameter: tied"),
        (twins("parameter"), None, {}, "a.experts.down_proj and b.experts.down_proj are one parameter: tied experts"),
        (hooked(), None, {"chunks": 2}, "experts has hooks, which with chunks would run for the last one only"),
        (expert.MoE(nn.Identity(), Gains()), None, {}, "buffer experts.gain seems to have a row for each expert"),
        (moe(), None, {"data_axis": axis(2)}, "data_axis ep has several ranks of axis ep, whose experts differ"),
        (moe(), None, {"tensor_axis": axis(2), "token_axis": axis(2)}, "tensor_axis and token_axis: ranks that are"),
        (expert.MoE(nn.Identity(), OneBias()), None, {}, "experts.bias belongs to experts that are to be divided"),
        (
            expert.MoE(nn.Identity(), expert.Experts(4, 4, 3)),
            None,
            {"tensor_axis": axis(2), "data_axis": axis(1), "axis": axis(1)},
            "the experts of experts are 3 wide, which 2 ranks of axis ep do not divide",
        ),
    ],
)
def test_bad_plans(model: nn.Module, plan: dict[str, str] | None, options: dict[str, Any], message: str) -> None:
    before = {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        expert.parallelize(model, plan, options.pop("axis", axis(2)), **options)
    assert {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()} == before


def twice() -> None:
    mesh, model = core.Mesh(dp=2, ep=2), moe()
    expert.parallelize(model, None, mesh.ep)
    expert.parallelize(model, None, mesh.ep)


def test_experts_are_divided_once() -> None:
    with pytest.raises(ValueError, match="the experts of experts are divided already"):
        run(2, twice)


def odd_calls() -> dict[str, Any]:
    """An index that is no expert's; pads where a call's tokens are shared out unevenly."""
    mesh = core.Mesh(tp=2, ep=2, etp=1)
    found = {}
    for name, options in (("plain", {}), ("pads", {"capacity_factor": 4.0, "pads": True, "chunks": 2})):
        torch.manual_seed(0)
        model = expert.MoE(nn.Identity(), expert.Experts(EXPERTS, WIDTH, 4)).double()
        expert.parallelize(model, None, mesh.ep, data_axis=mesh.edp, token_axis=mesh.tp, **options)  # type: ignore[arg-type]
        x, indices, weights = inputs(0)
        indices[1, 0], indices[2, 1] = -1, EXPERTS
        found[name] = model.experts(x[:5], indices[:5], weights[:5]).detach()
    return {"outputs": found}


def test_indices_of_no_expert_and_uneven_shares() -> None:
    torch.manual_seed(0)
    experts = expert.Experts(EXPERTS, WIDTH, 4).double()
    x, indices, weights = inputs(0)
    weights = weights.detach().clone()
    weights[1, 0] = weights[2, 1] = 0.0
    right = experts(x[:5], indices[:5], weights[:5]).detach()
    assert_parity({"outputs": {"plain": right, "pads": right}}, run(2, odd_calls), axes={"tp": 2})


def test_experts_called_with_the_wrong_shapes() -> None:
    model = moe()
    expert.parallelize(model, None, core.Mesh().ep, capacity_factor=2.0)
    with pytest.raises(
        ValueError, match=r"indices \[T, k\] and weights \[T, k\], not \[2, 3, 4\], \[2, 1\] and \[2, 2\]"
    ):
        model.experts(torch.ones(2, 3, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 2))
