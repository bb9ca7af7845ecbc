"""Routers, against formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nanopar_expert as expert


def router(**options: Any) -> expert.TopKRouter:
    torch.manual_seed(0)
    return expert.TopKRouter(5, 8, **{"top_k": 3, **options})


def tokens() -> Tensor:
    return torch.randn(40, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_best_experts_and_their_weights(scores: str, normalize: bool) -> None:
    one, x = router(scores=scores, normalize=normalize, scale=2.5), tokens()
    logits, weights, indices = one(x)
    torch.testing.assert_close(logits, x @ one.weight.T)
    all_scores = logits.softmax(1) if scores == "softmax" else logits.sigmoid()
    right, places = all_scores.topk(3, 1)
    torch.testing.assert_close(weights, 2.5 * (right / right.sum(1, keepdim=True) if normalize else right))
    assert torch.equal(indices, places)


def test_equal_scores_go_to_the_first_experts() -> None:
    one = router()
    torch.nn.init.zeros_(one.weight)
    assert torch.equal(one(tokens())[2], torch.arange(3).expand(40, 3))


def test_a_bias_changes_the_choice_but_not_the_weights() -> None:
    one, x = router(bias=True, normalize=False), tokens()
    assert one.bias is not None
    one.bias[5] = 10.0
    logits, weights, indices = one(x)
    assert (indices[:, 0] == 5).all()
    torch.testing.assert_close(weights[:, 0], logits.softmax(1)[:, 5])
    assert "bias" in one.state_dict()


def test_groups_limit_the_choice() -> None:
    one, x = router(scores="sigmoid", groups=4, top_groups=2), tokens()
    logits, _, indices = one(x)
    for scores, chosen in zip(logits.sigmoid(), indices, strict=True):
        best = sorted(range(4), key=lambda group: -scores[2 * group : 2 * group + 2].sum().item())[:2]
        open_ones = [number for group in best for number in (2 * group, 2 * group + 1)]
        right = sorted(open_ones, key=lambda number: -scores[number].item())[:3]
        assert chosen.tolist() == right


def test_in_bf16_the_router_computes_in_fp32() -> None:
    one, x = router(), tokens().bfloat16()
    logits, weights, _ = one.bfloat16()(x)
    assert (logits.dtype, weights.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(logits, x.float() @ one.weight.float().T)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(one(x)[0], logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores": "tanh"}, 'scores must be "softmax" or "sigmoid"'),
        ({"top_k": 9}, "top_k=9: 8 experts can be chosen"),
        ({"groups": 3}, "3 groups, of which 1 are chosen, do not fit 8 experts"),
        ({"groups": 4, "top_groups": 1}, "top_k=3: 2 experts can be chosen"),
    ],
)
def test_numbers_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router(**options)
