"""Attention over divided sequences equals attention in one process: outputs and gradients, for all three methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.testing import run
from nanopar_tensor.context import METHODS
from nanopar_tensor.zigzag import by_rank, in_order, padded_length, positions_of

pytestmark = pytest.mark.long

BATCH, HEADS, WIDTH = 2, 4, 6
# length, key and value heads, whether there are documents, window
CASES = [
    (16, 4, False, None),
    (16, 2, False, None),
    (13, 1, False, None),
    (19, 2, True, None),
    (16, 2, False, 5),
    (21, 4, True, 4),
    (3, 2, True, None),
]


def inputs(length: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, heads, length, WIDTH) for heads in (HEADS, groups, groups)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def documents_of(length: int) -> Tensor:
    """Two rows: three documents, and one behind which there is padding."""
    first = torch.arange(length) * 3 // length + 1
    return torch.stack([first, (torch.arange(length) < length - 2).long()])


def plainly(length: int, groups: int, documents: bool, window: int | None) -> dict[str, Tensor]:
    q, k, v = (x.requires_grad_() for x in inputs(length, groups))
    places = torch.arange(length)
    seen = (places[:, None] >= places)[None]
    if window is not None:
        seen = seen & (places[:, None] - places < window)
    if documents:
        seen = seen & (documents_of(length)[:, :, None] == documents_of(length)[:, None])
    k_all, v_all = (x.repeat_interleave(HEADS // groups, 1) for x in (k, v))
    scores = (q @ k_all.transpose(-1, -2) * 0.3).masked_fill(~seen[:, None], -torch.inf)
    out = scores.softmax(-1) @ v_all
    (out.sin() * weight_of(length)).sum().backward()
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}  # type: ignore[dict-item]


def weight_of(length: int) -> Tensor:
    return torch.arange(1, length + 1)[:, None] / length


def divided(size: int, method: str, case: tuple[int, int, bool, int | None]) -> dict[str, Tensor]:
    length, groups, documents, window = case
    axis = core.Mesh(cp=size).cp
    attention = tensor.ContextAttention(axis, method)
    q, k, v = (tensor.split_sequence(x, axis, dim=2).requires_grad_() for x in inputs(length, groups))
    local = tensor.split_sequence(documents_of(length), axis) if documents else None
    mask = attention.make_mask(local, q.shape[2], 0, window, q.device)
    out = attention(q, k, v, mask, scale=0.3)
    weight = tensor.split_sequence(weight_of(length), axis, dim=0)  # 0 for what is padded
    (out.sin() * weight).sum().backward()
    found = {"out": out, "q": q.grad, "k": k.grad, "v": v.grad}
    return {name: tensor.merge_sequence(x, axis, length, dim=2) for name, x in found.items() if x is not None}


def all_cases(size: int, method: str) -> list[dict[str, Tensor]]:
    return [divided(size, method, case) for case in CASES]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("method", list(METHODS))
def test_equals_attention_in_one_process(method: str, size: int) -> None:
    for found in run(size, all_cases, size, method):
        for case, here in zip(CASES, found, strict=True):
            for name, right in plainly(*case).items():
                error = (here[name] - right).abs().max().item()
                assert error < 1e-11, f"{case} {name}: {error}"


def in_bf16(method: str) -> float:
    axis = core.Mesh(cp=2).cp
    parts = [tensor.split_sequence(x, axis, dim=2).bfloat16() for x in inputs(16, 2)]
    out = tensor.ContextAttention(axis, method)(*parts)
    q, k, v = (x.bfloat16().float() for x in inputs(16, 2))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    whole = tensor.merge_sequence(out, axis, 16, dim=2)
    assert whole.dtype is torch.bfloat16
    return (whole.float() - right).abs().max().item()


@pytest.mark.parametrize("method", list(METHODS))
def test_in_bf16(method: str) -> None:
    assert max(run(2, in_bf16, method)) < 0.02


# ------------------------------------------------------------------------------------------------------- the division


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_has_two_chunks_of_the_same_causal_work(ranks: int) -> None:
    length = padded_length(5 * ranks, ranks)
    assert length % (2 * ranks) == 0
    parts = [positions_of(rank, ranks, length) for rank in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    assert len({int((part + 1).sum()) for part in parts}) == 1  # keys that the queries of a rank see
    whole = torch.arange(length)
    assert torch.equal(by_rank(whole, ranks, 0), torch.cat(parts))
    assert torch.equal(in_order(torch.cat(parts), ranks, 0), whole)


# -------------------------------------------------------------------------------------------------------------- cost


def calls(size: int, method: str) -> dict[tuple[str, str], Any]:
    axis = core.Mesh(cp=size).cp
    parts = [tensor.split_sequence(x, axis, dim=2).requires_grad_() for x in inputs(16, 2)]
    with core.ledger() as book:
        out = tensor.ContextAttention(axis, method)(*parts)
        forward = {op: (total.calls, total.bytes) for (op, _), total in book.totals().items()}
        book.clear()
        out.sum().backward()
        return {"forward": forward, "backward": {op: (t.calls, t.bytes) for (op, _), t in book.totals().items()}}  # type: ignore[dict-item]


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_sent(size: int) -> None:
    token = BATCH * WIDTH * 8 * 16 // size  # of one head
    both = 2 * 2 * token  # keys and values of 2 heads
    found = run(size, calls, size, "all_gather")[1]
    assert found == {
        "forward": {"all_gather": (1, (size - 1) * both)},
        "backward": {"reduce_scatter": (1, (size - 1) * both)},
    }
    found = run(size, calls, size, "ring")[1]
    assert found == {
        "forward": {"send_recv": (size - 1, (size - 1) * both)},
        "backward": {"send_recv": (2 * size - 1, (2 * size - 1) * both)},
    }
    heads = HEADS + 2 * max(2, size)  # key and value heads are repeated for 4 ranks
    sent = (2, (size - 1) * (heads + HEADS) * token // size)
    found = run(size, calls, size, "ulysses")[1]
    assert found == {"forward": {"all_to_all": sent}, "backward": {"all_to_all": sent}}


# ------------------------------------------------------------------------------------------------------------ errors


def three_heads() -> None:
    axis = core.Mesh(cp=2).cp
    q = torch.randn(1, 3, 4, 6)
    tensor.ContextAttention(axis, "ulysses")(q, q, q)


def test_errors() -> None:
    axis = core.Mesh().cp
    with pytest.raises(ValueError, match="context method 'star': there are all_gather, ulysses, ring"):
        tensor.ContextAttention(axis, "star")
    q = torch.randn(1, 2, 4, 6)
    with pytest.raises(ValueError, match="not 4 and 8; cached keys cannot be used"):
        tensor.ContextAttention(axis)(q, torch.cat([q, q], 2), torch.cat([q, q], 2))
    with pytest.raises(ValueError, match="context parallelism cannot use cached keys"):
        tensor.ContextAttention(axis).make_mask(None, 1, 7, None, q.device)
    with pytest.raises(ValueError, match="2 ranks of axis cp do not divide 3 heads"):
        run(2, three_heads)
