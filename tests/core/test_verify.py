"""nanopar_core.verify: faults planted into real training on 2 and 4 ranks, each of which must be named rightly."""

from __future__ import annotations

import doctest
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nanopar_core as core
from nanopar_core import testing, verify

pytestmark = pytest.mark.long

Result = dict[str, Any]
Micro = tuple[Tensor, Tensor, Tensor]  # inputs [8, 5], targets [8, 3], and which rows count [8]

MICRO_BATCHES = 3
MAX_NORM = 0.5
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]

# ------------------------------------------------------------- two ranks: data parallelism by hand, a method per part


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def global_batch(step: int) -> list[Micro]:
    """Of 8 rows the first rank's 4 count nearly all, of the second rank's few."""
    generator = torch.Generator().manual_seed(step)
    micros = []
    for number in range(MICRO_BATCHES):
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        counted = torch.tensor([1, 1, 1, number % 2, 1, 0, 0, 0], dtype=torch.float64)
        micros.append((x, y, counted))
    return micros


def share(model: nn.Module, x: Tensor, y: Tensor, counted: Tensor, divisor: float) -> Tensor:
    return ((model(x) - y).square().sum(1) * counted).sum() / divisor


def count(micros: list[Micro]) -> float:
    return float(sum(counted.sum().item() for _, _, counted in micros))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Training:
    """The right one. Masters are copies of their own, as in mixed precision."""

    summed = True  # local losses are divided by the global count and summed; else by the local share of it and averaged

    def __init__(self, axis: core.Axis) -> None:
        self.axis = axis
        self.model = build(seed=axis.rank)
        self.parameters = dict(self.model.named_parameters())
        self.masters = {name: nn.Parameter(value.detach().clone()) for name, value in self.parameters.items()}
        self.optimizer = sgd(list(self.masters.values()))

    def load(self) -> None:
        """All ranks begin with the weights of the first."""
        for name, parameter in self.parameters.items():
            core.broadcast(parameter.data, self.axis)
            self.masters[name].data.copy_(parameter.data)

    def batch(self, step: int) -> list[Micro]:
        rows = slice(4 * self.axis.rank, 4 * self.axis.rank + 4)
        return [(x[rows], y[rows], counted[rows]) for x, y, counted in global_batch(step)]

    def tokens(self, micros: list[Micro]) -> float:
        return core.all_reduce(torch.tensor(count(micros)), self.axis).item()

    def divisor(self, micros: list[Micro]) -> float:
        return self.tokens(micros) / (1 if self.summed else self.axis.size)

    def loss(self, micro: Micro, divisor: float) -> Tensor:
        return share(self.model, *micro, divisor)

    def reduce(self, _name: str, gradient: Tensor) -> Tensor:
        total = core.all_reduce(gradient, self.axis)
        return total if self.summed else total / self.axis.size

    def norm(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()

    def reported(self, loss: Tensor) -> float:
        return core.all_reduce(loss, self.axis).item() / (1 if self.summed else self.axis.size)

    def update(self, _step: int, gradients: dict[str, Tensor], factor: float) -> None:
        for name, master in self.masters.items():
            master.grad = gradients[name] * factor
        self.optimizer.step()
        for name, master in self.masters.items():
            self.parameters[name].data.copy_(master.data)

    def local_gradients(self, micros: list[Micro]) -> tuple[Tensor, dict[str, Tensor]]:
        divisor = self.divisor(micros)
        self.model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for micro in micros:
            part = self.loss(micro, divisor)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        return loss, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}

    def run(self, steps: int) -> Result:
        self.load()
        result: Result = {"loss": [], "norm": [], "tokens": []}
        for step in range(steps):
            micros = self.batch(step)
            loss, local = self.local_gradients(micros)
            gradients = {name: self.reduce(name, gradient) for name, gradient in local.items()}
            norm = self.norm(gradients)
            self.update(step, gradients, min(1.0, MAX_NORM / (norm.item() + 1e-6)))
            result["loss"].append(self.reported(loss))
            result["norm"].append(norm.item())
            result["tokens"].append(self.tokens(micros))
            result["gradients"] = {name: gradient.clone() for name, gradient in gradients.items()}
        return result | {"weights": {name: parameter.detach().clone() for name, parameter in self.parameters.items()}}


class Averaged(Training):
    summed = False


class NotReduced(Training):
    def reduce(self, _name: str, gradient: Tensor) -> Tensor:
        return gradient


class NotReducedAveraged(NotReduced):
    summed = False


class MeanForSum(Training):
    def reduce(self, name: str, gradient: Tensor) -> Tensor:
        return super().reduce(name, gradient) / self.axis.size


class SumForMean(Averaged):
    def reduce(self, _name: str, gradient: Tensor) -> Tensor:
        return core.all_reduce(gradient, self.axis)


class OneBucketNotReduced(Training):
    def reduce(self, name: str, gradient: Tensor) -> Tensor:
        return gradient if name.startswith("2.") else super().reduce(name, gradient)


class OneBucketAveraged(Training):
    def reduce(self, name: str, gradient: Tensor) -> Tensor:
        return super().reduce(name, gradient) / (self.axis.size if name.startswith("2.") else 1)


