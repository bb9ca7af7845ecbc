"""What a step sends, and when: the numbers of the stage table, written out by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.zero.cases import Case, batches, build, mlp, squared_error
from torch import nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.ledger import Record, observing
from nanopar_core.testing import run
from nanopar_zero.stages import STAGES

pytestmark = pytest.mark.long

# Elements of mlp's weights and biases: 7 x 15, 15, 15 x 9, 9, 9 x 3, 3, each padded to a multiple of 32.
PADDED = [128, 32, 160, 32, 32, 32]
TOTAL_BYTES = 8 * sum(PADDED)
# By ranks: a bucket for each, in stages 1 and 2 a multiple of 32 elements for each rank; one bucket of all; units.
ONE_EACH = {2: [128, 64, 192, 64, 64, 64], 4: [128, 128, 256, 128, 128, 128]}
ALL_IN_ONE = {2: [448], 4: [512]}
UNITS = {2: [192, 192, 64], 4: [256, 256, 128]}  # 128 + 32, 160 + 32, 32 + 32


def sgd(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def prepare(
    bucket_bytes: int = 10**6, stage: int = 0, **more: Any
) -> tuple[nn.Module, zero.ZeroOptimizer, torch.Tensor]:
    axis = core.Mesh(dp=torch.distributed.get_world_size()).dp
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = zero.shard(model, sgd, **{"axis": axis, "stage": stage, "bucket_bytes": bucket_bytes, **more})
    return model, optimizer, torch.randn(4, 7, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------ bytes and calls


def sent_in_a_step(stage: int, micro_batches: int, options: dict[str, Any], hold: bool) -> dict[str, Any]:
    """The second of two steps, in which the first one's gathers are over: (calls, bytes) by operation."""
    model, optimizer, x = prepare(stage=stage, **options)
    norms = []
    for _ in range(2):
        optimizer.wait()
        with core.ledger() as book:
            optimizer.zero_grad()
            if hold:
                optimizer.hold()
            for number in range(micro_batches):
                if number < micro_batches - 1:
                    with optimizer.no_sync():
                        model(x).sum().backward()
                else:
                    model(x).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        norms = [(record.op, record.bytes) for record in book.records if record.label == "norm"]
    optimizer.close()
    others = [record for record in book.records if record.label != "norm"]
    totals = {}
    for op in dict.fromkeys(record.op for record in others):
        of_op = [record.bytes for record in others if record.op == op]
        totals[op] = (len(of_op), sum(of_op))
    return {"totals": totals, "norm": norms}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


def all_sent(jobs: list[tuple[int, int, dict[str, Any], bool]]) -> list[dict[str, Any]]:
    return [sent_in_a_step(*job) for job in jobs]


