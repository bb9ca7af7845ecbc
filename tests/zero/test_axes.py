"""Over which ranks gradients and norm are summed: specs of other strategies, two data axes, foreign groups."""

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from tests.zero.cases import Case, build, gradients_of, pairwise, reference, train, weights_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run, train_plainly
from nanopar_core.verify import portable

pytestmark = pytest.mark.long

# ------------------------------------------------------------------------------------------- other kinds of data axis


def on_another_axis(cases: Sequence[Case], kind: str) -> list[dict[str, Any]]:
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
    results = []
    for case in cases:
        model = build(case, seed=rank)
        optimizer = case.shard(model, **options)
        results.append(train(model, optimizer, case, core.Mesh(dp=size).dp))
        optimizer.close()
    return results


AXES = {
    "process group": {"dp": 2},
    "device mesh": {"dp": 2},
    "replicate": {"dp_replicate": 2, "dp": 2},
    "flattened": {"dp": 2, "cp": 2},
}


# Models in which ranks use different layers, or a layer is recomputed.
CASES = pairwise(
    model=["mlp", "second skipped", "blocks recomputed"],
    stage=[0, 1, 2, 3],
    reduce=["mean", "sum"],
    micro_batches=[1, 2],
    no_sync=[True, False],
    bucket_bytes=[500],
    max_norm=[0.1],
    small_units=[True],
)


@pytest.mark.parametrize("kind", AXES)
def test_kinds_of_data_axis(kind: str) -> None:
    by_rank = run(prod(AXES[kind].values()), on_another_axis, CASES, kind)
    for number, case in enumerate(CASES):
        results = [results[number] for results in by_rank]
        assert_parity(reference(case), results, axes=AXES[kind], micro_batches=case.micro_batches)


# ------------------------------------------------------------------------- experts, partial sums, divided parameters


class Whole(nn.Module):
    """Shared weights, the weights of both experts one after the other, a norm, and a weight that may be divided."""

    def __init__(self, halves: int) -> None:
        super().__init__()
        self.shared = nn.Parameter(value_of("shared"))
        self.expert = nn.Parameter(torch.cat([value_of("expert0"), value_of("expert1")]))
        self.norm = nn.Parameter(value_of("norm"))
        self.piece = nn.Parameter(value_of("whole")[: 3 * halves].clone())


class Divided(nn.Module):
    """What a rank holds of it: shared weights, its expert, its half of a divided weight."""

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


def loss_of_whole(model: Whole, x: Tensor, expert: int, divisor: int) -> Tensor:
    """The same for one row and all pieces of the weights together."""
    product = x * model.shared * model.expert.chunk(2)[expert]
    of_pieces = sum((model.norm.exp() * half).sum() for half in model.piece.split(3))
    return (product.sum() + of_pieces + model.piece.cos().sum()) / divisor


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def gathered(tensors: dict[str, Tensor], divided: str, axis: core.Axis) -> dict[str, Tensor]:
    """Copies, the divided parameter's put together over the axis."""
    return {name: core.all_gather(t, axis) if name == divided else t.clone() for name, t in tensors.items()}


STEPS = [1, 3]  # the first step alone says best what is wrong, if something is
# reduce, bucket_bytes, stage; in stage 3 all parameters are the root's, in buckets by their reductions
WAYS = [("mean", 1, 0), ("sum", 10**6, 0), ("mean", 10**6, 1), ("sum", 1, 2), ("mean", 1, 3), ("sum", 10**6, 3)]