class ConstantDivisor(Training):
    """Accumulation over 4 micro-batches was planned; the last window of an epoch has 3."""

    def divisor(self, micros: list[Micro]) -> float:
        return super().divisor(micros) * 4 / MICRO_BATCHES


class MicroBatchDropped(Training):
    def batch(self, step: int) -> list[Micro]:
        return super().batch(step)[:-1]


class MeanOfMeans(Averaged):
    def divisor(self, micros: list[Micro]) -> float:
        return count(micros)


class ShardNorm(Training):
    """As if each rank kept the gradients of its half only, and forgot to ask the others for theirs."""

    def norm(self, gradients: dict[str, Tensor]) -> Tensor:
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
        return flat.chunk(self.axis.size)[self.axis.rank].norm()


class NormOfCopies(Training):
    def norm(self, gradients: dict[str, Tensor]) -> Tensor:
        return core.all_reduce(super().norm(gradients).square(), self.axis).sqrt()


class NormBeforeReduction(Training):
    def reduce(self, name: str, gradient: Tensor) -> Tensor:
        self.before = {**getattr(self, "before", {}), name: gradient.clone()}
        return super().reduce(name, gradient)

    def norm(self, _gradients: dict[str, Tensor]) -> Tensor:
        return super().norm(self.before)


class StaleMasters(Training):
    """Weights are loaded into the model after the masters were made from other ones."""

    def load(self) -> None:
        for name, value in build(seed=7).named_parameters():
            self.masters[name].data.copy_(value.data)
        self.model.load_state_dict(build(seed=0).state_dict())


class Detached(Training):
    def loss(self, micro: Micro, divisor: float) -> Tensor:
        x, y, counted = micro
        weights = dict(self.parameters) | {"0.bias": self.parameters["0.bias"].detach()}  # type: ignore[dict-item]
        output = torch.func.functional_call(self.model, weights, (x,))
        return ((output - y).square().sum(1) * counted).sum() / divisor


class NotBroadcast(Training):
    def load(self) -> None:
        pass


class StepSkipped(Training):
    def update(self, step: int, gradients: dict[str, Tensor], factor: float) -> None:
        if self.axis.rank == 0 or step > 0:
            super().update(step, gradients, factor)


class NotClipped(Training):
    def update(self, step: int, gradients: dict[str, Tensor], _factor: float) -> None:
        super().update(step, gradients, 1.0)


class LossNotReduced(Training):
    def reported(self, loss: Tensor) -> float:
        return loss.item()


class LossSummed(Averaged):
    def reported(self, loss: Tensor) -> float:
        return super().reported(loss) * self.axis.size


class RowsMixedUp(Training):
    """After the step each rank gives its half of the first weight to the others, who put the halves in wrong order."""

    def update(self, step: int, gradients: dict[str, Tensor], factor: float) -> None:
        super().update(step, gradients, factor)
        weight = self.parameters["0.weight"].data
        parts = core.all_gather(weight.chunk(2)[self.axis.rank].contiguous(), self.axis).chunk(2)
        weight.copy_(torch.cat(parts[::-1]))


class WrongSign(Training):
    def reduce(self, name: str, gradient: Tensor) -> Tensor:
        return super().reduce(name, gradient) * (-1 if name == "2.bias" else 1)


class OwnArithmetic(Training):
    """One rank rounds in another way."""

    def reduce(self, name: str, gradient: Tensor) -> Tensor:
        return super().reduce(name, gradient) * (1 + 1e-12 * self.axis.rank)


class Overflows(Training):
    def reduce(self, name: str, gradient: Tensor) -> Tensor:
        return super().reduce(name, gradient) * (math.inf if name == "2.weight" else 1)


