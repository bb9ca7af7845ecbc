"""Divided layers under autocast compute in its dtype, as torch's own do; gradients keep the parameters' dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tensor.test_parity import OWN_PLAN, Own, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.testing import assert_parity, run


def step(model: nn.Module) -> dict[str, Any]:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens(0))
    assert logits.dtype is torch.bfloat16
    logits.float().sin().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient.dtype is torch.float32 for gradient in gradients.values() if gradient is not None)
    return {"outputs": {"logits": logits.detach().float()}, "gradients": gradients}


def on_this_rank(sequence: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, axis = Own(), core.Mesh(tp=2).tp
    specs = tensor.parallelize(model, OWN_PLAN, axis, sequence=sequence)
    found = step(model)
    for name, gradient in found["gradients"].items():
        for over in specs.get(name, core.ParamSpec()).grad_sum:
            core.all_reduce(gradient, over, out=gradient)
    return {**found, "gradients": tensor.merge_state_dict(found["gradients"], specs)}


@pytest.mark.parametrize("sequence", [False, True])
def test_autocast(sequence: bool) -> None:
    torch.manual_seed(0)
    reference = step(Own())
    assert_parity(reference, run(2, on_this_rank, sequence), axes={"tp": 2}, rtol=0.03, floor=0.05)


def attention_under_autocast(method: str) -> tuple[Tensor, str]:
    axis = core.Mesh(cp=2).cp
    q, k, v = (tensor.split_sequence(x, axis, dim=2).requires_grad_() for x in queries_keys_values())
    with torch.autocast("cpu", torch.bfloat16):
        with core.ledger() as book:
            out = tensor.ContextAttention(axis, method)(q, k, v)
        out.float().sin().sum().backward()
    sent = {record.dtype for record in book.records}
    whole = torch.cat([tensor.merge_sequence(x.float(), axis, 16, dim=2) for x in (out, q.grad, k.grad, v.grad)], 1)
    return whole, " ".join([str(out.dtype), *sorted(sent)])


def queries_keys_values() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, 16, 8) for heads in (4, 2, 2))


@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
def test_context_attention_computes_and_sends_in_the_dtype_of_autocast(method: str) -> None:
    q, k, v = (x.requires_grad_() for x in queries_keys_values())
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.sin().sum().backward()
    right = torch.cat([out, q.grad, k.grad, v.grad], 1)  # type: ignore[list-item]
    for found, dtypes in run(2, attention_under_autocast, method):
        assert (found - right).abs().max() < 0.06
        assert dtypes == "torch.bfloat16 bfloat16"