def expert_parallel(steps: int, reduce: str, bucket_bytes: int, stage: int) -> dict[str, Any]:
    mesh = core.Mesh(dp=4, ep=2)
    model = Divided(mesh.ep.rank, half=0)
    with torch.no_grad():  # only the first rank that holds a parameter has the right values
        if mesh.dp.rank > 0:
            model.shared.zero_()
        if mesh.edp.rank > 0:
            model.expert.zero_()
    specs = {"expert": core.ParamSpec(shards=(core.Shard(mesh.ep, 0),), data_axis=mesh.edp)}
    options = {"specs": specs, "reduce": reduce, "bucket_bytes": bucket_bytes}
    optimizer = zero.shard(model, adam, axis=mesh.dp, stage=stage, **options)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(row_of(mesh.dp.rank, step))
        loss.backward()
        gradients = gradients_of(model, optimizer)
        norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
        losses.append(core.all_reduce(loss.detach(), mesh.dp).item() / (4 if reduce == "mean" else 1))
    return {
        "loss": losses,
        "norm": norms,
        "gradients": gathered(gradients, "expert", mesh.ep),
        "weights": gathered(weights_of(model, optimizer), "expert", mesh.ep),
        "specs": portable(specs),
    }


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("reduce", "bucket_bytes", "stage"), WAYS)
def test_an_experts_gradient_is_summed_over_its_own_axis_and_divided_like_all_others(
    reduce: str, bucket_bytes: int, stage: int, steps: int
) -> None:
    divisor = 4 if reduce == "mean" else 1
    batches = [[(row_of(rank, step), rank % 2, divisor) for rank in range(4)] for step in range(steps)]
    expected = train_plainly(Whole(halves=1), batches, loss_of_whole, adam, max_norm=1.0)
    results = run(4, expert_parallel, steps, reduce, bucket_bytes, stage)
    specs, *_ = [result.pop("specs") for result in results]
    assert_parity(expected, results, specs, axes={"dp": 4, "ep": 2})


def tensor_parallel(steps: int, reduce: str, bucket_bytes: int, stage: int) -> dict[str, Any]:
    mesh = core.Mesh(dp=2, tp=2)
    model = Divided(expert=0, half=mesh.tp.rank)
    specs = {
        "piece": core.ParamSpec(shards=(core.Shard(mesh.tp, 0),)),
        "norm": core.ParamSpec(grad_sum=(mesh.tp,)),
    }
    options = {"specs": specs, "reduce": reduce, "bucket_bytes": bucket_bytes}
    optimizer = zero.shard(model, adam, axis=mesh.dp, stage=stage, **options)
    norms, gradients, sent = [], {}, set()
    for step in range(steps):
        optimizer.zero_grad()
        with core.ledger() as book:
            for micro in range(2):  # both are reduced: the sum of the first must count once
                (model(row_of(mesh.dp.rank, step + 100 * micro)) / 2).backward()
            norms.append(optimizer.clip_grad_norm_(math.inf).item())
        gradients = gradients_of(model, optimizer)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        sent = {f"{record.label} over {record.axis}" for record in book.records}
    return {
        "norm": norms,
        "gradients": gathered(gradients, "piece", mesh.tp),
        "weights": gathered(weights_of(model, optimizer), "piece", mesh.tp),
        "specs": portable(specs),
        "sent": sent,
    }


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("reduce", "bucket_bytes", "stage"), WAYS)
def test_partial_sums_are_added_and_divided_parameters_counted_once_in_the_norm(
    reduce: str, bucket_bytes: int, stage: int, steps: int
) -> None:
    # Shared weights see the same row on both tensor ranks, whose gradients are copies; norm's are parts.
    divisor = 2 * (2 if reduce == "mean" else 1)
    rows = [[row_of(data, step + 100 * micro) for data in range(2) for micro in range(2)] for step in range(steps)]
    batches = [[(row, 0, divisor) for row in of_step] for of_step in rows]
    expected = train_plainly(Whole(halves=2), batches, loss_of_whole, adam, max_norm=1.0)
    for name in ("weights", "gradients"):
        expected[name]["expert"] = expected[name]["expert"][:3]  # all ranks have the first expert alone
    del expected["loss"]  # of which each tensor rank has its part
    results = run(4, tensor_parallel, steps, reduce, bucket_bytes, stage)
    specs, *_ = [result.pop("specs") for result in results]
    sent = [result.pop("sent") for result in results]
    assert_parity(expected, results, specs, axes={"dp": 2, "tp": 2}, micro_batches=2)
    always = {"gradients over dp", "gradients over tp", "norm over tp"}
    more = [set(), {"norm over dp"}, {"norm over dp"}, {"norm over dp", "parameters over dp"}]
    assert sent == [always | more[stage]] * 4