FAULTS: dict[type[Training], str] = {
    NotReduced: r"replicas on dp differ: gradient not reduced: all parameters \(their sum is right\)$",
    NotReducedAveraged: r"replicas on dp differ: gradient not reduced: all parameters \(their mean is right\)$",
    MeanForSum: r"off by a constant on all parameters: ratio 0\.500 = 1/size of axis dp: averaged where it should be",
    SumForMean: r"off by a constant on all parameters: ratio 2\.000 = size of axis dp: summed where it should be",
    OneBucketNotReduced: r"replicas on dp differ: gradient not reduced: 2\.weight and 1 more \(their sum is right\)$",
    OneBucketAveraged: r"first deviation 2\.weight and 1 more: constant ratio 0\.500 = 1/size of axis dp: averaged",
    ConstantDivisor: r"on all parameters: loss divisor, ratio 0\.750 = 3/4: divided by 4 where the step has 3",
    MicroBatchDropped: r"tokens\[0\]: 9 instead of 13: a micro-batch, or rows of one, dropped or repeated$",
    MeanOfMeans: r"all gradients and loss\[0\] deviate without a constant ratio: tokens weighted wrongly \(a mean of",
    ShardNorm: r"replicas on dp differ in norm\[0\], gradients do not: norm of the local shard used as the global norm",
    NormOfCopies: r"norm\[0\]: ratio 1\.414 = square root of size of axis dp, gradients agree: copies counted as parts",
    NormBeforeReduction: r"replicas on dp differ in norm\[0\], gradients do not: norm of gradients before their reduc",
    StaleMasters: r"loss, gradients, norm agree, weights do not \(0\.weight and 3 more\): the optimizer step: stale",
    Detached: r"first deviation 0\.bias: zero where the reference is not: detached, frozen or never written$",
    NotBroadcast: r"replicas on dp differ in weights, gradients do not: initial weights not broadcast: 0\.weight and 3",
    StepSkipped: r"optimizer step skipped or done differently on rank 1 \(the others agree with the reference\): 0\.we",
    NotClipped: r"weights do not \(0\.weight and 3 more\) and differ along the gradients: clipping factor or learning",
    LossNotReduced: r"replicas on dp differ in loss\[0\]: not reduced \(their sum is right\)$",
    LossSummed: r"loss\[0\] deviates, gradients, norm do not: only its report is wrong: ratio 2\.000 = size of axis",
    RowsMixedUp: r"first deviation 0\.weight: the same values in another order: shards put together wrongly$",
    WrongSign: r"first deviation 2\.bias: constant ratio -1\.000: wrong sign$",
    OwnArithmetic: r"replicas on dp differ by rounding: not every rank did the same arithmetic: norm\[0\] and",
    Overflows: r"first value that is not finite: norm\[0\] of the candidate$",
}
# what the later of three steps leave of it
AFTER_THREE_STEPS: dict[type[Training], str] = FAULTS | {
    NotReduced: r"replicas on dp differ: gradient not reduced: all parameters$",
    NotReducedAveraged: r"replicas on dp differ: gradient not reduced: all parameters$",
    OneBucketNotReduced: r"replicas on dp differ: gradient not reduced: 2\.weight and 1 more$",
    OneBucketAveraged: r"all gradients deviate without a constant ratio, the loss .* compare after one step",
    NormOfCopies: r"first deviation norm\[0\]: ratio 1\.414 = square root of size of axis dp: copies counted as parts",
    Overflows: r"first value that is not finite: loss\[1\] of the candidate$",
    StaleMasters: r"the first step's loss and norm agree, loss\[1\] does not: the optimizer step: stale master weights",
    StepSkipped: r"replicas on dp differ in weights, gradients do not: optimizer step skipped or done differently on",
    NotClipped: r"the first step's loss and norm agree, loss\[1\] does not: the optimizer step",
    RowsMixedUp: r"the first step's loss and norm agree, loss\[1\] does not: the optimizer step",
    WrongSign: r"the first step's loss and norm agree, loss\[1\] does not: the optimizer step",
}


def all_trainings() -> dict[tuple[str, int], Result]:
    axis = core.Mesh(dp=dist.get_world_size()).dp
    kinds = [Training, Averaged, *FAULTS]
    return {(kind.__name__, steps): kind(axis).run(steps) for kind in kinds for steps in (1, 3)}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[tuple[str, int], Result]]:
    return testing.run(2, all_trainings)


@pytest.fixture(scope="module", params=[1, 3])
def steps(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def plain(steps: int) -> Result:
    batches = [[(*micro, count(micros)) for micro in micros] for micros in map(global_batch, range(steps))]
    result = testing.train_plainly(build(seed=0), batches, share, sgd, max_norm=MAX_NORM)
    assert min(result["norm"]) > MAX_NORM  # clipping has something to do
    return result | {"tokens": [count(global_batch(step)) for step in range(steps)]}


@pytest.mark.parametrize("kind", [Training, Averaged])
def test_right_training_is_right(kind: type[Training], steps: int, plain: Result, on_two_ranks: Any) -> None:
    results = [rank[kind.__name__, steps] for rank in on_two_ranks]
    for candidate in (results, results[0], results[1]):
        report = verify.compare(plain, candidate, micro_batches=MICRO_BATCHES)
        assert report.ok, report
        assert report.diagnosis == ()
        report.check()
        assert str(report) == "no differences from the reference"


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_planted_faults_are_named(kind: type[Training], steps: int, plain: Result, on_two_ranks: Any) -> None:
    results = [rank[kind.__name__, steps] for rank in on_two_ranks]
    report = verify.compare(plain, results, micro_batches=MICRO_BATCHES)
    assert not report.ok
    expected = (FAULTS if steps == 1 else AFTER_THREE_STEPS)[kind]
    with pytest.raises(AssertionError, match=r"differences? from the reference\ndiagnosis:\n") as failure:
        report.check()
    assert any(re.search(expected, sentence) for sentence in report.diagnosis), failure.value
    others = {*FAULTS.values()} - {FAULTS[kind], expected}
    assert not any(re.search(other, sentence) for other in others for sentence in report.diagnosis), failure.value


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            NotReduced,
            "the loss does not: backward or reduction; give the results of all ranks to see which reduction is missing",
        ),
        (ShardNorm, "gradients agree: norm of the local shard used as the global norm"),
        (
            MeanOfMeans,
            "rows dropped or repeated, or other initial weights (or another forward pass)",
        ),
        (
            MicroBatchDropped,
            "rows dropped or repeated, or other initial weights (or another forward pass)",
        ),
    ],
)
@pytest.mark.parametrize("steps", [1], indirect=True)
def test_one_rank_alone_tells_less(kind: type[Training], sentence: str, plain: Result, on_two_ranks: Any) -> None:
    first = {key: value for key, value in on_two_ranks[0][kind.__name__, 1].items() if key != "tokens"}
    reference = {key: value for key, value in plain.items() if key != "tokens"}
    (said,) = verify.compare(reference, first).diagnosis
    assert said.endswith(sentence)


