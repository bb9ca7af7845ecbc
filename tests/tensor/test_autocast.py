"""Divided layers under autocast compute in its dtype, as torch's own do; gradients keep the parameters' dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tensor.test_parity import OWN_PLAN, Own, tokens
from torch import nn

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
