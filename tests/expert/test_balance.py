"""Balancing: losses that mean the same in every layout, a bias that needs none, and what it does to a real router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_expert as expert
from nanopar_core.testing import assert_parity, run

ROWS, LENGTH, WIDTH, EXPERTS = 4, 6, 5, 8


def net(scores: str = "softmax", bias: bool = False) -> expert.MoE:
    torch.manual_seed(0)
    router = expert.TopKRouter(WIDTH, EXPERTS, 2, scores=scores, bias=bias)
    return expert.MoE(router, expert.Experts(EXPERTS, WIDTH, 4)).double()


def batch() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def formula(moe: expert.MoE, x: Tensor, scores: str, groups: str) -> Tensor:
    """As the papers have it, in the mean over groups that are equally long."""
    logits, _, indices = moe.router(x)
    values = logits.softmax(1) if scores == "softmax" else logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    losses = []
    for one, chosen in zip(values.split(LENGTH), indices.split(LENGTH), strict=True):
        shares = torch.bincount(chosen.flatten(), minlength=EXPERTS).double() / chosen.numel()
        losses.append(EXPERTS * (shares * one.mean(0)).sum())
    if groups != "sequence":
        shares = torch.bincount(indices.flatten(), minlength=EXPERTS).double() / indices.numel()
        losses = [EXPERTS * (shares * values.mean(0)).sum()]
    return 0.5 * torch.stack(losses).mean() + 0.1 * logits.logsumexp(1).square().mean()


def reference(scores: str, groups: str) -> dict[str, Any]:
    moe = net(scores)
    loss = formula(moe, batch(), scores, groups)
    (moe(batch()).sin().mean() + loss).backward()
    return {"loss": [loss.item()], "gradients": {"router": moe.router.weight.grad}}


def on_this_rank(scores: str, per: str, dp: int, cp: int, micro_batches: int, how: str) -> dict[str, Any]:
    mesh, moe, x = core.Mesh(dp=dp, cp=cp), net(scores), batch()
    x = x.chunk(dp)[mesh.dp.rank].chunk(cp, 1)[mesh.cp.rank]
    axis = {"global": mesh.flatten("dp", "cp"), "sequence": mesh.cp if cp > 1 else None, "batch": None}[per]
    balance = expert.BalancingLoss(expert.routers_of(moe), 0.5, z_coefficient=0.1, per=per, axis=axis)
    parts = x.chunk(micro_batches)
    if how == "ids":
        ids = torch.arange(parts[0].shape[0]).repeat_interleave(x.shape[1])
        count = parts[0].shape[0] if cp > 1 else None
        balance.begin_step(tokens=torch.tensor(ROWS * LENGTH), sequences=ids, sequence_count=count, scale=4.0)
    else:
        balance.begin_step(tokens=ROWS * LENGTH, sequence_length=x.shape[1], scale=4.0)
    for part in parts:
        kept: dict[str, Any] = {"context_fn": core.keep_communicated} if how == "recompute" else {}
        y = checkpoint(moe, part, use_reentrant=False, **kept) if "recompute" in how else moe(part)
        (4.0 * y.sin().sum() / batch().numel()).backward()
    everyone = mesh.flatten("dp", "cp")
    assert balance.value is not None
    gradient = core.all_reduce(moe.router.weight.grad, everyone) / 4.0  # type: ignore[type-var]
    return {"loss": [core.all_reduce(balance.value, everyone).item()], "gradients": {"router": gradient}}


@pytest.mark.parametrize(
    ("scores", "per", "dp", "cp", "micro_batches", "how"),
    [
        ("softmax", "sequence", 1, 1, 1, ""),
        ("softmax", "sequence", 2, 1, 2, ""),
        ("sigmoid", "sequence", 2, 1, 1, "ids"),
        ("softmax", "sequence", 1, 2, 4, ""),
        ("softmax", "sequence", 1, 2, 2, "ids"),
        ("sigmoid", "sequence", 2, 1, 1, "plainly recomputed"),
        ("sigmoid", "sequence", 2, 2, 1, "recompute"),
        ("softmax", "global", 2, 1, 1, ""),
        ("sigmoid", "global", 2, 2, 1, "recompute"),
        ("softmax", "batch", 1, 1, 1, ""),
    ],
)
def test_losses_are_those_of_one_process(scores: str, per: str, dp: int, cp: int, micro_batches: int, how: str) -> None:
    found = run(dp * cp, on_this_rank, scores, per, dp, cp, micro_batches, how)
    assert_parity(reference(scores, per), found, axes={"dp": dp, "cp": cp})


def moved_biases(dp: int) -> list[float]:
    mesh, moe = core.Mesh(dp=dp), net(bias=True)
    balancer = expert.BiasBalancer(expert.routers_of(moe), mesh.dp, rate=0.25)
    for _ in range(2):
        for part in batch().chunk(dp)[mesh.dp.rank].split(1):  # micro-batches
            checkpoint(moe, part, use_reentrant=False, context_fn=core.keep_communicated).sum().backward()
        balancer.step()
    return moe.router.bias.tolist()  # type: ignore[union-attr,operator]


def test_biases_move_once_a_step_by_all_ranks_counts() -> None:
    moe = net(bias=True)
    counts = torch.bincount(moe.router(batch())[2].flatten(), minlength=EXPERTS)
    one = 0.25 * (counts.double().mean() - counts).sign()
    moe.router.bias.copy_(one)  # type: ignore[union-attr,operator]
    counts = torch.bincount(moe.router(batch())[2].flatten(), minlength=EXPERTS)
    right = (one + 0.25 * (counts.double().mean() - counts).sign()).tolist()
    assert moved_biases(1) == right
    assert run(2, moved_biases, 2) == [right] * 2


def test_a_bias_balances_a_router_that_favours_two_experts() -> None:
    moe = net("sigmoid", bias=True)
    with torch.no_grad():
        moe.router.weight[:2] += 1.0  # type: ignore[index,operator]
    x = torch.rand(64, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    load = expert.ExpertLoad(expert.routers_of(moe))
    balancer = expert.BiasBalancer(expert.routers_of(moe), rate=0.01)
    worst = []
    for _ in range(150):
        load.clear()
        moe(x)
        [counts] = load.counts().values()
        worst.append((counts.max() / counts.double().mean()).item())
        balancer.step()
    assert worst[0] > 2
    assert max(worst[-10:]) < 1.5


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: expert.BalancingLoss({}, 0.1, per="token"), ValueError, "per must be one of sequence, batch, global"),
        (lambda: expert.BalancingLoss({}, 0.1, per="global"), ValueError, 'per="global" needs an axis to count over'),
        (lambda: expert.BalancingLoss({}, 0.1, per="batch", axis=core.Mesh().dp), ValueError, "counts over no axis"),
        (lambda: expert.BiasBalancer({"a": nn.Linear(2, 2)}), ValueError, "a has no buffer bias to move"),
        (lambda: expert.BiasBalancer(expert.routers_of(net(bias=True).bfloat16())), ValueError, "small steps are lost"),
        (lambda: shared_sequences(), ValueError, "need sequence_count, the same on all ranks"),
        (lambda: watched()(batch()), RuntimeError, "call begin_step before the forward passes"),
        (lambda: begun()(batch()), ValueError, "a router has 24 tokens, which are not sequences of 5: give begin_step"),
        (lambda: expert.routers_of(nn.Linear(2, 2)), ValueError, "Linear carries no expert-parallel plan"),
    ],
)
def test_misuse(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def shared_sequences() -> None:
    balance = expert.BalancingLoss(expert.routers_of(net()), 0.1, axis=core.Mesh().cp)
    balance.begin_step(tokens=4, sequences=torch.zeros(4, dtype=torch.int64))


def watched() -> expert.MoE:
    moe = net()
    expert.BalancingLoss(expert.routers_of(moe), 0.1)
    return moe


def begun() -> expert.MoE:
    moe = net()
    expert.BalancingLoss(expert.routers_of(moe), 0.1).begin_step(tokens=24, sequence_length=5)
    return moe
