"""Plans are checked before anything is touched: one error that names the place and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.plan import matches
from nanopar_core.testing import run
from nanopar_tensor.plan import STYLES


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj = nn.Linear(6, 4 * heads), nn.Linear(6, 4 * kv_heads)
        self.o_proj = nn.Linear(4 * heads, 6)


def axis(size: int) -> core.Axis:
    return core.Axis("tp", size, 0, None, (tuple(range(size)),), communicates=False)


def small(**children: nn.Module) -> nn.Module:
    return nn.ModuleDict(children)


TIED = small(a=nn.Embedding(8, 6), b=nn.Linear(6, 8, bias=False))
TIED["b"].weight = TIED["a"].weight  # type: ignore[index,union-attr,assignment]


@pytest.mark.parametrize(
    ("model", "plan", "size", "message"),
    [
        (small(a=nn.Linear(4, 4)), {"a": "columns"}, 2, r"plan\['a'\]: unknown style 'columns'; there are colwise, "),
        (
            small(a=nn.Linear(4, 4)),
            {"layers.*.a": "colwise"},
            2,
            r"plan\['layers.\*.a'\] \(colwise\) matches no module",
        ),
        (small(a=nn.Linear(4, 4)), {"a": "colwise", "*": "rowwise"}, 2, r"a is colwise by plan\['a'\] and rowwise by"),
        (
            small(a=nn.Linear(4, 7)),
            {"a": "colwise"},
            2,
            "a has 7 output features, which 2 ranks of axis tp do not divide",
        ),
        (small(a=nn.Linear(7, 4)), {"a": "rowwise"}, 2, "a has 7 input features, which 2 ranks"),
        (small(a=nn.LayerNorm(4)), {"a": "colwise"}, 2, "a is colwise by plan, which is for Linear, not LayerNorm"),
        (small(a=nn.Linear(4, 4)), {"a": "embedding_rowwise"}, 2, "which is for Embedding, not Linear"),
        (small(a=nn.Linear(4, 4)), {"a.weight": "colwise"}, 2, "a.weight is colwise by plan, which is for modules"),
        (small(a=nn.Linear(4, 4)), {"a": "packed_colwise"}, 2, "which is for a parameter of stacked experts"),
        (small(a=nn.Linear(4, 4)), {"a.weight": "packed_colwise"}, 2, r"which is for \[E, .., ..\], not \[4, 4\]"),
        (Attention(3, 1), {"q_proj": "colwise"}, 2, "q_proj has 3 heads, which 2 ranks of axis tp do not divide"),
        (Attention(6, 4), {"k_proj": "colwise"}, 3, "k_proj has 4 heads, which 3 ranks of axis tp do not divide"),
        (Attention(3, 1), {"o_proj": "rowwise"}, 2, "o_proj has 3 heads"),
        (
            TIED,
            {"b": "colwise_gather_output"},
            2,
            "a.weight and b.weight are one weight, and the plan divides b.weight",
        ),
        (small(a=nn.Linear(4, 4), d=nn.Dropout(0.1)), {"a": "colwise"}, 2, "d has dropout 0.1"),
    ],
)
def test_bad_plans(model: nn.Module, plan: dict[str, str], size: int, message: str) -> None:
    before = {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        tensor.parallelize(model, plan, axis(size))
    assert {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()} == before


def test_a_model_without_a_plan() -> None:
    with pytest.raises(ValueError, match="Linear carries no tensor-parallel plan: write one"):
        tensor.parallelize(nn.Linear(2, 2), None, axis(2))


def test_a_star_stands_for_one_part_of_a_name() -> None:
    layers = nn.ModuleList(small(a=nn.Linear(2, 2), mlp=small(a=nn.Linear(2, 2))) for _ in range(2))
    assert list(matches(layers, {"*.a": "colwise"}, STYLES)) == ["0.a", "1.a"]
    assert matches(layers, {"*.b": "colwise"}, STYLES, is_carried=True) == {}


def test_one_rank_changes_nothing() -> None:
    model = small(a=nn.Linear(4, 7))
    assert tensor.parallelize(model, {"a": "colwise_gather_output"}, core.Mesh().tp) == {}
    assert type(model["a"]) is nn.Linear  # type: ignore[index]


def state_dicts() -> dict[str, Any]:
    axis = core.Mesh(tp=2).tp
    torch.manual_seed(0)
    model = small(a=nn.Linear(4, 6), b=nn.Linear(6, 4), c=nn.Embedding(5, 4))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    plan = {"a": "colwise", "b": "rowwise", "c": "embedding_rowwise"}
    specs = tensor.parallelize(model, plan, axis)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    merged = {name: value.clone() for name, value in tensor.merge_state_dict(model.state_dict(), specs).items()}
    model.load_state_dict(tensor.split_state_dict({name: value + 1 for name, value in whole.items()}, specs))
    again = tensor.merge_state_dict(model.state_dict(), specs)
    return {
        "shapes": shapes,
        "merged": all(torch.equal(merged[name], whole[name]) for name in whole),
        "loaded": all(torch.equal(again[name], whole[name] + 1) for name in whole),
    }


def test_state_dicts_are_split_and_merged() -> None:
    for rank, found in enumerate(run(2, state_dicts)):
        rows = 3 - rank
        assert found["shapes"] == {
            "a.weight": [3, 4],
            "a.bias": [3],
            "b.weight": [4, 3],
            "b.bias": [4],
            "c.weight": [rows, 4],
        }
        assert found["merged"]
        assert found["loaded"]