@pytest.mark.parametrize("steps", [1], indirect=True)
def test_gradients_and_weights_alone_tell_how_the_step_began(plain: Result, on_two_ranks: Any) -> None:
    for kind in (NotBroadcast, StepSkipped):
        results = [rank[kind.__name__, 1] for rank in on_two_ranks]
        only = [{key: result[key] for key in ("gradients", "weights")} for result in (plain, *results)]
        (said,) = verify.compare(only[0], only[1:]).diagnosis
        assert re.search(FAULTS[kind], said)


@pytest.mark.parametrize("steps", [3], indirect=True)
def test_gradients_of_later_steps_do_not_hide_the_first_norm(plain: Result, on_two_ranks: Any) -> None:
    """After three steps the gradients have no constant ratio, but the first norm has one."""
    results = [dict(rank["SumForMean", 3]) for rank in on_two_ranks]
    noise = torch.Generator().manual_seed(0)
    gradients = {
        name: value + torch.rand(value.shape, generator=noise, dtype=torch.float64)
        for name, value in results[0]["gradients"].items()
    }
    results = [result | {"gradients": gradients} for result in results]
    (said,) = verify.compare(plain, results).diagnosis
    assert said == "first deviation norm[0]: ratio 2.000 = size of axis dp: summed where it should be averaged"
    without = [{key: value for key, value in result.items() if key != "gradients"} for result in results]
    reference = {key: value for key, value in plain.items() if key != "gradients"}
    assert verify.compare(reference, without).diagnosis == (said,)


# ------------------------------------------------------------------------------ four ranks: divided parameters, experts


