"""Divided layers called in unusual ways: what they give out is never stale, and nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.testing import assert_parity, run

PLAN = {"a": "colwise", "b": "colwise_gather_output", "down": "rowwise"}
Found = dict[str, Tensor]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.a(x).tanh())  # type: ignore[no-any-return]


Case = Callable[[Pair, Tensor], Found]


def weights_changed_between(m: Pair, x: Tensor) -> Found:
    m.a(x)
    with torch.no_grad():
        m.b.weight.mul_(2)
    return {"b": m.b(x)}


def replaced_between(m: Pair, x: Tensor) -> Found:
    m.a(x)
    with torch.no_grad():
        m.b.weight = nn.Parameter(m.b.weight * 3)
    return {"b": m.b(x)}


def gradients_only_later(m: Pair, x: Tensor) -> Found:
    with torch.no_grad():
        m.a(x)
    m.b(x).sin().sum().backward()
    assert m.b.weight.grad is not None
    return {"b": m.b(x)}


def frozen_between(m: Pair, x: Tensor) -> Found:
    m.b.requires_grad_(False)
    m.a(x)
    m.b.requires_grad_(True)
    m.b(x).sin().sum().backward()
    assert m.b.weight.grad is not None
    return {"b": m.b(x)}


def autocast_only_later(m: Pair, x: Tensor) -> Found:
    m, x = m.float(), x.float()
    m.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert m.b(x).dtype is torch.bfloat16
    return {"b": m.b(x).double().round(decimals=4)}


def float64_stays_under_autocast(m: Pair, x: Tensor) -> Found:
    with torch.autocast("cpu", torch.bfloat16):
        return {"y": m(x)}


def inference(m: Pair, x: Tensor) -> Found:
    with torch.inference_mode():
        z = x.clone()
        first = m.b(z)
        y = m(z)
        z.add_(1)
        return {"first": first.clone(), "y": y.clone(), "after": m.b(z).clone(), "again": m(z).clone()}


def inference_under_keep_sums(m: Pair, x: Tensor) -> Found:
    with torch.inference_mode():
        kept = {} if type(m.a) is nn.Linear else {"context_fn": tensor.keep_sums}
        return {"y": checkpoint(m, x, use_reentrant=False, **kept).clone()}


def one_vector(m: Pair, x: Tensor) -> Found:
    z = x[0, 0].clone().requires_grad_()
    y = m(z) + m.b(z).sum()
    y.sin().sum().backward()
    assert z.grad is not None
    return {"y": y, "x": z.grad}


def a_copy(m: Pair, x: Tensor) -> Found:
    twin = copy.deepcopy(m)
    with torch.no_grad():
        twin.a.weight.add_(1)
    return {"y": m(x), "twin": twin(x), "b": twin.b(x)}


CASES: list[Case] = [
    weights_changed_between,
    replaced_between,
    gradients_only_later,
    frozen_between,
    autocast_only_later,
    float64_stays_under_autocast,
    inference,
    inference_under_keep_sums,
    one_vector,
    a_copy,
]


def all_cases(divides: bool) -> dict[str, Any]:
    outputs = {}
    for number, case in enumerate(CASES):
        torch.manual_seed(number)
        model, x = Pair().double(), torch.randn(2, 3, 6, dtype=torch.float64)
        if divides:
            tensor.parallelize(model, PLAN, core.Mesh(tp=2).tp)
        outputs |= {f"{case.__name__} {name}": found.detach() for name, found in case(model, x).items()}
    return {"outputs": outputs}


def test_unusual_calls() -> None:
    assert_parity(all_cases(False), run(2, all_cases, True), axes={"tp": 2})


# -------------------------------------------------------------------- an attention module under sequence parallelism


class Attention(nn.Module):
    """Says ``head_dim``, so that its input is gathered at its entry."""

    head_dim = 4

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.q_proj, self.k_proj, self.o_proj = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def project(self, x: Tensor) -> Tensor:
        return self.q_proj(x) * self.k_proj(x).sigmoid()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint inside":
            return self.o_proj(checkpoint(self.project, x, use_reentrant=False))  # type: ignore[no-any-return]
        if self.how == "input changed in place":
            x += 1
        if self.how == "input changed between":
            y = self.q_proj(x.sin()) * self.k_proj(x)
            return self.o_proj(y)  # type: ignore[no-any-return]
        return self.o_proj(self.project(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Attention(how)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    tp_plan = {  # noqa: RUF012
        "layers.*.norm": "sequence_parallel",
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "norm": "sequence_parallel",
    }

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Layer(how), Layer(how)]), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


HOW = ("", "checkpoint inside", "input changed in place", "input changed between", "a copy")


def attention(divides: bool) -> dict[str, Any]:
    outputs, gradients = {}, {}
    for how in HOW:
        torch.manual_seed(0)
        model, x = Model(how).double(), torch.randn(2, 5, 6, dtype=torch.float64).requires_grad_()
        specs = {} if not divides else tensor.parallelize(model, None, core.Mesh(tp=2).tp, sequence=True)
        if how == "a copy":
            model, before = copy.deepcopy(model), model
            before(x[:, :4])
        y = model(x)
        y.sin().sum().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in found.items():
            for over in specs[name].grad_sum if name in specs else ():
                core.all_reduce(gradient, over, out=gradient)
        found = tensor.merge_state_dict(found, specs) | {"input": x.grad}  # type: ignore[dict-item]
        gradients |= {f"{how} {name}": gradient for name, gradient in found.items()}
        with torch.inference_mode():
            outputs |= {f"{how} y": y.detach(), f"{how} inference": model(x.detach()).clone()}
    return {"outputs": outputs, "gradients": gradients}


def test_an_attention_module_that_treats_its_input_unusually() -> None:
    assert_parity(attention(False), run(2, attention, True), axes={"tp": 2})


# --------------------------------------------------------------------------------------- nothing is kept afterwards


class Crossed(nn.Module):
    """Its two column layers read different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.a(x) * self.b(x.sin()))  # type: ignore[no-any-return]


