"""Several ranks train as one plain PyTorch process does on the global batch: losses, norms, gradients, weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.zero.cases import MODELS, OPTIMIZERS, Case, all_on_this_rank, on_this_rank, reference

import nanopar_zero.api
import nanopar_zero.buckets
from nanopar_core.testing import assert_parity, run

ONE_PARAMETER_EACH = 1
CASES = [
    *(Case(model) for model in MODELS),
    *(Case(model, bucket_bytes=ONE_PARAMETER_EACH) for model in MODELS),
    *(Case(model, bucket_bytes=400, optimizer="adam", micro_batches=2, no_sync=False) for model in MODELS),
    *(Case(model, bucket_bytes=400, optimizer="adamw fused", reduce="sum", micro_batches=3) for model in MODELS),
    *(
        Case(optimizer=optimizer, reduce=reduce, dtype=dtype, max_norm=max_norm)
        for optimizer in OPTIMIZERS
        for reduce in ("mean", "sum")
        for dtype in (torch.float64, torch.float32)
        for max_norm in (None, 0.1)
    ),
    *(Case(dtype=torch.float32, micro_batches=4, no_sync=no_sync, reduce="sum") for no_sync in (True, False)),
    *(Case(bucket_bytes=bucket_bytes) for bucket_bytes in (100, 500, 1000, 2000)),
]


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks(request: pytest.FixtureRequest) -> dict[Case, list[dict[str, Any]]]:
    """The results of all ranks by case."""
    by_rank = run(request.param, all_on_this_rank, CASES)
    return {case: [results[number] for results in by_rank] for number, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process_on_the_global_batch(case: Case, on_ranks: dict[Case, list[dict[str, Any]]]) -> None:
    assert_parity(reference(case), on_ranks[case], micro_batches=case.micro_batches)


def test_one_rank_alone_is_plain_training() -> None:
    case = Case(micro_batches=2, max_norm=0.1)
    assert_parity(reference(case), run(1, on_this_rank, case))


def two_buckets_are_not_reduced(case: Case) -> dict[str, Any]:
    def all_reduce(tensor: torch.Tensor, axis: Any, **options: Any) -> Any:
        alone = replace(axis, communicates=tensor.numel() < 100)  # the weights of 7 x 15 and 15 x 9 elements have more
        return real(tensor, alone, **options)

    real = nanopar_zero.buckets.all_reduce
    nanopar_zero.buckets.all_reduce = all_reduce  # type: ignore[assignment]
    return on_this_rank(case)


def the_divisor_is_forgotten(case: Case) -> dict[str, Any]:
    real = nanopar_zero.api.Reduction
    nanopar_zero.api.Reduction = lambda *fields: real(*fields[:3], 1, fields[4])  # type: ignore[assignment,misc]
    return on_this_rank(case)


@pytest.mark.parametrize(
    ("broken", "diagnosis"),
    [
        (
            two_buckets_are_not_reduced,
            "replicas on dp differ: gradient not reduced: 0.weight and 1 more (their sum is right)",
        ),
        (
            the_divisor_is_forgotten,
            "off by a constant on all parameters: ratio 2.000 = size of axis dp: summed where it should be averaged",
        ),
    ],
)
def test_these_tests_see_a_broken_reduction(broken: Any, diagnosis: str) -> None:
    case = Case(bucket_bytes=ONE_PARAMETER_EACH, steps=1)
    with pytest.raises(AssertionError, match="differences from the reference") as failure:
        assert_parity(reference(case), run(2, broken, case))
    assert diagnosis in str(failure.value)