def full_value(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def inputs() -> tuple[Tensor, Tensor]:
    return full_value("x", 8, 4), full_value("y", 8, 4)


def block(x: Tensor, gain: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh((x * gain) @ up) @ down + bias


BLOCK = {"gain": (4,), "up": (4, 6), "down": (6, 4), "bias": (4,)}


def tensor_parallel(fault: str) -> tuple[Result, dict[str, core.ParamSpec]]:
    """dp=2, tp=2: the gain works on the tp ranks' halves of the rows, up and down are divided over tp."""
    mesh = core.Mesh(dp=2, tp=2)
    dp, tp = mesh.dp, mesh.tp
    specs = {
        "gain": core.ParamSpec(grad_sum=(tp,)),
        "up": core.ParamSpec(shards=(core.Shard(tp, 1),)),
        "down": core.ParamSpec(shards=(core.Shard(tp, 0),)),
        "bias": core.ParamSpec(),
    }
    full = {name: full_value(name, *shape) for name, shape in BLOCK.items()}
    local = {
        name: nn.Parameter(value.chunk(2, specs[name].shards[0].dim)[tp.rank] if specs[name].shards else value)
        for name, value in full.items()
    }
    x, y = (tensor.chunk(2)[dp.rank] for tensor in inputs())
    exit_tp = core.all_reduce_fwd_all_reduce_bwd if fault == "twice" else core.all_reduce_fwd_identity_bwd
    h = core.split_fwd_all_gather_bwd(x, tp) * local["gain"]
    h = core.all_gather_fwd_reduce_scatter_bwd(h, tp)
    output = exit_tp(torch.tanh(h @ local["up"]) @ local["down"], tp) + local["bias"]
    loss = (output - y).square().sum() / 8
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in local.items():
        assert parameter.grad is not None
        gradient = core.all_reduce(parameter.grad, dp)
        for axis in () if fault == "grad_sum" else specs[name].grad_sum:
            gradient = core.all_reduce(gradient, axis)
        for shard in specs[name].shards:
            parts = core.all_gather(gradient.movedim(shard.dim, 0).contiguous(), shard.axis)
            gradient = parts.movedim(0, shard.dim)
        gradients[name] = gradient
    return {"loss": core.all_reduce(loss.detach(), dp).item(), "gradients": gradients}, verify.portable(specs)


def mixture(x: Tensor, dense: Tensor, experts: Tensor) -> Tensor:
    second = (x[:, :1] > 0).double()
    h = torch.tanh(x @ dense)
    return (h @ experts[0]) * (1 - second) + (h @ experts[1]) * second


MIXTURE = {"dense": (4, 4), "experts": (2, 4, 4)}


def expert_parallel(fault: str) -> tuple[Result, dict[str, core.ParamSpec]]:
    """dp=4, ep=2, edp=2: each of two neighbours holds one expert, which sees the rows of both."""
    mesh = core.Mesh(dp=4, ep=2)
    specs = {
        "dense": core.ParamSpec(),
        "experts": core.ParamSpec(shards=(core.Shard(mesh.ep, 0),), data_axis=mesh.edp),
    }
    dense = nn.Parameter(full_value("dense", *MIXTURE["dense"]))
    expert = nn.Parameter(full_value("experts", *MIXTURE["experts"])[mesh.ep.rank])
    x, y = (tensor.chunk(4)[mesh.dp.rank] for tensor in inputs())
    h = core.all_gather_fwd_reduce_scatter_bwd(torch.tanh(x @ dense), mesh.ep)
    mine = ((core.all_gather(x, mesh.ep)[:, :1] > 0) == mesh.ep.rank).double()
    output = core.reduce_scatter_fwd_all_gather_bwd((h @ expert) * mine, mesh.ep)
    loss = (output - y).square().sum() / 2  # the mean of these is the mean over all 8 rows
    loss.backward()  # type: ignore[no-untyped-call]
    assert dense.grad is not None
    assert expert.grad is not None
    of_expert = expert.grad if fault == "not reduced" else core.all_reduce(expert.grad, mesh.edp)
    divisor = mesh.edp.size if fault == "divisor" else mesh.dp.size
    gradients = {
        "dense": core.all_reduce(dense.grad, mesh.dp) / mesh.dp.size,
        "experts": core.all_gather(of_expert[None] / divisor, mesh.ep),
    }
    return {"loss": core.all_reduce(loss.detach(), mesh.dp).item() / 4, "gradients": gradients}, verify.portable(specs)


def all_divided() -> dict[str, tuple[Result, dict[str, core.ParamSpec]]]:
    results = {f"tp {fault}": tensor_parallel(fault) for fault in ("right", "twice", "grad_sum")}
    return results | {f"ep {fault}": expert_parallel(fault) for fault in ("right", "divisor", "not reduced")}


@pytest.fixture(scope="module")
def on_four_ranks() -> list[dict[str, tuple[Result, dict[str, core.ParamSpec]]]]:
    return testing.run(4, all_divided)


def plain_block(model: Any, shapes: dict[str, tuple[int, ...]]) -> Result:
    parameters = {name: nn.Parameter(full_value(name, *shape)) for name, shape in shapes.items()}
    x, y = inputs()
    loss = (model(x, *parameters.values()) - y).square().sum() / 8
    loss.backward()
    return {"loss": loss.item(), "gradients": {name: parameter.grad for name, parameter in parameters.items()}}


PLAIN: dict[str, tuple[Any, dict[str, tuple[int, ...]], dict[str, int]]] = {
    "tp": (block, BLOCK, {"dp": 2, "tp": 2}),
    "ep": (mixture, MIXTURE, {"dp": 4, "ep": 2}),
}


@pytest.mark.parametrize(
    ("case", "all_ranks", "sentences"),
    [
        ("tp right", True, ()),
        ("tp right", False, ()),
        (
            "tp twice",
            True,
            (
                "first deviation gain and 2 more: constant ratio 2.000 = size of axis tp: summed where it should be "
                "averaged",
                "3 of 4 parameters deviate",
            ),
        ),
        (
            "tp grad_sum",
            True,
            (
                "replicas on tp differ: gradient not reduced: gain (their sum is right)",
                "only parameters with grad_sum over tp deviate: missing reduction over tp",
            ),
        ),
        (
            "tp grad_sum",
            False,
            (
                "first deviation gain: no constant ratio",
                "only parameters with grad_sum over tp deviate: missing reduction over tp",
            ),
        ),
        ("ep right", True, ()),
        ("ep right", False, ()),
        (
            "ep divisor",
            True,
            (
                "first deviation experts: constant ratio 2.000 = size of axis edp or size of axis ep: summed where it "
                "should be averaged",
                "only parameters with data_axis edp deviate: divisor or reduction of its group",
            ),
        ),
        (
            "ep not reduced",
            True,
            (
                "replicas on edp differ: gradient not reduced: experts (their sum is right)",
                "only parameters with data_axis edp deviate: divisor or reduction of its group",
            ),
        ),
    ],
)
def test_specs_say_which_axis(case: str, all_ranks: bool, sentences: tuple[str, ...], on_four_ranks: Any) -> None:
    model, shapes, axes = PLAIN[case[:2]]
    results = [rank[case][0] for rank in on_four_ranks]
    specs = on_four_ranks[0][case][1]
    report = verify.compare(plain_block(model, shapes), results if all_ranks else results[0], specs, axes=axes)
    assert report.diagnosis == sentences, report
    assert report.ok == (not sentences)


# ----------------------------------------------------------------------------------------------- ratios and their names


def doctored(**gradients: Any) -> tuple[Result, Result]:
    """A reference, and it with some gradients replaced (by a factor of the right one, or by a tensor)."""
    right = {name: full_value(name, 3, 4) for name in ("first", "second", "third")}
    right["second"][0] = 0.0  # zeros do not disturb a ratio
    wrong = {
        name: gradients.get(name, value) if isinstance(gradients.get(name), Tensor) else value * gradients.get(name, 1)
        for name, value in right.items()
    }
    return {"loss": 1.0, "gradients": right}, {"loss": 1.0, "gradients": wrong}


@pytest.mark.parametrize(
    ("factors", "axes", "micro_batches", "sentence"),
    [
        (
            {"second": 2},
            {"dp": 4, "tp": 2},
            1,
            "second: constant ratio 2.000 = size of axis tp: summed where it should be",
        ),
        (
            {"second": 0.25},
            {"dp": 4, "tp": 2},
            1,
            "second: constant ratio 0.250 = 1/size of axis dp: averaged where it",
        ),
        ({"second": 6}, {"dp": 2, "tp": 3}, 1, "6.000 = size of axis dp x size of axis tp: summed"),
        ({"second": 1 / 6}, {"dp": 2, "tp": 3}, 1, "0.167 = 1/(size of axis dp x size of axis tp): averaged"),
        ({"second": 2}, {"dp": 2, "cp": 2}, 1, "2.000 = size of axis dp or size of axis cp: summed"),
        ({"second": 2}, {"dp": 4, "ep": 2}, 1, "2.000 = size of axis edp or size of axis ep: summed"),
        ({"second": 5}, {"dp": 2}, 5, "5.000 = number of micro-batches: summed where it should be averaged"),
        ({"second": 0.2}, {"dp": 2}, 5, "0.200 = 1/number of micro-batches: averaged where it should be summed"),
        ({"second": 5 / 7}, {"dp": 2}, 5, "0.714 = 5/7: divided by 7 where the step has 5 micro-batches"),
        ({"second": 2}, {"dp": 2}, 2, "2.000 = size of axis dp or number of micro-batches: summed"),
        ({"second": 1.37}, {"dp": 2}, 5, "first deviation second: constant ratio 1.370"),
        ({"first": -1}, {"dp": 2}, 1, "first deviation first: constant ratio -1.000: wrong sign"),
        ({"first": 2, "third": 3}, {"dp": 2}, 3, "also third: constant ratio 3.000 = number of micro-batches: summed"),
        ({"third": 0}, {"dp": 2}, 1, "first deviation third: zero where the reference is not: detached, frozen or"),
        ({"third": full_value("third", 3, 4).flip(0)}, {"dp": 2}, 1, "third: the same values in another order: shards"),
        ({"third": full_value("other", 3, 4)}, {"dp": 2}, 1, "first deviation third: no constant ratio"),
        (
            {"third": full_value("third", 3, 4)[:, :2]},
            {"tp": 2},
            1,
            "another shape, 1/size of axis tp of the elements: a",
        ),
        ({"first": 1.37, "second": 1.37, "third": 1.37}, {"dp": 2}, 1, "on all parameters: loss divisor, ratio 1.370"),
        (
            {"first": 2, "second": 2, "third": 2.01},
            {"dp": 2},
            1,
            "first deviation first and 1 more: constant ratio 2.000",
        ),
    ],
)
def test_ratios_have_names(factors: Any, axes: dict[str, int], micro_batches: int, sentence: str) -> None:
    report = verify.compare(*doctored(**factors), axes=axes, micro_batches=micro_batches)
    assert sentence in "\n".join(report.diagnosis), report
    (second,) = [d for d in report.differences if d.name == "gradients.second"] or [None]
    if second is not None:
        assert second.ratio == pytest.approx(factors["second"])


def test_ratios_in_single_precision_and_near_zero() -> None:
    right = {"small": full_value("small", 5, 5).float() * 1e-6, "large": full_value("large", 5, 5).float()}
    noisy = {name: 2 * value * (1 + 3e-7 * full_value("noise", 5, 5).float()) for name, value in right.items()}
    report = verify.compare({"gradients": right}, {"gradients": noisy}, axes={"tp": 2})
    assert report.diagnosis[0].startswith("off by a constant on all parameters: ratio 2.000 = size of axis tp")
    # what should be zero and is not has no ratio, and does not hide that of the others
    right["small"].zero_()
    report = verify.compare({"gradients": right}, {"gradients": noisy | {"small": right["small"]}}, axes={"tp": 2})
    assert report.diagnosis[0].startswith("off by a constant on all parameters: ratio 2.000 = size of axis tp")
    report = verify.compare({"gradients": right}, {"gradients": noisy}, axes={"tp": 2})
    assert report.differences[0].ratio is None


def test_loss_and_norm_without_gradients() -> None:
    right = {"loss": [2.0, 1.0], "norm": [4.0, 3.0]}
    (said,) = verify.compare(right, {"loss": [0.5, 0.9], "norm": [1.0, 2.9]}, axes={"dp": 4}).diagnosis
    assert said == (
        "loss[0] and norm[0] off by the same constant: loss divisor, ratio 0.250 = 1/size of axis dp: averaged where "
        "it should be summed"
    )
    (said,) = verify.compare(right, {"loss": [2.0, 1.0], "norm": [2.0, 3.0]}, axes={"dp": 4}).diagnosis
    assert said.endswith("square root of 1/size of axis dp: norm of the local shard used as the global norm")
    (said,) = verify.compare(right, {"loss": [8.0, 1.0], "norm": [4.0, 3.0]}, axes={"dp": 4}).diagnosis
    assert said.startswith("loss[0] deviates, norm does not: only its report is wrong: ratio 4.000 = size of axis dp")
    (said,) = verify.compare({"loss": 2.0}, {"loss": 1.9}, axes={"dp": 4}).diagnosis
    assert said == "first deviation loss: ratio 0.950"


def test_all_that_a_size_may_be_is_named() -> None:
    """The norm belongs to no parameter, whose axes would come first."""
    said = verify.compare({"norm": 2.0}, {"norm": 4.0}, axes={"dp": 2}, micro_batches=2).diagnosis
    assert said == (
        "first deviation norm: ratio 2.000 = size of axis dp or number of micro-batches: summed where it should be "
        "averaged",
    )
    assert "number of micro-batches" in verify.compare({"norm": 2.0}, {"norm": 4.0}, micro_batches=2).diagnosis[0]


def test_the_echo_of_a_fault_is_not_a_ratio() -> None:
    reference, candidate = (result | {"norm": [5.0, 4.0]} for result in doctored(second=1.0003))
    report = verify.compare(reference, candidate | {"norm": [5.1, 4.0]})
    assert report.diagnosis[0] == "first deviation second: no constant ratio"
    reference, candidate = doctored(second=1.0003)  # of the first step it is the fault itself
    assert verify.compare(reference, candidate).diagnosis[0] == "first deviation second: constant ratio 1.000"


def test_values_that_are_only_near_are_not_reordered() -> None:
    right = full_value("weight", 3, 4)
    near = right * (1 + 1e-8 * full_value("noise", 3, 4))
    gradients = {"gradients": {"w": full_value("gradient", 3, 4)}}
    (said,) = verify.compare(gradients | {"weights": {"w": right}}, gradients | {"weights": {"w": near}}).diagnosis
    assert said.startswith("gradients agree, weights do not (w): the optimizer step: stale master weights")
    turned = near.flip(0)
    (said,) = verify.compare(gradients | {"weights": {"w": near}}, gradients | {"weights": {"w": turned}}).diagnosis
    assert said == "first deviation w: the same values in another order: shards put together wrongly"


def test_a_part_of_another_rank_is_recognised_by_its_values() -> None:
    """Two ranks' parts of a flat buffer of 16 elements, of which the last 3 are padding, change places."""
    right = full_value("weight", 13, 1)
    flat = torch.cat([right.flatten(), torch.zeros(3, dtype=right.dtype)])
    wrong = torch.cat([flat[8:], flat[:8]])[:13].view(13, 1)
    gradients = {"gradients": {"w": full_value("gradient", 3, 4)}}
    (said,) = verify.compare(gradients | {"weights": {"w": right}}, gradients | {"weights": {"w": wrong}}).diagnosis
    assert said.startswith("first deviation w: the right values 8 elements too ")
    said = verify.compare({"gradients": {"w": right}}, {"gradients": {"w": wrong}}).diagnosis[0]
    assert said.endswith(": a part of another rank")


def test_parts_that_were_not_gathered() -> None:
    right, stale = full_value("weight", 13, 1), full_value("stale", 13, 1)
    short = {"short": torch.ones(2, dtype=torch.float64)}  # all of it is the first rank's
    first, second = (torch.cat(halves) for halves in ((right[:8], stale[8:]), (stale[:8], right[8:])))
    ranks = [{"weights": {"w": first} | short}, {"weights": {"w": second, "short": torch.zeros_like(short["short"])}}]
    (said,) = verify.compare({"weights": {"w": right} | short}, ranks).diagnosis
    assert said == (
        "replicas on dp differ in weights: every element is right on one of the ranks: parts not gathered: w and 1 more"
    )


def test_weights_alone_claim_nothing_of_gradients() -> None:
    right, wrong = {"weights": {"w": torch.ones(3)}}, {"weights": {"w": torch.full((3,), 2.0)}}
    (said,) = verify.compare(right, wrong).diagnosis
    assert said == "weights deviate (w): compare loss, gradients and norm too to see where it begins"
    (said,) = verify.compare(right, [right, wrong]).diagnosis
    assert said == (
        "replicas on dp differ in weights: optimizer step skipped or done differently on rank 1 "
        "(the others agree with the reference): w"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: 2 * x, "constant ratio 2.000 = size of axis tp: summed where it should be averaged"),
        (lambda x: x.flip(0), "the same values in another order: shards put together wrongly"),
        (lambda x: x + 1, "no constant ratio"),
        (lambda x: x * 0, "zero where the reference is not: detached, frozen or never written"),
    ],
)
def test_outputs_come_before_loss_and_gradients(change: Any, sentence: str) -> None:
    def result(outputs: Tensor) -> Result:
        gradients = {name: outputs.sin() * full_value(name, 3, 4) for name in ("up", "down")}
        return {"outputs": {"logits": outputs}, "loss": outputs.exp().sum(), "gradients": gradients}

    x = full_value("x", 3, 4)
    (said,) = verify.compare(result(x), result(change(x)), axes={"tp": 2}).diagnosis
    assert said == (
        f"first deviation outputs.logits: {sentence}; the forward pass has other weights, inputs or arithmetic"
    )
    (said,) = verify.compare(result(x), result(x) | {"loss": 2 * x.exp().sum()}, axes={"tp": 2}).diagnosis
    assert said.startswith("loss deviates, gradients do not: only its report is wrong: ratio 2.000")


