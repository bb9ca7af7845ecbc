"""Cross-entropy of divided logits against torch's own, at its limits."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import nanopar_core as core
import nanopar_tensor as tensor
import nanopar_tensor.loss
from nanopar_core.grid import split_sizes
from nanopar_core.testing import assert_parity, run

TOKENS, VOCABULARY = 11, 23


def inputs(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, VOCABULARY, generator=numbers, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=numbers)
    labels[[0, 4]] = -100
    labels[5], labels[6] = 0, VOCABULARY - 1
    return logits, labels


def on_this_rank(size: int, scale: float, dtype: torch.dtype, chunk: int) -> dict[str, Any]:
    nanopar_tensor.loss.CHUNK_BYTES = chunk  # type: ignore[misc]
    axis = core.Mesh(tp=size).tp
    logits, labels = inputs(scale, dtype)
    sizes = split_sizes(VOCABULARY, size)
    part = logits.split(sizes, 1)[axis.rank].clone().requires_grad_()
    with core.ledger() as book:
        losses = tensor.cross_entropy(part, labels, axis, sizes=sizes)
        (losses * torch.arange(TOKENS)).sum().backward()
    assert [record.op for record in book.records] == ["all_gather"]
    assert book.records[0].bytes == (size - 1) * 2 * TOKENS * losses.element_size()
    assert part.grad is not None
    gradient = core.all_gather(part.grad.T.contiguous(), axis, sizes=sizes).T
    return {"outputs": {"losses": losses.detach()}, "gradients": {"logits": gradient.contiguous()}}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("scale", "chunk"), [(1.0, 1), (1.0, 2**22), (1e4, 200)])
def test_equals_torch(size: int, scale: float, chunk: int) -> None:
    logits, labels = inputs(scale, torch.float64)
    logits.requires_grad_()
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    (losses * torch.arange(TOKENS)).sum().backward()
    reference = {"outputs": {"losses": losses.detach()}, "gradients": {"logits": logits.grad}}
    assert_parity(reference, run(size, on_this_rank, size, scale, torch.float64, chunk), axes={"tp": size})


def test_bf16_is_summed_in_fp32() -> None:
    logits, labels = inputs(3.0, torch.bfloat16)
    wide = logits.float().requires_grad_()
    losses = F.cross_entropy(wide, labels, reduction="none", ignore_index=-100)
    (losses * torch.arange(TOKENS)).sum().backward()
    assert wide.grad is not None
    reference = {"outputs": {"losses": losses.detach()}, "gradients": {"logits": wide.grad.bfloat16()}}
    got = run(2, on_this_rank, 2, 3.0, torch.bfloat16, 2**22)
    assert_parity(reference, got, axes={"tp": 2}, rtol={"outputs": 1e-6, "gradients": 4e-3})


def mean_loss(labels: torch.Tensor, items: int | None) -> float:
    axis = core.Mesh(tp=2).tp
    logits, _ = inputs(1.0, torch.float64)
    sizes = split_sizes(VOCABULARY, 2)
    loss = tensor.VocabParallelLoss(axis, sizes)
    return loss(logits.split(sizes, 1)[axis.rank][None], labels[None], items).item()


@pytest.mark.parametrize("items", [None, 7])
def test_the_module_takes_the_place_of_a_models_loss(items: int | None) -> None:
    logits, labels = inputs(1.0, torch.float64)
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).item()
    assert_parity({"loss": total / (items or TOKENS - 2)}, [{"loss": x} for x in run(2, mean_loss, labels, items)])
    nothing = torch.full_like(labels, -100)
    assert run(2, mean_loss, nothing, items) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("logits", "labels", "sizes", "message"),
    [
        ((2, 3, 4), (2, 3), None, r"logits must be \[T, V/N\]"),
        ((2, 4), (3,), None, r"labels \[T\], not \[2, 4\] and \[3\]"),
        ((2, 4), (2,), [5], r"sizes \[5\] do not fit 4 logits"),
    ],
)
def test_bad_shapes(logits: Any, labels: Any, sizes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor.cross_entropy(torch.zeros(logits), torch.zeros(labels).long(), core.Mesh().tp, sizes=sizes)
