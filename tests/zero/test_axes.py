"""Over which ranks gradients and norm are summed: specs of other strategies, two data axes, foreign groups."""

from typing import Any

import pytest
import torch
from tests.zero.cases import OPTIMIZERS, Case, build, reference, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run

# ------------------------------------------------------------------------------------------- other kinds of data axis


def on_another_axis(case: Case, kind: str) -> dict[str, Any]:
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    options: dict[str, Any]
    if kind == "process group":
        options = {"axis": torch.distributed.group.WORLD}
    elif kind == "device mesh":
        options = {"axis": init_device_mesh("cpu", (size,), mesh_dim_names=("rows",))}
    elif kind == "replicate":
        mesh = core.Mesh(dp_replicate=2, dp=size // 2)
        options = {"axis": mesh.dp, "replicate": mesh.dp_replicate}
    else:
        mesh = core.Mesh(dp=2, cp=size // 2)
        options = {"axis": mesh.flatten("dp", "cp")}
    model = build(case, seed=rank)
    make = OPTIMIZERS[case.optimizer]
    optimizer = zero.shard(model, make, stage=0, reduce=case.reduce, bucket_bytes=case.bucket_bytes, **options)
    return train(model, optimizer, case, core.Mesh(dp=size).dp)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["process group", "device mesh", "replicate", "flattened"])
def test_kinds_of_data_axis(kind: str, reduce: str) -> None:
    case = Case(reduce=reduce, micro_batches=2, no_sync=reduce == "sum", bucket_bytes=500, max_norm=0.1)
    ranks = 4 if kind in ("replicate", "flattened") else 2
    first, *others = run(ranks, on_another_axis, case, kind)
    assert_parity(reference(case), first)
    for other in others:
        assert_parity(first, other, rtol=0.0)


# ------------------------------------------------------------------------- experts, partial sums, divided parameters


class Divided(nn.Module):
    """What a rank holds of a model: shared weights, its expert, its half of a divided weight."""

    def __init__(self, expert: int, half: int) -> None:
        super().__init__()
        self.shared = nn.Parameter(value_of("shared"))
        self.expert = nn.Parameter(value_of(f"expert{expert}"))
        self.norm = nn.Parameter(value_of("norm"))
        self.piece = nn.Parameter(value_of("whole").chunk(2)[half])

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.shared * self.expert).sum() + (self.norm.exp() * self.piece[:3]).sum() + self.piece.cos().sum()


def value_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + ord(name[-1]))
    return torch.randn(6 if name == "whole" else 3, generator=generator).double()


def row_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


STEPS = 3


def expert_parallel(reduce: str, bucket_bytes: int) -> tuple[int, list[float], dict[str, Tensor], dict[str, Tensor]]:
    mesh = core.Mesh(dp=4, ep=2)
    model = Divided(mesh.ep.rank, half=0)
    with torch.no_grad():  # only the first rank that holds a parameter has the right values
        if mesh.dp.rank > 0:
            model.shared.zero_()
        if mesh.edp.rank > 0:
            model.expert.zero_()
    specs = {"expert": core.ParamSpec(shards=(core.Shard(mesh.ep, 0),), data_axis=mesh.edp)}
    optimizer = zero.shard(model, adam, axis=mesh.dp, stage=0, specs=specs, reduce=reduce, bucket_bytes=bucket_bytes)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(row_of(mesh.dp.rank, step)).backward()
        norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return mesh.ep.rank, norms, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_an_experts_gradient_is_summed_over_its_own_axis_and_divided_like_all_others(
    reduce: str, bucket_bytes: int
) -> None:
    models = [Divided(expert, half=0) for expert in range(2)]
    for name in ("shared", "norm", "piece"):
        setattr(models[1], name, getattr(models[0], name))
    parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
    optimizer, norms = adam(parameters), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = sum(models[rank % 2](row_of(rank, step)) for rank in range(4))
        (total / 4 if reduce == "mean" else total).backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
    results = run(4, expert_parallel, reduce, bucket_bytes)
    assert [result[0] for result in results] == [0, 1, 0, 1]
    for expert, norms_here, gradients, weights in results:
        assert norms_here == pytest.approx(norms, rel=1e-12)
        for name, parameter in models[expert].named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-12)  # clipped by norm + 1e-6