def test_a_gradient_that_is_not_there() -> None:
    reference, candidate = doctored()
    del candidate["gradients"]["second"]
    report = verify.compare(reference, candidate)
    assert report.diagnosis == ("no gradient for second: detached, frozen, not used, or of another name",)


# ----------------------------------------------------------------------------------------------------------- the report


def test_the_example_in_the_docstring() -> None:
    result = doctest.testmod(verify)
    assert result.attempted >= 3
    assert result.failed == 0


def test_differences_are_data() -> None:
    reference, candidate = doctored(second=2)
    report = verify.compare(reference, candidate, axes={"tp": 2})
    (difference,) = report.differences
    size = reference["gradients"]["second"].abs().max().item()
    assert (difference.name, difference.kind, difference.ratio) == ("gradients.second", "value", pytest.approx(2.0))
    assert difference.deviation == pytest.approx(size)
    assert difference.size == pytest.approx(size)
    assert difference.tolerance == pytest.approx(1e-9 * size)


def test_keys_may_have_tolerances_of_their_own() -> None:
    reference, candidate = doctored(first=1 + 1e-7, second=1 + 1e-4)
    candidate["loss"] += 1e-7
    names = ["loss", "gradients.first", "gradients.second"]
    for rtol, left in (
        (None, names),
        ({}, names),
        ({"loss": 1e-6}, names[1:]),
        ({"gradients": 1e-6}, [names[0], names[2]]),
        ({"gradients": 1e-3, "loss": 1e-6}, []),
        (1e-6, names[2:]),
    ):
        report = verify.compare(reference, candidate, rtol=rtol)
        assert [difference.name for difference in report.differences] == left
    with pytest.raises(ValueError, match="rtol names logits, which is none of the reference's keys: loss, gradients"):
        verify.compare(reference, candidate, rtol={"logits": 1e-3})