def kept_after_forward() -> int:
    model = Crossed()
    tensor.parallelize(model, {"a": "colwise", "b": "colwise", "down": "rowwise"}, core.Mesh(tp=2).tp)
    model(torch.ones(2, 3, 6))
    return len(model.a.group._outputs)


def test_a_block_keeps_no_outputs_that_nobody_asked_for() -> None:
    assert run(2, kept_after_forward) == [0, 0]


# -------------------------------------------------------------------------------------------------- tied parameters


def tied() -> dict[str, Any]:
    axis = core.Mesh(tp=2).tp
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(10, 6), "head": nn.Linear(6, 10, bias=False)})
    model["head"].weight = model["embed"].weight  # type: ignore[index,union-attr,assignment]
    model["embed"].weight.note = "kept"  # type: ignore[index,union-attr,assignment]
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    specs = tensor.parallelize(model, {"embed": "embedding_rowwise", "head": "colwise"}, axis)
    merged = tensor.merge_state_dict(model.state_dict(), specs)
    model.load_state_dict(tensor.split_state_dict({name: value + 1 for name, value in whole.items()}, specs))
    again = tensor.merge_state_dict(model.state_dict(), specs)
    return {
        "names": sorted(specs),
        "merged": all(torch.equal(merged[name], whole[name]) for name in whole),
        "loaded": all(torch.equal(again[name], whole[name] + 1) for name in whole),
        "note": model["head"].weight.note,  # type: ignore[index,union-attr]
    }


def test_specs_name_a_tied_weight_under_all_its_names() -> None:
    for found in run(2, tied):
        assert found == {"names": ["embed.weight", "head.weight"], "merged": True, "loaded": True, "note": "kept"}


# ------------------------------------------------------------------------------------------------------------ errors


def small(**children: nn.Module) -> nn.Module:
    return nn.ModuleDict(children)


def watched() -> nn.Module:
    model = small(a=nn.Linear(4, 4))
    model["a"].register_forward_hook(lambda *_: None)  # type: ignore[index]
    return model


def watched_weight() -> nn.Module:
    model = small(a=nn.Linear(4, 4))
    model["a"].weight.register_hook(lambda gradient: gradient)  # type: ignore[index,union-attr,operator]
    return model


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.resid_pdrop = nn.Linear(4, 4), 0.2


@pytest.mark.parametrize(
    ("model", "style", "message"),
    [
        (watched(), "colwise", "a has hooks, which would be lost, since it is replaced: register them afterwards"),
        (watched_weight(), "rowwise", "a has hooks"),
        (small(a=nn.Embedding(4, 4, max_norm=2.0)), "embedding_rowwise", "a has max_norm=2.0, which a divided"),
        (small(a=nn.Embedding(4, 4, scale_grad_by_freq=True)), "embedding_rowwise", "a has scale_grad_by_freq=True"),
        (small(a=nn.Embedding(4, 4, sparse=True)), "embedding_rowwise", "a has sparse=True"),
        (Dropping(), "colwise", "has resid_pdrop 0.2: its random numbers"),
    ],
)
def test_what_cannot_be_divided(model: nn.Module, style: str, message: str) -> None:
    axis = core.Axis("tp", 2, 0, None, ((0, 1),), communicates=False)
    with pytest.raises(ValueError, match=message):
        tensor.parallelize(model, {"a": style}, axis)