class PipelineStage(nn.Module):
    """A unit with a weight that the other stage has too, and weights of its own, of another size on each stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        block = nn.Module()
        block.before = nn.Parameter(torch.zeros(5 + 40 * stage).double())
        block.tied = nn.Parameter(torch.ones(()).double())
        self.blocks = nn.ModuleList([block])
        block.forward = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        block = self.blocks[0]
        return block.tied * x + (block.before * x).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def tied_over_two_stages(stage: int, micro_batches: int) -> dict[str, Any]:
    mesh = core.Mesh(pp=2, dp=2)
    model = PipelineStage(mesh.pp.rank)
    specs = {"blocks.0.tied": core.ParamSpec(grad_sum=(mesh.pp,))}
    optimizer = zero.shard(
        model, lambda g: torch.optim.SGD(g, lr=0.1), axis=mesh.dp, stage=stage, specs=specs, units=["blocks.*"]
    )
    gradient = torch.tensor([[2.0, 6.0], [10.0, 30.0]])[mesh.pp.rank, mesh.dp.rank].double()
    for _ in range(micro_batches):
        model(gradient / micro_batches).backward()
    name = "blocks.0.tied"
    found = gradients_of(model, optimizer)[name]
    optimizer.step()
    return {"gradients": {name: found}, "weights": {name: weights_of(model, optimizer)[name]}}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_weight_tied_over_two_stages_gets_all_four_gradients(stage: int, micro_batches: int) -> None:
    name, value = "blocks.0.tied", torch.tensor(24.0).double()  # (2 + 10 + 6 + 30) / 2
    expected = {"gradients": {name: value}, "weights": {name: 1 - 0.1 * value}}
    results = run(4, tied_over_two_stages, stage, micro_batches)
    assert_parity(expected, results, axes={"pp": 2, "dp": 2}, micro_batches=micro_batches)


def halves_of_a_gradient(cases: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """A weight of four elements whose halves are on two tensor ranks, in each stage."""
    mesh = core.Mesh(tp=2)
    results = []
    for stage, max_norm in cases:
        model = nn.ParameterList([nn.Parameter(torch.zeros(2).double())])
        specs = {"0": core.ParamSpec(shards=(core.Shard(mesh.tp, 0),))}
        optimizer = zero.shard(model, lambda g: torch.optim.SGD(g, lr=1.0), axis=mesh.dp, stage=stage, specs=specs)
        (model[0] * torch.tensor([[3.0, 0.0], [0.0, 4.0]])[mesh.tp.rank]).sum().backward()
        norm = optimizer.clip_grad_norm_(max_norm).item()
        results.append(
            {"norm": norm, "gradients": {"0": core.all_gather(gradients_of(model, optimizer)["0"], mesh.tp)}}
        )
    return results


def test_the_norm_of_a_divided_parameter_is_that_of_the_whole() -> None:
    cases = [(stage, max_norm) for stage in (0, 1, 2) for max_norm in (1.0, 10.0)]
    first, second = run(2, halves_of_a_gradient, cases)
    for (_, max_norm), *results in zip(cases, first, second, strict=True):
        gradient = torch.tensor([3.0, 0.0, 0.0, 4.0]).double() / (5 if max_norm == 1.0 else 1)
        assert_parity({"norm": 5.0, "gradients": {"0": gradient}}, results, axes={"tp": 2}, rtol=1e-6)