def test_the_report_shows_the_largest_deviations() -> None:
    right = {f"p{number:02d}": torch.ones(2) for number in range(30)}
    wrong = {name: value * (1 + int(name[1:]) / 100) for name, value in right.items()}
    text = str(verify.compare({"weights": right}, {"weights": wrong}))
    assert text.startswith(
        "29 differences from the reference\ndiagnosis:\n  weights deviate (p01 and 28 more): compare loss, gradients"
    )
    assert "weights.p29: differs by 2.900e-01, largest value 1.000e+00, tolerance 1.0e-05, ratio 1.290\n" in text
    assert "weights.p10" in text
    assert "weights.p09" not in text
    assert text.endswith("\n  and 9 more")


def test_ranks_must_bring_the_same_names() -> None:
    reference, _ = doctored()
    short = {key: value for key, value in reference.items() if key != "loss"}
    report = verify.compare(reference, [reference, short])
    assert [str(difference) for difference in report.differences] == ["missing: loss on rank 1"]


def test_replicas_must_be_equal_bit_for_bit() -> None:
    reference, _ = doctored()
    other = doctored(first=1 + 1e-15)[1]
    report = verify.compare(reference, [reference, other])
    (difference,) = report.differences
    assert (difference.name, difference.kind, difference.detail) == ("gradients.first", "replicas", "dp")
    assert 0 < difference.deviation < 1e-14
    half = replace_gradients(reference, {name: value.float() for name, value in reference["gradients"].items()})
    assert not verify.compare(reference, [reference, half]).ok


