"""Stacked experts against a loop over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import nanopar_expert as expert
from nanopar_core.testing import assert_parity


def one_by_one(experts: expert.Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for number in range(experts.down_proj.shape[0]):
        tokens, places = (indices == number).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], experts.gate_up_proj[number]).chunk(2, 1)
        out = F.linear(F.silu(gate) * up, experts.down_proj[number]) * weights[tokens, places, None]
        y = y.index_add(0, tokens, out)
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "width"), [(16, 24), (5, 7)])
@pytest.mark.parametrize(("tokens", "missing"), [(33, False), (33, True), (1, False), (0, False)])
def test_stacked_experts(dtype: torch.dtype, hidden: int, width: int, tokens: int, missing: bool) -> None:
    results = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        experts = expert.Experts(6, hidden, width).to(dtype)
        x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
        weights = torch.rand(tokens, 2).to(dtype).requires_grad_()
        indices = torch.rand(tokens, 5).topk(2, 1).indices  # the last expert has no token
        if missing:
            indices[::3, 1] = 6  # no expert
        y = one_by_one(experts, x, indices, weights) if by_hand else experts(x, indices, weights)
        y.square().sum().backward()
        leaves = {"x": x, "weights": weights, **dict(experts.named_parameters())}
        gradients = {name: (torch.zeros_like(p) if p.grad is None else p.grad) for name, p in leaves.items()}
        results.append({"outputs": {"y": y.detach()}, "gradients": gradients})
        if not by_hand:
            assert all(parameter.grad is not None for parameter in experts.parameters())
    rtol = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert_parity(results[0], results[1], rtol=rtol, floor=1e-2)


def test_under_autocast() -> None:
    torch.manual_seed(0)
    experts, x = expert.Experts(4, 16, 16), torch.randn(9, 16)
    indices, weights = torch.rand(9, 4).topk(2, 1).indices, torch.rand(9, 2)
    plain = experts(x, indices, weights)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, indices, weights)
    assert y.dtype is torch.float32
    assert 0 < (y - plain).abs().max() < 0.05


def test_a_dense_mlp_becomes_experts() -> None:
    torch.manual_seed(0)
    gate, up, down, x = torch.randn(7, 5), torch.randn(7, 5), torch.randn(5, 7), torch.randn(11, 5)
    moe = expert.MoE(expert.TopKRouter(5, 4, 2), expert.Experts.from_dense(gate, up, down, 4))
    right = F.linear(F.silu(x @ gate.T) * (x @ up.T), down)
    torch.testing.assert_close(moe(x), right)
    assert [list(p.shape) for p in moe.experts.parameters()] == [[4, 14, 5], [4, 5, 7]]
