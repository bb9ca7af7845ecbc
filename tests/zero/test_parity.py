"""Several ranks train as one plain PyTorch process does on the global batch: losses, norms, gradients, weights.

In every stage, over models x optimizers x micro-batches x clipping x recomputation x sizes of buckets and units, of
which any two values of two factors meet in one case at least.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.zero.cases import (
    MODELS,
    OPTIMIZERS,
    Case,
    all_on_this_rank,
    assert_all,
    on_this_rank,
    pairwise,
    reference,
)
from torch import Tensor

import nanopar_core as core
import nanopar_zero.api
import nanopar_zero.buckets
from nanopar_core.testing import assert_parity, run
from nanopar_zero.buckets import Bucket
from nanopar_zero.windows import Windows

pytestmark = pytest.mark.long

FACTORS: dict[str, Any] = {
    "model": list(MODELS),
    "optimizer": list(OPTIMIZERS),
    "reduce": ["mean", "sum"],
    "dtype": [torch.float64, torch.float32],
    "micro_batches": [1, 2, 3],
    "no_sync": [True, False],
    "max_norm": [None, 0.1],
    "bucket_bytes": [1, 400, 10**8],
    "small_units": [True, False],
}
WINDOWS = {"prefetch": [0, 1, 2], "reshard_after_forward": [True, False]}
STAGES = [0, 1, 2, 3]
ONE_PARAMETER_EACH = 1
BY_STAGE = {
    stage: pairwise(**FACTORS, **(WINDOWS if stage == 3 else {}), stage=[stage]) for stage in STAGES
}  # for 2 ranks
ALL_STAGES = pairwise(**FACTORS, **WINDOWS, stage=STAGES)  # for 3 and 4 ranks
# Of mlp whose parameters have 105, 15, 135, 9, 27, 3 elements, cut in different places.
SIZES = [Case(bucket_bytes=size, stage=stage) for stage in (0, 1, 2) for size in (100, 500, 1000, 2000)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_as_one_process(stage: int) -> None:
    assert_all(BY_STAGE[stage], run(2, all_on_this_rank, BY_STAGE[stage]))


def test_four_ranks_train_as_one_process() -> None:
    assert_all(ALL_STAGES, run(4, all_on_this_rank, ALL_STAGES))


def test_buckets_of_any_size() -> None:
    assert_all(SIZES, run(4, all_on_this_rank, SIZES))


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_alone_is_plain_training(stage: int) -> None:
    case = Case("blocks", micro_batches=2, max_norm=0.1, stage=stage, small_units=True)
    assert_parity(reference(case), run(1, on_this_rank, case))


def in_stages(case: Case) -> list[dict[str, Any]]:
    """The results of the stages that make the same sums in the same order."""
    return all_on_this_rank([replace(case, stage=stage) for stage in STAGES])


@pytest.mark.parametrize("model", ["mlp", "blocks recomputed", "second skipped", "tied"])
def test_stages_are_equal_bit_for_bit(model: str) -> None:
    # On two ranks a sum has one order only. The norm has others, of parts and of buckets: so nothing is clipped.
    case = Case(model, dtype=torch.float32, optimizer="adam", micro_batches=2, no_sync=False, small_units=True)
    for by_stage in run(2, in_stages, case):
        first, *others = [{key: result[key] for key in ("loss", "gradients", "weights")} for result in by_stage]
        for other in others:
            assert_parity(first, other, rtol=0.0)


# ------------------------------------------------------------------------------------------- these tests see faults


def two_buckets_are_not_reduced(case: Case) -> dict[str, Any]:
    """Stage 0: those of fewer than 100 elements, all but the weights of 7 x 15 and 15 x 9."""
    real = nanopar_zero.buckets.all_reduce

    def all_reduce(tensor: Tensor, axis: core.Axis, **options: Any) -> Any:
        return real(tensor, replace(axis, communicates=tensor.numel() < 100), **options)

    nanopar_zero.buckets.all_reduce = all_reduce  # type: ignore[assignment]
    return on_this_rank(case)


def a_unit_is_not_reduced(case: Case) -> dict[str, Any]:
    """Stages 1 to 3: each rank keeps its part of its own gradient."""
    real = nanopar_zero.buckets.reduce_scatter

    def reduce_scatter(tensor: Tensor, axis: core.Axis, **options: Any) -> Any:
        if tensor.numel() >= 100:
            return real(tensor, axis, **options)
        return core.Pending(tensor.chunk(axis.size)[axis.rank].clone())

    nanopar_zero.buckets.reduce_scatter = reduce_scatter  # type: ignore[assignment]
    return on_this_rank(case)


def the_divisor_is_forgotten(case: Case) -> dict[str, Any]:
    real = nanopar_zero.api.Reduction
    nanopar_zero.api.Reduction = lambda *fields: real(*fields[:3], 1, fields[4])  # type: ignore[assignment,misc]
    return on_this_rank(case)


def a_rank_gets_the_part_of_another(case: Case) -> dict[str, Any]:
    real = nanopar_zero.buckets.reduce_scatter

    def reduce_scatter(tensor: Tensor, axis: core.Axis, **options: Any) -> Any:
        return real(torch.cat(tensor.chunk(axis.size)[::-1]), axis, **options)

    nanopar_zero.buckets.reduce_scatter = reduce_scatter  # type: ignore[assignment]
    return on_this_rank(case)


def a_gather_is_skipped(case: Case) -> dict[str, Any]:
    """What the other ranks have stays as it is, or in stage 3 zero."""
    real = nanopar_zero.buckets.all_gather

    def all_gather(part: Tensor, axis: core.Axis, *, out: Tensor, **options: Any) -> Any:
        if case.stage == 3:
            own = part.clone()
            out.zero_().chunk(axis.size)[axis.rank].copy_(own)
        return core.Pending(out) if options["label"] == "parameters" else real(part, axis, out=out, **options)

    nanopar_zero.buckets.all_gather = all_gather  # type: ignore[assignment]
    return on_this_rank(case)


def gathered_in_the_wrong_order(case: Case) -> dict[str, Any]:
    real = Bucket.wait_for_parameters

    def wait_for_parameters(bucket: Bucket) -> None:
        arrives = bucket.arriving is not None
        real(bucket)
        if arrives:
            bucket.parameters.copy_(torch.cat(bucket.parameters.chunk(2)[::-1]))

    Bucket.wait_for_parameters = wait_for_parameters  # type: ignore[method-assign]
    return on_this_rank(case)


def freed_too_early(case: Case) -> dict[str, Any]:
    """A unit is free when its forward begins."""
    real = Windows.forward_begins

    def forward_begins(windows: Windows, index: int) -> None:
        real(windows, index)
        if index == 2:
            windows.units[index].buckets[0].free()

    Windows.forward_begins = forward_begins  # type: ignore[method-assign]
    return on_this_rank(case)


RATIO = "off by a constant on all parameters: ratio 2.000 = size of axis dp: summed where it should be averaged"
OTHER_WEIGHTS = r"all gradients and loss\[0\] deviate without a constant ratio: .*or other initial weights"
BROKEN: list[tuple[Callable[[Case], Any], int, str]] = [
    (two_buckets_are_not_reduced, 0, "replicas on dp differ: gradient not reduced: 0.weight and 1 more .their sum is"),
    *((a_unit_is_not_reduced, stage, "0.bias and 3 more: no constant ratio") for stage in (1, 2)),
    (a_unit_is_not_reduced, 3, "4.weight and 1 more: no constant ratio"),
    *((the_divisor_is_forgotten, stage, RATIO) for stage in STAGES),
    *(
        (
            a_rank_gets_the_part_of_another,
            stage,
            "0.weight: the right values 64 elements too (early|late): .*2.weight: the right values 96",
        )
        for stage in (1, 2)
    ),
    (
        a_rank_gets_the_part_of_another,
        3,
        "2.weight: the right values 96 elements too (early|late): a part of another rank",
    ),
    *(
        (a_gather_is_skipped, stage, "weights, gradients do not: every element is right on one of the ranks: parts not")
        for stage in (1, 2)
    ),
    (a_gather_is_skipped, 3, OTHER_WEIGHTS),
    *(
        (gathered_in_the_wrong_order, stage, "first deviation 0.weight: the right values 64 elements too (early|late)")
        for stage in (1, 2)
    ),
    (gathered_in_the_wrong_order, 3, OTHER_WEIGHTS),
    (freed_too_early, 3, r"first value that is not finite: loss\[0\] of the candidate"),
]


@pytest.mark.parametrize(("broken", "stage", "diagnosis"), BROKEN)
def test_these_tests_see_faults(broken: Callable[[Case], Any], stage: int, diagnosis: str) -> None:
    case = Case(bucket_bytes=ONE_PARAMETER_EACH, stage=stage, small_units=True, steps=1)
    with pytest.raises(AssertionError, match="differences from the reference") as failure:
        assert_parity(reference(case), run(2, broken, case))
    assert re.search(diagnosis, str(failure.value).split("largest deviations")[0], re.DOTALL), str(failure.value)