def replace_gradients(result: Result, gradients: dict[str, Tensor]) -> Result:
    return result | {"gradients": gradients}


@pytest.mark.parametrize(
    ("candidate", "axes", "message"),
    [
        ([], None, "candidate is an empty list"),
        ([{}, {}], {"dp": 4}, "candidate has 2 ranks, but the axes are those of 4"),
        ([{}, {}], {"dp": 2, "ddp": 2}, "axes names ddp, which is none of pp, dp_replicate, dp, cp, tp, edp, ep, etp"),
        ([{}, {}], {"dp": 2, "ep": 4}, "ep=4 x etp=1 does not divide dp=2"),
    ],
)
def test_what_does_not_fit_is_said(candidate: Any, axes: dict[str, int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify.compare({}, candidate, axes=axes)


def test_a_mesh_and_specs_bring_their_axes() -> None:
    mesh = core.Mesh()
    assert verify.compare({}, {}, axes=mesh).ok
    outer = core.Axis("tp_outer", 2, 0, None, ((0, 2), (1, 3)), communicates=False)
    reference, candidate = doctored(second=2)
    specs = {"second": core.ParamSpec(grad_sum=(outer,))}
    report = verify.compare(reference, candidate, specs, axes={"dp": 2, "tp": 2})
    assert report.diagnosis == (
        "first deviation second: constant ratio 2.000 = size of axis tp_outer: summed where it should be averaged",
        "only parameters with grad_sum over tp_outer deviate: missing reduction over tp_outer",
    )
