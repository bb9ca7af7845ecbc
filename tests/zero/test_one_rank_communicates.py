"""One rank whose axis is told to communicate: the collectives are real, over gloo here and over NCCL where a GPU is.

On a GPU the same steps run where torch refuses every wait of the host for the device, and freed units must be free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.zero.cases import gradients_of, weights_of
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run, train_plainly

STEPS, WIDTH, DEPTH = 5, 64, 6
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(7, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 3)).to(device)


def batch(step: int, device: str) -> Tensor:
    return torch.randn(16, 7, generator=torch.Generator().manual_seed(step)).to(device)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


@contextmanager
def no_waits(device: str) -> Iterator[None]:
    """On a GPU torch raises where the host would wait for the device."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trained(stage: int, device: str) -> dict[str, Any]:
    axis = core.Mesh(always_communicate=True).dp
    model = make_model(device)
    optimizer = zero.shard(model, adamw, axis=axis, stage=stage, bucket_bytes=20_000)
    inputs = [batch(step, device) for step in range(STEPS)]
    losses, norms, gradients = [], [], {}
    with core.ledger() as book:
        for step, x in enumerate(inputs):
            with no_waits(device if step else "cpu"):  # communicators are made in the first step
                loss = loss_of(model, x)
                loss.backward()
            gradients = gradients_of(model, optimizer)
            with no_waits(device if step else "cpu"):
                norms.append(optimizer.clip_grad_norm_(1.0))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        ops = {record.op for record in book.records}
    assert ops == ({"all_reduce"} if stage == 0 else {"reduce_scatter", "all_gather", "all_reduce"})
    weights = weights_of(model, optimizer)
    optimizer.close()
    return {
        "loss": [value.item() for value in losses],
        "norm": [value.item() for value in norms],
        "gradients": gradients,
        "weights": weights,
    }


def plain(device: str) -> dict[str, Any]:
    steps = [[(batch(step, device),)] for step in range(STEPS)]
    return train_plainly(make_model(device), steps, loss_of, adamw, max_norm=1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_stages_over_gloo(stage: int) -> None:
    assert_parity(plain("cpu"), run(1, trained, stage, "cpu"))


@needs_gpu
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_stages_over_nccl_without_a_wait_of_the_host(stage: int) -> None:
    with core.launch(device="cuda"):
        assert_parity(plain("cuda"), trained(stage, "cuda"))


@needs_gpu
def test_a_freed_unit_is_free_at_once() -> None:
    width, depth = 1024, 8
    with core.launch(device="cuda"):
        axis = core.Mesh(always_communicate=True).dp
        model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(width, width)) for _ in range(depth)))).cuda()
        unit_bytes = 4 * (width * width + width)
        optimizer = zero.shard(model, adamw, axis=axis, stage=3)
        x = torch.ones(1, width, device="cuda")
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            model(x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == pytest.approx(before, abs=2**20)
        assert torch.cuda.max_memory_allocated() - before <= 2 * unit_bytes + 2**20  # one runs, one is prefetched
        optimizer.close()
