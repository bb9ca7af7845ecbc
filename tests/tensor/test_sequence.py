"""Sequence parallelism at its borders: odd calls, and errors that name the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tensor.test_parity import OWN_PLAN, VOCABULARY, Own, hugging_face
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.testing import assert_parity, run


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


def own(sequence: bool = True) -> tuple[nn.Module, dict[str, core.ParamSpec]]:
    torch.manual_seed(0)
    model = Own().double()
    return model, tensor.parallelize(model, OWN_PLAN, core.Mesh(tp=2).tp, sequence=sequence)


def two_forwards(model: nn.Module) -> dict[str, Any]:
    """Of one sequence, then of more and longer ones, before one backward pass; and one without gradients between."""
    first = model(ids(1, 5))
    with torch.no_grad():
        model(ids(2, 9))
    second = model(ids(3, 8))
    (first.sin().sum() + second.cos().sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"outputs": {"first": first.detach(), "second": second.detach()}, "gradients": gradients}


def two_forwards_on_this_rank() -> dict[str, Any]:
    model, specs = own()
    found = two_forwards(model)
    for name, gradient in found["gradients"].items():
        for over in specs[name].grad_sum if name in specs else ():
            core.all_reduce(gradient, over, out=gradient)
    return {**found, "gradients": tensor.merge_state_dict(found["gradients"], specs)}


def test_sequences_of_several_lengths_before_one_backward_pass() -> None:
    torch.manual_seed(0)
    assert_parity(two_forwards(Own().double()), run(2, two_forwards_on_this_rank), axes={"tp": 2})


def hidden_states(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = hugging_face(kind).model
    axis = core.Mesh(tp=2).tp
    tensor.parallelize(model, None, axis, sequence=True)  # type: ignore[arg-type]
    return {"outputs": {"hidden": model(input_ids=ids(2, 7)).last_hidden_state.detach()}}  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_without_a_head_the_last_norm_gives_all_positions(kind: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hugging_face(kind).model
    reference = {"outputs": {"hidden": model(input_ids=ids(2, 7)).last_hidden_state.detach()}}  # type: ignore[operator]
    assert_parity(reference, run(2, hidden_states, kind), axes={"tp": 2}, rtol=1e-5)


# ---------------------------------------------------------------------------------- odd uses of one divided block


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.beside, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, how: str) -> Tensor:
        y = self.norm(x)
        up, beside = self.up(y), self.beside(y)
        if how == "an output unused":
            beside = up.cos()
        if how == "a layer twice":
            beside = beside * self.up(y)
        return x + self.down(up.tanh() * beside)


class Odd(nn.Module):
    tp_plan = {  # noqa: RUF012
        "layers.0.norm": "sequence_parallel",
        "layers.0.up": "colwise",
        "layers.0.beside": "colwise",
        "layers.0.down": "rowwise",
        "norm": "sequence_parallel",
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([OddBlock()]), nn.LayerNorm(6)

    def forward(self, x: Tensor, how: str) -> Tensor:
        return self.norm(self.layers[0](x, how))


ODD = [  # shape, how, whether the input needs a gradient, frozen
    ((1, 5, 6), "", True, ""),
    ((5, 6), "", True, ""),
    ((4, 6), "", False, ""),
    ((2, 5, 6), "an output unused", True, ""),
    ((2, 5, 6), "a layer twice", True, ""),
    ((2, 5, 6), "backward twice", True, ""),
    ((2, 5, 6), "recomputed twice", True, ""),
    ((2, 4, 6), "", False, "layers.0.up.weight layers.0.beside.weight"),
    ((2, 4, 6), "", False, "layers.0.norm.weight layers.0.norm.bias"),
    ((2, 4, 6), "", True, "layers.0.up.weight layers.0.up.bias layers.0.down.weight"),
]


def odd_uses(sequence: bool | None) -> dict[str, Any]:
    """Of plain torch with None."""
    gradients: dict[str, Tensor] = {}
    for number, (shape, how, needs_gradient, frozen) in enumerate(ODD):
        torch.manual_seed(number)
        model = Odd().double()
        x = torch.randn(shape, dtype=torch.float64).requires_grad_(needs_gradient)
        for name in frozen.split():
            model.get_parameter(name).requires_grad_(False)
        specs = {} if sequence is None else tensor.parallelize(model, None, core.Mesh(tp=2).tp, sequence=sequence)
        if how == "recomputed twice":
            kept = {} if sequence is None else {"context_fn": tensor.keep_sums}
            y: Any = checkpoint(model, x, how, use_reentrant=False, **kept)
            y = checkpoint(model, y, how, use_reentrant=False, **kept)
        else:
            y = model(x, how)
        y.sin().sum().backward(retain_graph=True)
        if how.endswith("twice"):
            y.sin().sum().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in found.items():
            for over in specs[name].grad_sum if name in specs else ():
                core.all_reduce(gradient, over, out=gradient)
        found = tensor.merge_state_dict(found, specs) | ({} if x.grad is None else {"input": x.grad})
        gradients |= {f"{number} {how} {name}": gradient for name, gradient in found.items()}
    return {"gradients": gradients}


@pytest.mark.parametrize("sequence", [False, True])
def test_odd_uses_of_a_block(sequence: bool) -> None:
    assert_parity(odd_uses(None), run(2, odd_uses, sequence), axes={"tp": 2})


# ------------------------------------------------------------------------------------------------------------ errors


def last_position_only() -> None:
    model = hugging_face("Qwen3")
    tensor.parallelize(model, None, core.Mesh(tp=2).tp, sequence=True)
    model(input_ids=ids(2, 7), logits_to_keep=1)


def hidden_states_of_all_layers() -> None:
    model = hugging_face("Qwen3")
    tensor.parallelize(model, None, core.Mesh(tp=2).tp, sequence=True)
    model(input_ids=ids(2, 7), output_hidden_states=True)


def some_positions_selected() -> None:
    own()[0].head(torch.ones(2, 1, 9))  # type: ignore[operator]


def one_position() -> None:
    own()[0](ids(2, 1))


def changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.up(x))
            y += x
            return self.last(y).sin()

    model = InPlace()
    tensor.parallelize(model, {"up": "colwise", "down": "rowwise"}, core.Mesh(tp=2).tp)
    x = torch.ones(2, 3, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=False, context_fn=tensor.keep_sums).sum().backward()


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (last_position_only, ValueError, r"logits_to_keep=1: under sequence parallelism positions cannot be selected"),
        (hidden_states_of_all_layers, ValueError, r"output_hidden_states: under sequence parallelism a rank has some"),
        (some_positions_selected, ValueError, r"has 0 of the 0 positions scattered last, but 1 were given"),
        (one_position, ValueError, r"at least 2 positions, one for each rank of axis tp, not \[2, 1, 9\]"),
        (changed_in_place, RuntimeError, r"changed in place .* use y = y \+ x in place of y \+= x"),
    ],
)
def test_misuse(function: Any, error: type[Exception], message: str) -> None:
    if function in (last_position_only, hidden_states_of_all_layers):
        pytest.importorskip("transformers")
    with pytest.raises(error, match=message):
        run(2, function)


def axis_of_two() -> core.Axis:
    return core.Axis("tp", 2, 0, None, ((0, 1),), communicates=False)


def test_plans_that_say_too_little() -> None:
    plan = {name: style for name, style in OWN_PLAN.items() if style != "sequence_parallel"}
    with pytest.raises(ValueError, match="the plan of Own has no module of style sequence_parallel"):
        tensor.parallelize(Own(), plan, axis_of_two(), sequence=True)
    plan |= {"blocks.0.norm": "sequence_parallel", "norm": "sequence_parallel"}
    with pytest.raises(ValueError, match=r"blocks.1.norm.weight lies between divided layers, but the plan does not"):
        tensor.parallelize(Own(), plan, axis_of_two(), sequence=True)
