"""From ``shard`` to ``close``: what is synchronised, refused, freed, copied, and survives an error."""

import copy
import ctypes
import gc
import io
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.cases import Case, batches, build, gradients_of, mlp, on_this_rank, reference, train, weights_of
from torch import nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run
from nanopar_zero.buckets import Bucket


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def shard(model: nn.Module, **more: Any) -> zero.ZeroOptimizer:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return zero.shard(model, sgd, **{"axis": core.Mesh(dp=size).dp, "stage": 0, "bucket_bytes": 500, **more})


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return mlp().double()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


X = torch.ones(4, 7).double()
in_all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


# ------------------------------------------------------------------------------------------------- at the start


class Assorted(nn.Module):
    """Trainable and frozen parameters and buffers of many kinds, different on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.trained = nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.randn(4, 6)[:, ::2], requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.norm.num_batches_tracked.fill_(rank)
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("turned", torch.randn(3, 5).t())
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("scalar", torch.tensor(float(rank)), persistent=False)
        self.norm.running_mean.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.trained(x)).square().mean()


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def synchronised(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[tuple[int, ...]]]:
    model = Assorted(torch.distributed.get_rank())
    before = everything(model)
    optimizer = shard(model, stage=stage)
    if stage == 3:
        optimizer.close()  # until then weights are elsewhere, frozen ones too
    return before, everything(model), [model.frozen.stride(), model.turned.stride()]


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (2, 1), (2, 3), (4, 2), (4, 3)])
def test_all_ranks_start_from_the_first_ones_weights_and_buffers(ranks: int, stage: int) -> None:
    results = run(ranks, synchronised, stage)
    before = results[0][0]
    assert not torch.equal(results[1][0]["turned"], before["turned"])
    assert_parity({"weights": before}, [{"weights": after} for _, after, _ in results], rtol=0.0)
    for _, after, strides in results:
        assert [value.dtype for value in after.values()] == [value.dtype for value in before.values()]
        assert strides == [(3, 1) if stage == 3 else (6, 2), (1, 5)]


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))


def buffers(model: nn.Module) -> dict[str, Any]:
    return {"outputs": {name: buffer.clone() for name, buffer in model.named_buffers()}}


def buffers_after_a_step(stage: int) -> dict[str, Any]:
    model = Assorted(0)
    places = [buffer.data_ptr() for buffer in model.buffers()]
    optimizer = shard(model, stage=stage)
    model(rows_of(torch.distributed.get_rank())).backward()
    optimizer.step()
    assert places == [buffer.data_ptr() for buffer in model.buffers()]
    return buffers(model)


@in_all_stages
def test_buffers_are_nobodys_business_after_the_start(stage: int) -> None:
    for rank, result in enumerate(run(2, buffers_after_a_step, stage)):
        plain = Assorted(0)
        plain(rows_of(rank))
        assert_parity(buffers(plain), result, rtol=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, not 4"),
        ({"reduce": "average"}, 'reduce must be "mean" or "sum", not \'average\''),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, not 0"),
        ({"specs": {"7.weight": core.ParamSpec()}}, r"specs name 7\.weight, which is not a parameter"),
        ({"axis": 3}, "an axis is an Axis, a one-dimensional DeviceMesh or a process group"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=message):
        shard(model, **options)
    shard(model)


def gradient_of_a_tied_weight(name: str) -> list[float]:
    mesh = core.Mesh(tp=2)
    model = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)})
    model["second"].weight = model["first"].weight  # type: ignore[index,union-attr,assignment]
    with torch.no_grad():
        model["first"].weight.zero_()  # type: ignore[index,union-attr,operator]
    specs = {name: core.ParamSpec(grad_sum=(mesh.tp,))}
    optimizer = zero.shard(model, lambda g: torch.optim.SGD(g, lr=1.0), axis=mesh.dp, stage=1, specs=specs)
    model["first"](torch.ones(1, 2) * (1 + mesh.tp.rank)).sum().backward()  # type: ignore[index]
    optimizer.step()
    return [float(x) for x in model["second"].weight.flatten()]  # type: ignore[index,union-attr]


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
def test_specs_may_give_any_name_of_a_tied_weight(name: str) -> None:
    assert run(2, gradient_of_a_tied_weight, name) == [[-3.0] * 4] * 2


def test_specs_that_differ_between_the_names_of_one_weight() -> None:
    model, axis = model_of(), core.Mesh().tp
    model[2] = model[0]  # type: ignore[index,operator]
    specs = {"0.weight": core.ParamSpec(), "2.weight": core.ParamSpec(grad_sum=(axis,))}
    with pytest.raises(ValueError, match=r"0\.weight and 2\.weight are one parameter, but their specs differ"):
        shard(model, specs=specs)


def test_models_that_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        shard(mlp().requires_grad_(False))
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(ValueError, match=r"parameter 0\.weight is on the meta device"):
        shard(model)


def models_differ(how: str) -> None:
    odd = torch.distributed.get_rank() == 1
    if how == "shapes":  # of one length when padded, so that no collective would complain
        shard(nn.Linear(3, 4 + odd))
    elif how == "order":
        layers = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
        shard(nn.ModuleDict(dict(sorted(layers.items(), reverse=odd))))
    elif how == "frozen":
        shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(not odd)))
    elif how == "groups":
        names = ["*.weight", "*.bias"]
        shard(mlp(), groups=[{"params": name} for name in (reversed(names) if odd else names)])
    elif how == "bucket_bytes":
        shard(mlp(), bucket_bytes=100 + 900 * odd)


@pytest.mark.parametrize("how", ["shapes", "order", "frozen", "groups", "bucket_bytes"])
def test_ranks_with_different_models_are_refused(how: str) -> None:
    with pytest.raises(ValueError, match="the ranks of axis dp disagree: names, order, shapes"):
        run(2, models_differ, how, timeout_s=60)


# ---------------------------------------------------------------------------------------------------- at the end


def test_a_parameter_is_trained_by_one_optimizer_at_a_time() -> None:
    model = model_of()
    optimizer = shard(model)
    for part in (model, model[0], nn.Sequential(nn.Linear(2, 2).double(), model[2])):
        with pytest.raises(RuntimeError, match=r"weight is already trained by a ZeroOptimizer: close\(\) that one"):
            shard(part)
    optimizer.close()
    optimizer.close()
    again = shard(model)
    del again  # as good as closed
    gc.collect()
    shard(model)


def again_after_close(case: Case) -> dict[str, Any]:
    axis = core.Mesh(dp=2).dp
    model = build(case)
    first = zero.shard(model, sgd, axis=axis, stage=case.stage)
    pending = model(X)
    first.close()
    with core.ledger() as book:
        pending.sum().backward()
        model(X).sum().backward()
    assert not book.records, "a closed optimizer must not send"
    second = zero.shard(model, sgd, axis=axis, stage=case.stage, bucket_bytes=100)
    assert all(p.grad is None for p in model.parameters())
    return train(model, second, case, axis)


@in_all_stages
def test_a_model_can_be_sharded_again_after_close(stage: int) -> None:
    case = Case(micro_batches=2, stage=stage)
    assert_parity(reference(case), run(2, again_after_close, case), micro_batches=case.micro_batches)


def ten_lives(stage: int) -> tuple[list[bool], int]:
    """Ten models of a million parameters, one after the other: is the last one freed; MiB gained since the third."""
    resident = []
    for _ in range(10):
        model = nn.Sequential(nn.Linear(1000, 500), nn.Linear(500, 1000))
        optimizer = zero.shard(
            model, lambda g: torch.optim.Adam(g), axis=core.Mesh(dp=2).dp, stage=stage, bucket_bytes=2**20
        )
        for _ in range(2):
            model(torch.ones(2, 1000)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        watched: list[Callable[[], object]] = [
            weakref.ref(thing) for thing in (model, optimizer, optimizer.reducer, model[0].weight)
        ]
        watched.append(weakref.ref(optimizer.reducer.buckets[0].parameters))
        del model, optimizer
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            resident.append(int(file.read().split()[1]) * 4096 // 2**20)
    return [reference() is None for reference in watched], resident[9] - resident[2]


@pytest.mark.parametrize("stage", [0, 3])
def test_ten_optimizers_in_one_process_leave_nothing_behind(stage: int) -> None:
    for freed, growth_mib in run(2, ten_lives, stage):
        assert freed == [True] * 5
        assert growth_mib < 8, "one life takes 16 MiB and more"


# -------------------------------------------------------------------------------------------------- several models


def adversaries(dp: core.Axis | None, stage: int) -> list[dict[str, torch.Tensor]]:
    """Two models that train in turn, the second frozen meanwhile and differentiated through."""
    models = [model_of(0)[:3], nn.Linear(9, 1).double()]
    maker, judge = models
    if dp is None:
        optimizers: list[torch.optim.Optimizer] = [sgd(model.parameters()) for model in models]
    else:
        optimizers = [zero.shard(model, sgd, axis=dp, stage=stage, bucket_bytes=1) for model in models]
    ranks = range(2) if dp is None else [dp.rank]
    for step in range(3):
        for trained, optimizer in zip(models, optimizers, strict=True):
            judge.requires_grad_(trained is judge)
            optimizer.zero_grad()
            for rank in ranks:
                x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank)).double()
                made = maker(x).detach() if trained is judge else maker(x)
                (judge(made).square().sum() / len(ranks)).backward()
            optimizer.step()
    for optimizer in optimizers:
        if isinstance(optimizer, zero.ZeroOptimizer):
            optimizer.close()
    return [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]


def adversaries_on_this_rank(stage: int) -> list[dict[str, torch.Tensor]]:
    return adversaries(core.Mesh(dp=2).dp, stage)


@in_all_stages
def test_two_models_with_an_optimizer_each(stage: int) -> None:
    results = run(2, adversaries_on_this_rank, stage)
    assert_parity({"weights": adversaries(None, stage)}, [{"weights": result} for result in results])


def compiled(case: Case, first: str) -> dict[str, Any]:
    axis = core.Mesh(dp=2).dp
    model = build(case, seed=axis.rank)
    call: Any = torch.compile(model, backend="aot_eager") if first == "compile" else model
    optimizer = zero.shard(call, sgd, axis=axis, stage=case.stage, bucket_bytes=500)
    if first == "shard":
        call = torch.compile(model, backend="aot_eager")
    result = train(call, optimizer, case, axis)
    return {
        name: {n.removeprefix("_orig_mod."): t for n, t in part.items()} if isinstance(part, dict) else part
        for name, part in result.items()
    }


@pytest.mark.parametrize(("first", "stage"), [("compile", 0), ("compile", 3), ("shard", 3)])
def test_compiled_models(first: str, stage: int) -> None:
    case = Case(micro_batches=2, steps=3, stage=stage)
    assert_parity(reference(case), run(2, compiled, case, first), micro_batches=case.micro_batches)


# -------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_copy_of_the_model_is_a_plain_model(stage: int) -> None:
    model = model_of()
    optimizer = shard(model, stage=stage)
    model(X).sum().backward()
    plain = model_of()
    plain(X).sum().backward()
    expected = {"gradients": gradients(plain)}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [copy.deepcopy(model), torch.load(file, weights_only=False), torch.optim.swa_utils.AveragedModel(model)]
    for twin in twins:
        with core.ledger() as book:
            twin(X).sum().backward()
        assert not book.records
        of_twin = twin.module if isinstance(twin, torch.optim.swa_utils.AveragedModel) else twin
        assert_parity(expected, {"gradients": gradients(of_twin)})
        assert_parity(expected, {"gradients": gradients_of(model, optimizer)})
        own = shard(twin)
        own.close()
    optimizer.step()


def test_a_copy_of_a_model_whose_weights_are_elsewhere_is_nan() -> None:
    model = model_of()
    optimizer = shard(model, stage=3)
    for _ in range(2):
        twin = copy.deepcopy(model)
        with core.ledger() as book:
            assert twin(X).isnan().all()
        assert not book.records
        assert [p.shape for p in twin.parameters()] == [p.shape for p in model_of().parameters()]
        model(X).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_returning_a_parameter_does_not_pile_up_hooks(stage: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.scale, self.scale

    model = Scaled()
    optimizer = shard(model, stage=stage)
    before = len(model.scale._backward_hooks or {})
    for _ in range(5):
        model(X)
    assert len(model.scale._backward_hooks or {}) == before == 1
    optimizer.close()


# -------------------------------------------------------------------------------------------------------- errors


class FailsOnce(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("backward fails")


class Fragile(nn.Module):
    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner
        self.fail_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner[:2](x)
        if self.fail_in == "backward":
            x = FailsOnce.apply(x)
        x = self.inner[2:](x)
        if self.fail_in == "forward":
            raise ArithmeticError("forward fails")
        return x


def usable_after_errors(case: Case) -> dict[str, Any]:
    axis = core.Mesh(dp=2).dp
    model = Fragile(build(case))
    optimizer = case.shard(model)
    (x, _), *_ = batches(case)[0]
    for place in ("forward", "backward", "backward"):
        model.fail_in = place
        with pytest.raises(ArithmeticError, match=place):
            model(x).sum().backward()
        model.fail_in = ""
        optimizer.zero_grad()
        if case.stage == 3:
            assert not any(bucket.is_whole for bucket in optimizer.windows.buckets)
    result = train(model, optimizer, case, axis)
    for key in ("gradients", "weights"):
        result[key] = {name.removeprefix("inner."): value for name, value in result[key].items()}
    with pytest.raises(ZeroDivisionError), optimizer.no_sync():
        raise ZeroDivisionError
    with core.ledger() as book:
        model(x).sum().backward()
    assert book.records, "no_sync must end with its block, also by an exception"
    optimizer.close()
    return result


@in_all_stages
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_zero_grad_after_an_error_makes_everything_usable_again(bucket_bytes: int, stage: int) -> None:
    case = Case(bucket_bytes=bucket_bytes, stage=stage)
    assert_parity(reference(case), run(2, usable_after_errors, case))


def one_rank_fails_in_backward(stage: int) -> None:
    model = Fragile(model_of())
    optimizer = shard(model, bucket_bytes=1, stage=stage)
    if torch.distributed.get_rank() == 1:
        model.fail_in = "backward"
    model(X).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_that_fails_ends_all_quickly(stage: int) -> None:
    start = time.monotonic()
    with pytest.raises(ArithmeticError, match="backward fails"):
        run(2, one_rank_fails_in_backward, stage, timeout_s=60)
    assert time.monotonic() - start < 30


def a_bucket_sent_too_early(stage: int) -> None:
    """One weight used both directly and in a segment that reentrant recomputation differentiates later."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = shard(model, stage=stage)
    start = torch.ones(2, 4, requires_grad=True)
    hidden = torch.utils.checkpoint.checkpoint(model, start, use_reentrant=True)
    model(hidden).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_reentrant_recomputation_cannot_do_is_said(stage: int) -> None:
    with pytest.raises(RuntimeError, match=r"weight received a gradient after its bucket was .*use_reentrant=False"):
        run(2, a_bucket_sent_too_early, stage, timeout_s=60)


