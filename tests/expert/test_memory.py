"""Nothing is kept that backward no longer needs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_expert as expert
from nanopar_core.testing import run


def tensors_left(how: str) -> int:
    """Elements of large tensors that exist after backward, beside what there was before, the loss still held."""
    mesh = core.Mesh(dp=2, ep=2)
    model = nn.ModuleList([expert.MoE(expert.TopKRouter(8, 4, 2), expert.Experts(4, 8, 8)) for _ in range(3)])
    expert.parallelize(model, None, mesh.ep)
    x = torch.randn(256, 8, requires_grad=True)

    def step() -> Tensor:
        y = x
        context: dict[str, Any] = {"context_fn": core.keep_communicated} if how == "kept" else {}
        for moe in model:
            y = y + (moe(y) if how == "" else checkpoint(moe, y, use_reentrant=False, **context))
        loss = y.square().sum()
        loss.backward()
        return loss

    def large() -> int:
        gc.collect()
        found = {id(o.untyped_storage()): o.numel() for o in gc.get_objects() if isinstance(o, Tensor)}
        return sum(count for count in found.values() if count >= 256 * 8)

    step()
    before = large()
    loss = step()
    after = large()
    assert loss.isfinite()
    return after - before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["", "recomputed", "kept"])
def test_nothing_is_left_after_backward(how: str) -> None:
    assert run(2, tensors_left, how) == [0, 0]
