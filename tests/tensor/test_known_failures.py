"""Faults that comparable libraries have had, with the right values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.grid import split_sizes
from nanopar_core.testing import assert_parity, run

# ------------------------------------------------------------------------------ the bias of a row layer counts once


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.scale = nn.Parameter(torch.ones(4))
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.norm_after = nn.Identity()
        with torch.no_grad():
            self.up.weight.copy_(torch.eye(4))
            self.down.weight.fill_(1.0)
            self.down.bias.copy_(torch.tensor([10.0, 20.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm_after(self.down(self.up(self.norm(x) * self.scale)))


def two_steps(sequence: bool) -> dict[str, Any]:
    model, axis = TwoLayers(), core.Mesh(tp=2).tp
    between = dict.fromkeys(("norm", "scale", "norm_after"), "sequence_parallel")
    plan = {**between, "up": "colwise", "down": "rowwise"}
    specs = tensor.parallelize(model, plan, axis, sequence=sequence)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs, gradients = [], []
    for _ in range(2):
        y = model(torch.ones(1, 3, 4))
        y.sum().backward()
        for name, parameter in model.named_parameters():
            for over in specs.get(name, core.ParamSpec()).grad_sum:
                core.all_reduce(parameter.grad, over, out=parameter.grad)
        outputs.append(y[0, 0].tolist())
        gradients.append(model.down.bias.grad.tolist())  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return {"outputs": outputs, "gradients": gradients, "bias": model.down.bias.tolist()}


@pytest.mark.parametrize("sequence", [False, True])
def test_the_bias_of_a_row_layer_counts_once(sequence: bool) -> None:
    results = run(2, two_steps, sequence)
    for found in results:
        assert found["outputs"][0] == [14.0, 24.0]
        assert found["gradients"] == [[3.0, 3.0]] * 2
        assert found["bias"] == results[0]["bias"]


# ------------------------------------------------------------------------ a vocabulary that the ranks do not divide


def vocabulary_of_ten(tied: bool, zero_head: bool, told: bool) -> dict[str, Any]:
    axis = core.Mesh(tp=4).tp
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(10, 6), "head": nn.Linear(6, 10, bias=False)}).double()
    if tied:
        model["head"].weight = model["embed"].weight  # type: ignore[index,union-attr,assignment]
    if zero_head:
        nn.init.zeros_(model["head"].weight)  # type: ignore[index,arg-type]
    specs = tensor.parallelize(model, {"embed": "embedding_rowwise", "head": "colwise"}, axis)
    ids = torch.tensor([0, 2, 3, 8, 9, 5, 6])
    labels = torch.tensor([0, 2, 3, 8, 9, -100, 5])
    logits = model["head"](model["embed"](ids))  # type: ignore[index]
    sizes = split_sizes(10, 4) if told else None
    loss = tensor.cross_entropy(logits, labels, axis, sizes=sizes).sum() / 6
    loss.backward()
    names = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = tensor.merge_state_dict({name: grad for name, grad in names.items() if grad is not None}, specs)
    return {"loss": loss.item(), "gradients": whole}


@pytest.mark.parametrize(("tied", "told"), [(False, True), (True, True), (False, False)])
def test_a_vocabulary_that_the_ranks_do_not_divide(tied: bool, told: bool) -> None:
    for found in run(4, vocabulary_of_ten, False, True, told):
        assert math.isclose(found["loss"], math.log(10), rel_tol=1e-12)
    torch.manual_seed(0)
    embed, head = nn.Embedding(10, 6).double(), nn.Linear(6, 10, bias=False).double()
    if tied:
        head.weight = embed.weight
    labels = torch.tensor([0, 2, 3, 8, 9, -100, 5])
    logits = head(embed(torch.tensor([0, 2, 3, 8, 9, 5, 6])))
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    gradients = {"embed.weight": embed.weight.grad} | ({} if tied else {"head.weight": head.weight.grad})
    reference = {"loss": loss.item(), "gradients": gradients}
    assert_parity(reference, run(4, vocabulary_of_ten, tied, False, told), axes={"tp": 4})


def outside(what: str, value: int) -> None:
    axis = core.Mesh(tp=2).tp
    model = nn.ModuleDict({"embed": nn.Embedding(10, 6), "head": nn.Linear(6, 10)})
    tensor.parallelize(model, {"embed": "embedding_rowwise", "head": "colwise"}, axis)
    ids = torch.tensor([value if what == "id" else 1])
    logits = model["head"](model["embed"](ids))  # type: ignore[index]
    tensor.cross_entropy(logits, torch.tensor([value]), axis, sizes=[5, 5])


@pytest.mark.parametrize("what", ["id", "label"])
@pytest.mark.parametrize("value", [10, -1])
def test_what_is_outside_of_the_vocabulary_is_an_error(what: str, value: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        run(2, outside, what, value)


# ----------------------------------------------------------------------------------- ranks never route differently


def choices(size: int, sequence: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The experts that this rank chose in three steps, and its routers' weights, where almost every choice is close."""
    import nanopar_models as models

    axis = core.Mesh(tp=size).tp
    model = models.PhiMoE(models.PhiMoEConfig.preset("nano", vocab_size=64, num_hidden_layers=2), seed=1)
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.mlp.router.weight  # type: ignore[union-attr]
            router.copy_(router[:1] + 1e-7 * torch.randn(router.shape, generator=torch.Generator().manual_seed(2)))  # type: ignore[index,operator,union-attr]
    tensor.parallelize(model, None, axis, sequence=sequence)
    chosen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(lambda _m, _x, output: chosen.append(output[2].detach()))  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        ids = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(step))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return chosen, [layer.mlp.router.weight.detach() for layer in model.model.layers]  # type: ignore[union-attr]


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_choose_the_same_experts_where_scores_almost_tie(sequence: bool) -> None:
    pytest.importorskip("nanopar_models")
    first, *others = run(4, choices, 4, sequence)
    assert len(torch.cat(first[0]).unique()) > 4  # rounding decides
    for other in others:
        for kind, here in zip(first, other, strict=True):
            assert all(torch.equal(one, two) for one, two in zip(kind, here, strict=True))