def a_pass_with_all_gradients_twice(case: Case) -> dict[str, Any]:
    """Counts how often each bucket is sent in a pass."""
    sent: list[int] = []
    real = Bucket.start_reduction

    def start_reduction(bucket: Bucket) -> None:
        sent.append(id(bucket))
        real(bucket)

    Bucket.start_reduction = start_reduction  # type: ignore[method-assign]
    on_this_rank(case)
    return {"times": [sent.count(bucket) for bucket in set(sent)]}


@in_all_stages
@pytest.mark.parametrize("model", ["twice", "twice recomputed", "twice reentrant", "siamese reentrant"])
def test_no_bucket_is_sent_twice_in_a_pass(model: str, stage: int) -> None:
    case = Case(model, bucket_bytes=1, steps=3, stage=stage, small_units=True)
    for result in run(2, a_pass_with_all_gradients_twice, case):
        assert result["times"] == [3] * (3 if stage == 3 else 6)


def leaves_right_after_a_step(stage: int) -> None:
    axis = core.Mesh(dp=2).dp
    model = nn.Linear(600, 1000)
    optimizer = zero.shard(model, torch.optim.Adam, axis=axis, stage=stage)
    model(torch.ones(2, 600)).sum().backward()
    if axis.rank:
        time.sleep(0.7)  # the other one has gone through its own step long ago
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_under_way_at_the_end_hurt_nobody(stage: int) -> None:
    assert run(2, leaves_right_after_a_step, stage) == [None, None]