def tensor_parallel(reduce: str, bucket_bytes: int) -> tuple[int, list[float], dict[str, Tensor], list[str]]:
    mesh = core.Mesh(dp=2, tp=2)
    model = Divided(expert=0, half=mesh.tp.rank)
    specs = {
        "piece": core.ParamSpec(shards=(core.Shard(mesh.tp, 0),)),
        "norm": core.ParamSpec(grad_sum=(mesh.tp,)),
    }
    optimizer = zero.shard(model, adam, axis=mesh.dp, stage=0, specs=specs, reduce=reduce, bucket_bytes=bucket_bytes)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with core.ledger() as book:
            for micro in range(2):  # both are reduced: the sum of the first must count once
                (model(row_of(mesh.dp.rank, step + 100 * micro)) / 2).backward()
            norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
    axes = sorted({f"{record.label} over {record.axis}" for record in book.records})
    return mesh.tp.rank, norms, {name: p.detach().clone() for name, p in model.named_parameters()}, axes


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_partial_sums_are_added_and_divided_parameters_counted_once_in_the_norm(reduce: str, bucket_bytes: int) -> None:
    halves = [Divided(expert=0, half=half) for half in range(2)]
    for name in ("shared", "expert", "norm"):
        setattr(halves[1], name, getattr(halves[0], name))
    parameters = list(dict.fromkeys(p for model in halves for p in model.parameters()))
    optimizer, norms = adam(parameters), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for data in range(2):
            for micro in range(2):
                row = row_of(data, step + 100 * micro)
                # Shared weights see the same row on both tensor ranks, whose gradients are copies; norm's are parts.
                total = (row * halves[0].shared * halves[0].expert).sum()
                total = total + sum(
                    (model.norm.exp() * model.piece).sum() + model.piece.cos().sum() for model in halves
                )
                (total / 2 / (2 if reduce == "mean" else 1)).backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
    results = run(4, tensor_parallel, reduce, bucket_bytes)
    assert [result[0] for result in results] == [0, 1, 0, 1]
    for half, norms_here, weights, axes in results:
        assert norms_here == pytest.approx(norms, rel=1e-12)
        assert axes == ["gradients over dp", "gradients over tp", "norm over tp"]
        for name, parameter in halves[half].named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-12)


def half_of_a_gradient(gradients: tuple[tuple[float, float], ...], max_norm: float) -> tuple[float, list[float]]:
    mesh = core.Mesh(tp=2)
    model = nn.ParameterList([nn.Parameter(torch.zeros(2).double())])
    specs = {"0": core.ParamSpec(shards=(core.Shard(mesh.tp, 0),))}
    optimizer = zero.shard(model, lambda g: torch.optim.SGD(g, lr=1.0), axis=mesh.dp, stage=0, specs=specs)
    (model[0] * torch.tensor(gradients[mesh.tp.rank]).double()).sum().backward()
    norm = optimizer.clip_grad_norm_(max_norm).item()
    return norm, model[0].grad.tolist()


def test_the_norm_of_a_divided_parameter_is_that_of_the_whole() -> None:
    first, second = run(2, half_of_a_gradient, ((3.0, 0.0), (0.0, 4.0)), 1.0)
    assert first[0] == second[0] == 5.0
    assert first[1] == pytest.approx([0.6, 0.0], rel=1e-6)
    assert second[1] == pytest.approx([0.0, 0.8], rel=1e-6)
    assert run(2, half_of_a_gradient, ((3.0, 0.0), (0.0, 4.0)), 10.0) == [(5.0, [3.0, 0.0]), (5.0, [0.0, 4.0])]
