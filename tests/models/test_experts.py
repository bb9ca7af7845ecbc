"""Experts: the grouped kernel, the loop and a plain per-token definition agree; idle experts have a zero gradient."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import nanopar_models as models
from nanopar_core.testing import assert_parity
from nanopar_models import grouped
from nanopar_models.experts import Experts


def make(dtype: torch.dtype, hidden: int = 32, width: int = 16, experts: int = 4) -> Experts:
    config = models.PhiMoEConfig.preset("nano", hidden_size=hidden, intermediate_size=width, num_local_experts=experts)
    module = Experts(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def make_input(dtype: torch.dtype, hidden: int = 32, tokens: int = 23, used: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    indices = torch.rand(tokens, used, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(tokens, 2, generator=generator).to(dtype).requires_grad_()
    return x, indices, weights


def by_definition(module: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    outputs = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[0])
        for slot in range(2):
            expert = int(indices[token, slot])
            gate, up = (module.gate_up_proj[expert] @ x[token]).chunk(2)
            total = total + weights[token, slot] * (module.down_proj[expert] @ (F.silu(gate) * up))
        outputs.append(total)
    return torch.stack(outputs)


def results(module, x, indices, weights, forward) -> dict[str, Any]:
    module.zero_grad()
    x.grad = weights.grad = None
    out = forward(x, indices, weights)
    (out * torch.linspace(-1, 1, out.numel()).to(out.dtype).view_as(out)).sum().backward()
    of_parameters = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"outputs": out.detach(), "gradients": {"x": x.grad, "weights": weights.grad, **of_parameters}}


# Sizes that are no multiple of 16 bytes and float64 take the loop, the others the kernel.
@pytest.mark.parametrize(
    ("dtype", "hidden", "width", "kernel"),
    [(torch.float32, 32, 16, True), (torch.float32, 30, 17, False), (torch.float64, 32, 16, False)],
)
def test_equal_to_the_definition(dtype, hidden, width, kernel):
    module = make(dtype, hidden, width)
    data = make_input(dtype, hidden)
    assert grouped.grouped_mm_serves(data[0], module.gate_up_proj) is kernel
    want = results(module, *data, lambda *args: by_definition(module, *args))
    got = results(module, *data, module)
    assert_parity(want, got, rtol=2e-14 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_and_loop_agree(dtype, monkeypatch):
    module = make(dtype)
    data = make_input(dtype)
    kernel = results(module, *data, module)
    monkeypatch.setattr(grouped, "grouped_mm_serves", lambda *_: False)
    loop = results(module, *data, module)
    assert_parity(kernel, loop, rtol=5e-7 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_idle_experts_have_a_zero_gradient(dtype, tokens):
    module = make(dtype)
    with torch.no_grad():
        module.gate_up_proj[3].fill_(torch.nan)  # nothing of an idle expert may be touched
    got = results(module, *make_input(dtype, tokens=tokens, used=3), module)
    out, gate_up_grad, down_grad = got["outputs"], *(got["gradients"][name] for name in ("gate_up_proj", "down_proj"))
    assert out.shape == (tokens, 32) and out.isfinite().all()
    assert (gate_up_grad[3] == 0).all() and (down_grad[3] == 0).all()
    assert gate_up_grad.isfinite().all() and (tokens == 0 or gate_up_grad[:3].abs().max() > 0)


def test_all_tokens_to_the_same_experts():
    module = make(torch.float32)
    x, indices, weights = make_input(torch.float32)
    indices = torch.tensor([[2, 1]]).expand(x.shape[0], -1)
    want = results(module, x, indices, weights, lambda *args: by_definition(module, *args))
    assert_parity(want, results(module, x, indices, weights, module), rtol=2e-6)


def test_order():
    order = grouped.sort_by_expert(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    assert order.pairs.tolist() == [1, 2, 0, 4, 3, 5]  # stable: equal experts keep the tokens' order
    assert order.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert order.ends.tolist() == [2, 2, 4, 6, 6] and order.ends.dtype == torch.int32
    assert order.pairs[order.places.flatten()].tolist() == list(range(6))


def test_autocast_computes_in_its_dtype():
    module = make(torch.float32)
    x, indices, weights = make_input(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x, indices, weights)
    assert got.dtype == torch.float32
    want = make(torch.bfloat16)(x.bfloat16(), indices, weights.bfloat16()).float()
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    got.sum().backward()
    assert module.gate_up_proj.grad.dtype == torch.float32


def test_shapes_without_data():
    """On the meta device, where sizes per expert do not exist: what a memory planner does."""
    model = models.PhiMoE(dataclasses.replace(models.PhiMoEConfig.preset("nano"), vocab_size=32), device="meta")
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    out = model(ids, labels=ids)
    out.loss.backward()
    assert out.logits.shape == (2, 8, 32)
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_in_fake_mode(dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = Experts(models.PhiMoEConfig.preset("nano"))
        weights = {k: torch.empty(v.shape, dtype=dtype, requires_grad=True) for k, v in module.named_parameters()}
        x = torch.empty(10, 128, dtype=dtype, requires_grad=True)
        routing = torch.zeros(10, 2, dtype=torch.long), torch.ones(10, 2, dtype=dtype)
        out = torch.func.functional_call(module, weights, (x, *routing))
        out.sum().backward()
    assert out.shape == x.grad.shape == (10, 128)
    assert all(weight.grad.shape == weight.shape for weight in weights.values())