# ------------------------------------------------------------------------------------------------------------ modes


def train_and_look(stage: int | None, rank: int) -> dict[str, Any]:
    """Training steps with everything else in between; without a stage in plain torch, on the rows of both ranks."""
    model = Fragile(model_of())
    optimizer = sgd(model.parameters()) if stage is None else shard(model, stage=stage)
    outputs: list[torch.Tensor] = []
    ranks = range(2) if stage is None else [rank]

    def holds_its_shard_only() -> None:
        if stage == 3:
            whole = [b for b in optimizer.windows.buckets if b.parameters.untyped_storage().nbytes()]
            assert not whole

    def train_a_step() -> None:
        optimizer.zero_grad()
        for each in ranks:
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(each)).double()
            (model(x).square().sum() / len(ranks)).backward()
        optimizer.step()
        holds_its_shard_only()

    def look() -> None:
        outputs.append(model(X).detach())
        holds_its_shard_only()

    train_a_step()
    model.eval()
    with torch.no_grad():
        look()
    model.train()
    train_a_step()
    for _ in range(2):
        with torch.no_grad():
            look()
    with torch.inference_mode():
        look()
    look()  # with a graph, which is dropped
    train_a_step()
    with torch.no_grad():
        outputs.append(model.inner[:2](X))  # some layers only
    holds_its_shard_only()
    model.fail_in = "forward"
    with pytest.raises(ArithmeticError):
        model(X)
    model.fail_in = ""
    train_a_step()
    if stage is None:
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    else:
        weights = weights_of(model, optimizer)
        optimizer.close()
    return {"outputs": [o.clone() for o in outputs], "weights": weights}


def train_and_look_on_this_rank(stage: int) -> dict[str, Any]:
    return train_and_look(stage, torch.distributed.get_rank())


@in_all_stages
def test_evaluation_and_errors_between_training_steps(stage: int) -> None:
    results = run(2, train_and_look_on_this_rank, stage)
    assert_parity(train_and_look(None, 0), results)