def test_a_step_sends_what_the_table_of_stages_says(ranks: int) -> None:
    jobs: list[tuple[int, int, dict[str, Any], bool]] = []
    expected = []

    def part(lengths: list[int]) -> int:
        """P (N-1)/N."""
        return 8 * sum(lengths) * (ranks - 1) // ranks

    for m in (1, 2, 3):
        for options, lengths in (({"bucket_bytes": 1}, PADDED), ({}, [sum(PADDED)])):
            jobs.append((0, m, options, False))
            expected.append({"all_reduce": (len(lengths), 2 * part(lengths))})
        for options, lengths in (({"bucket_bytes": 1}, ONE_EACH[ranks]), ({}, ALL_IN_ONE[ranks])):
            count = len(lengths)
            jobs += [(stage, m, options, False) for stage in (1, 2)]
            expected.append({"reduce_scatter": (count, part(lengths)), "all_gather": (count, part(lengths))})
            expected.append({"reduce_scatter": (m * count, m * part(lengths)), "all_gather": (count, part(lengths))})
        lengths = UNITS[ranks]
        for options, hold, gathers in (
            ({}, False, 2 * m),
            ({"prefetch": 0}, False, 2 * m),
            ({"prefetch": 2}, False, 2 * m),
            ({"reshard_after_forward": False}, False, m),
            ({}, True, 1),
        ):
            jobs.append((3, m, options, hold))
            expected.append(
                {
                    "all_gather": (gathers * len(lengths), gathers * part(lengths)),
                    "reduce_scatter": (m * len(lengths), m * part(lengths)),
                }
            )
    for by_rank in run(ranks, all_sent, jobs):
        for (stage, m, options, hold), sent, right in zip(jobs, by_rank, expected, strict=True):
            assert sent["totals"] == right, (stage, m, options, hold)
            total = sum(size for _, size in right.values())
            p = 8 * sum(UNITS[ranks]) if stage == 3 else total_of(right, ranks, stage, m)
            gathers = right["all_gather"][0] // len(UNITS[ranks]) if stage == 3 else None
            assert STAGES[stage].bytes_sent(p, ranks, m, gathers=gathers) == total
            # Every rank has all gradients in stage 0; otherwise squares of norms are added up, once.
            assert sent["norm"] == ([] if stage == 0 else [("all_reduce", 2 * 8 * (ranks - 1) // ranks)])


def total_of(right: dict[str, tuple[int, int]], ranks: int, stage: int, m: int) -> int:
    """P from the bytes of all gathers, or in stage 0 of the all_reduces."""
    size = right["all_reduce"][1] // 2 if stage == 0 else right["all_gather"][1]
    return size * ranks // (ranks - 1)


def sent_with_replicas() -> Counter[tuple[str, str, int]]:
    mesh = core.Mesh(dp_replicate=2, dp=2)
    model, optimizer, x = prepare(stage=3, axis=mesh.dp, replicate=mesh.dp_replicate)
    with core.ledger() as book:
        model(x).sum().backward()
        optimizer.step()
    return Counter((record.op, record.axis, record.bytes) for record in book.records)


def test_only_the_parts_go_over_the_replicas() -> None:
    expected: Counter[tuple[str, str, int]] = Counter()
    for length in UNITS[2]:
        expected["all_gather", "dp", 8 * length // 2] += 2
        expected["reduce_scatter", "dp", 8 * length // 2] += 1
        expected["all_reduce", "dp_replicate", 8 * length // 2] += 1  # 2 P/N (R-1)/R with N = R = 2
    assert run(4, sent_with_replicas) == [expected] * 4


def gathers_with_recomputation(case: Case) -> Counter[str]:
    model = build(case)
    optimizer = case.shard(model)
    (x, y), *_ = batches(case)[0]
    with core.ledger() as book:
        for _ in range(2):
            squared_error(model, x, y, 1).backward()
    optimizer.close()
    return Counter(record.op for record in book.records)


@pytest.mark.parametrize("model", ["blocks", "blocks recomputed", "blocks reentrant"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_recomputation_gathers_nothing_twice(model: str, prefetch: int) -> None:
    case = Case(model, stage=3, small_units=True, prefetch=prefetch)
    assert run(2, gathers_with_recomputation, case) == [{"all_gather": 2 * 2 * 6, "reduce_scatter": 2 * 6}] * 2


# ----------------------------------------------------------------------------------------------------------------- when


def records_of_steps(bucket_bytes: int, stage: int) -> dict[str, list[tuple[str, str]]]:
    model, optimizer, x = prepare(bucket_bytes, stage)
    found = {}
    with core.ledger() as book:

        def note(name: str) -> None:
            found[name] = [(record.op, record.label) for record in book.records if record.label != "norm"]
            book.clear()

        model(x).sum().backward()
        note("backward")
        optimizer.clip_grad_norm_(1.0)
        note("norm")
        optimizer.step()
        optimizer.zero_grad()
        note("the rest of the step")
        with optimizer.no_sync():
            model(x).sum().backward()
            model(x).sum().backward()
        note("no_sync")
        model(x).sum().backward()
        note("the last micro-batch")
        with optimizer.no_sync():
            model(x).sum().backward()
        note("no_sync again")
        optimizer.step()
        note("step with unreduced gradients")
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_thing_is_sent_in_its_time(stage: int) -> None:
    gradients = [("all_reduce" if stage == 0 else "reduce_scatter", "gradients")] * 6
    parameters = [] if stage == 0 else [("all_gather", "parameters")] * 6
    for found in run(2, records_of_steps, 1, stage):
        assert found["backward"] == found["the last micro-batch"] == gradients
        assert found["norm"] == []
        assert found["the rest of the step"] == parameters
        assert found["no_sync"] == (2 * gradients if stage == 2 else [])
        assert found["no_sync again"] == (gradients if stage == 2 else [])
        assert found["step with unreduced gradients"] == ([] if stage == 2 else gradients) + parameters


def events_of_backward(stage: int) -> list[str]:
    """Of the second pass: the first one must leave nothing behind."""
    model, optimizer, x = prepare(bucket_bytes=1, stage=stage)
    model(x).sum().backward()
    optimizer.zero_grad()
    events = []
    with core.ledger() as book:

        def sent_so_far(name: str) -> None:
            events.append(f"{name}: {len(book.records)} sent")

        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _gradient, name=name: sent_so_far(f"gradient of {name} comes"))
        model(x).sum().backward()
        sent_so_far("end")
    return events


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_buckets_are_sent_while_backward_still_runs(stage: int) -> None:
    names = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
    for events in run(2, events_of_backward, stage):
        assert events[-1] == "end: 6 sent"
        sent = {event.split()[2]: int(event.split()[4]) for event in events[:-1]}
        assert sorted(sent) == sorted(names)
        # Linear's bias may come before or after its weight; all of the layers above have been sent by then.
        assert min(sent["0.weight"], sent["0.bias"]) >= 4
        assert min(sent["2.weight"], sent["2.bias"]) >= 2


def sent_when_the_last_layer_comes_second() -> tuple[int, int]:
    """Layers used in the order 0, 2, 1: the gradient of 1 is there first and waits for that of 2."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    optimizer = zero.shard(layers, sgd, axis=core.Mesh(dp=2).dp, stage=0, bucket_bytes=8 * 8 * 4)
    first_sight: dict[int, int] = {}

    def gradient_comes(number: int) -> None:
        first_sight.setdefault(number, len(book.records))

    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.register_hook(lambda _gradient, number=number: gradient_comes(number))
    with core.ledger() as book:
        layers[1](layers[2](layers[0](torch.ones(2, 8)))).sum().backward()
    optimizer.close()
    return first_sight[2], first_sight[0]


def test_buckets_that_waited_for_an_earlier_one_are_sent_with_it() -> None:
    assert run(2, sent_when_the_last_layer_comes_second) == [(0, 2)] * 2


def gradients_seen_in_flight() -> list[bool]:
    model, optimizer, x = prepare(bucket_bytes=1)
    seen: list[bool] = []
    model[0].weight.register_hook(lambda _gradient: seen.append(model[4].weight.grad is None))
    model(x).sum().backward()
    seen.append(model[4].weight.grad is None)
    optimizer.close()
    return seen


def test_autograd_cannot_reach_a_gradient_in_flight() -> None:
    assert run(2, gradients_seen_in_flight) == [[True, False]] * 2


def records_with_a_penalty_on_the_gradient() -> list[str]:
    model, optimizer, x = prepare(bucket_bytes=1)
    x.requires_grad_()
    with core.ledger() as book:
        y = model(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        of_weights = torch.autograd.grad(y, list(model.parameters()), create_graph=True)
        (y + gradient.square().sum() + sum(g.square().sum() for g in of_weights)).backward()
    optimizer.close()
    return [record.op for record in book.records]


def test_gradients_that_autograd_grad_gives_away_are_not_sent() -> None:
    assert run(2, records_with_a_penalty_on_the_gradient) == [["all_reduce"] * 6] * 2


def first_records_with_one_layer_unused() -> list[int]:
    model, _optimizer, x = prepare(bucket_bytes=1)
    with core.ledger() as book:
        rank = torch.distributed.get_rank()
        (model[:4](x) if rank else model(x)).sum().backward()
    return [record.bytes for record in book.records]


def test_the_order_is_that_of_the_layout_whatever_a_rank_uses() -> None:
    first, second = run(2, first_records_with_one_layer_unused)
    assert first == second
    assert first == [8 * length for length in (32, 32, 32, 160, 32, 128)]


def timeline(prefetch: int) -> list[str]:
    """Collectives, and the layers' own work, of one step in stage 3; a layer is called by its padded length."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 30)).double()
    axis = core.Mesh(dp=2).dp
    optimizer = zero.shard(model, sgd, axis=axis, stage=3, prefetch=prefetch)
    events: list[str] = []

    def sends(record: Record, _axis: core.Axis) -> None:
        size = record.shape[0] * (2 if record.op == "all_gather" else 1)
        events.append(f"{record.op.split('_')[-1]} {size}")

    for layer, length in ((0, 64), (2, 128), (4, 640)):
        model[layer].register_forward_hook(lambda *_, length=length: events.append(f"forward {length}"))
        model[layer].weight.register_hook(lambda _, length=length: events.append(f"backward {length}"))
    with observing(sends):
        model(torch.randn(4, 7).double()).sum().backward()
        optimizer.step()
    return events


TIMELINES = {
    0: """gather 64, forward 64, gather 128, forward 128, gather 640, forward 640,
          gather 640, backward 640, gather 128, scatter 640, backward 128, gather 64, scatter 128, backward 64,
          scatter 64""",
    1: """gather 64, gather 128, forward 64, gather 640, forward 128, forward 640,
          gather 640, gather 128, backward 640, gather 64, scatter 640, backward 128, scatter 128, backward 64,
          scatter 64""",
    2: """gather 64, gather 128, gather 640, forward 64, forward 128, forward 640,
          gather 640, gather 128, gather 64, backward 640, scatter 640, backward 128, scatter 128, backward 64,
          scatter 64""",
}


@pytest.mark.parametrize("prefetch", TIMELINES)
def test_units_are_gathered_ahead_and_reduced_behind(prefetch: int) -> None:
    expected = [event.strip() for event in TIMELINES[prefetch].split(",")]
    for events in run(2, timeline, prefetch):
        assert events == expected


def gathers_after_the_step(stage: int) -> list[str]:
    """Whether the gathers of a step are waited for one by one, as forward needs them."""
    model, optimizer, x = prepare(1, stage)
    model(x).sum().backward()
    optimizer.step()
    started = [bucket.arriving is not None for bucket in optimizer.windows.buckets]
    there: list[str] = ["all on their way" if all(started) else "not started"]
    for number, unit in enumerate(optimizer.windows.units[1:]):
        later = optimizer.windows.buckets[2 * number + 2 :]  # each layer has two
        unit.module.register_forward_hook(
            lambda *_, unit=unit, later=later: there.append(
                f"{all(bucket.arriving is None for bucket in unit.buckets)} "
                f"{all(bucket.arriving is not None for bucket in later)}"
            )
        )
    model(x)
    return there


@pytest.mark.parametrize("stage", [1, 2])
def test_forward_waits_for_one_unit_after_the_other(stage: int) -> None:
    assert run(2, gathers_after_the_step, stage) == [["all on their way", "True True", "True True", "True True"]] * 2


# --------------------------------------------------------------------------------------------------------------- memory


def copies_in_a_step() -> tuple[bool, bool, int]:
    """Whether gradients and weights are the buffers themselves, and how many bytes the buffers have per weight byte."""
    model, optimizer, x = prepare(bucket_bytes=10**6)
    (bucket,) = optimizer.reducer.buckets
    model(x).sum().backward()
    views = all(p.grad.untyped_storage().data_ptr() == bucket.reduced.data_ptr() for p in model.parameters())
    weights = all(p.untyped_storage().data_ptr() == bucket.masters.data_ptr() for p in model.parameters())
    stored = {t.untyped_storage().data_ptr(): t.nbytes for t in (bucket.parameters, bucket.masters, bucket.reduced)}
    return views, weights, sum(stored.values())


def test_memory_is_one_buffer_of_weights_and_one_of_gradients() -> None:
    assert run(2, copies_in_a_step) == [(True, True, 2 * TOTAL_BYTES)] * 2


def stored_between_backward_and_step(stage: int) -> int:
    """Bytes of all buffers, and of the moments that the step before has made."""
    torch.manual_seed(0)
    model = mlp().double()
    axis = core.Mesh(dp=2).dp
    optimizer = zero.shard(model, lambda g: torch.optim.Adam(g, lr=0.1), axis=axis, stage=stage)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(4, 7).double()).sum().backward()
    tensors = [
        t for b in optimizer.windows.buckets for t in (b.parameters, b.masters, b.gradient, b.reduced, *b.members)
    ]
    tensors += [p.grad for p in model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(size for size in storages.values() if size > 8)  # NaN in place of a weight has one element


@pytest.mark.parametrize(
    ("stage", "elements", "expected"),
    [
        (0, 416, 416 * (8 + 8 + 16)),
        (1, 448, 448 * (8 + (8 + 16) // 2)),
        (2, 448, 448 * (8 + (8 + 16) // 2)),
        (3, 448, 448 * (8 + 8 + 16) // 2),
    ],
)
def test_states_take_what_the_formula_says(stage: int, elements: int, expected: int) -> None:
    assert STAGES[stage].state_bytes(elements, 2, parameter=8, moments=16, gradient=8) == expected
    assert run(2, stored_between_backward_and_step, stage) == [expected] * 2


# ------------------------------------------------------------------------------------- gradients that need no copy


def gradient_of_a_full_bucket(stage: int, padded: bool) -> bool:
    """Whether the gradient that autograd made is what the bucket sends."""
    axis = core.Mesh(dp=2).dp
    model = torch.nn.Linear(63 if padded else 64, 8, bias=False)
    arrived: list[int] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad.data_ptr()))
    optimizer = zero.shard(model, lambda groups: torch.optim.SGD(groups, lr=0.1), axis=axis, stage=stage)
    sent: list[int] = []
    [bucket] = optimizer.reducer.buckets
    collect = bucket._collect
    bucket._collect = lambda: sent.append((flat := collect()).data_ptr()) or flat  # type: ignore[method-assign]
    model(torch.ones(2, model.in_features)).sum().backward()
    return sent == arrived


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_fills_its_bucket_is_not_copied(stage: int) -> None:
    assert run(2, gradient_of_a_full_bucket, stage, False) == [True, True]
    assert run(2, gradient_of_a_full_bucket, stage, True) == [False, False]  # padding is missing
