"""Models whose sequences are divided train as in one process, alone and with divided weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tensor.test_parity import STEPS, VOCABULARY, adamw, build, hugging_face
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.testing import assert_parity, run, train_plainly

LENGTH, ROWS = 13, 3


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and their documents: two in the first row, padding behind the second."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    documents = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    documents[0, 5:] = 2
    documents[1, -3:] = 0
    return ids, documents


def next_labels(ids: Tensor, documents: Tensor) -> Tensor:
    """-100 where the next token is another document's, or padding."""
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    same = F.pad(documents[:, 1:], (0, 1)) == documents
    return labels.masked_fill(~same | (documents == 0), -100)


def loss_of(model: nn.Module, ids: Tensor, documents: Tensor) -> Tensor:
    labels = next_labels(ids, documents)
    logits = model(input_ids=ids, attention_mask=documents).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (labels != -100).sum()


def on_this_rank(cp: int, tp: int, method: str, how: str) -> dict[str, Any]:
    mesh = core.Mesh(cp=cp, tp=tp)
    model = build("phi-moe")
    specs = tensor.parallelize(
        model, None, mesh.tp, sequence="sequence" in how, context_axis=mesh.cp, context_method=method
    )
    if "recompute" in how:
        model.set_recompute(True, tensor.keep_sums)  # type: ignore[operator]
    parameters = dict(model.named_parameters())
    optimizer = adamw(list(parameters.values()))
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, documents = rows(step)
        labels = next_labels(ids, documents)
        counted = (labels != -100).sum()
        ids, documents = (tensor.split_sequence(x, mesh.cp) for x in (ids, documents))
        labels = tensor.split_sequence(labels, mesh.cp, padding=-100)
        logits = model(input_ids=ids, attention_mask=documents).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
        for name, parameter in parameters.items():
            for axis in (mesh.cp, *specs.get(name, core.ParamSpec()).grad_sum):
                core.all_reduce(parameter.grad, axis, out=parameter.grad)
        gradients = tensor.merge_state_dict({n: p.grad.clone() for n, p in parameters.items()}, specs)
        shards = {n: tuple(s.axis for s in specs.get(n, core.ParamSpec()).shards) for n in parameters}
        norm = core.global_norm([(p.grad, shards[n]) for n, p in parameters.items()])
        for parameter in parameters.values():
            parameter.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        losses.append(core.all_reduce(loss.detach(), mesh.cp).item())
        norms.append(norm.item())
    weights = tensor.merge_state_dict({n: p.detach() for n, p in parameters.items()}, specs)
    return {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights}


def reference() -> dict[str, Any]:
    return train_plainly(build("phi-moe"), [[rows(step)] for step in range(STEPS)], loss_of, adamw, max_norm=1.0)


WAYS = [
    *[(2, 1, method, "") for method in ("all_gather", "ulysses", "ring")],
    *[(4, 1, method, "") for method in ("all_gather", "ulysses", "ring")],
    (2, 2, "all_gather", "sequence recompute"),
    (2, 2, "ulysses", ""),
    (2, 2, "ring", "sequence"),
]


@pytest.mark.parametrize(("cp", "tp", "method", "how"), WAYS)
def test_divided_sequences_train_as_in_one_process(cp: int, tp: int, method: str, how: str) -> None:
    pytest.importorskip("nanopar_models")
    assert_parity(reference(), run(cp * tp, on_this_rank, cp, tp, method, how), axes={"cp": cp, "tp": tp})


# ---------------------------------------------------------------------------------------------- Hugging Face's models


def hugging_face_on_this_rank(kind: str) -> dict[str, Any]:
    """As the README shows it."""
    from transformers import AttentionInterface

    axis = core.Mesh(cp=2).cp
    attention = tensor.ContextAttention(axis, "ring")

    def divided(_module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _mask: Any, scaling: float, **_more: Any) -> Any:
        return attention(q, k, v, scale=scaling).transpose(1, 2), None

    AttentionInterface.register("nanopar_context", divided)
    torch.manual_seed(0)
    model = hugging_face(kind)
    model.set_attn_implementation("nanopar_context")  # type: ignore[operator]
    ids, _ = rows(0)
    positions = tensor.split_positions(LENGTH, axis)[None]
    logits = model(input_ids=tensor.split_sequence(ids, axis), position_ids=positions).logits
    labels = tensor.split_sequence(F.pad(ids[:, 1:], (0, 1), value=-100), axis, padding=-100)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    gradients = {n: core.all_reduce(p.grad, axis) for n, p in model.named_parameters()}  # type: ignore[type-var]
    return {"outputs": {"logits": tensor.merge_sequence(logits, axis, LENGTH)}, "gradients": gradients}


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_a_hugging_face_model_by_its_attention_interface(kind: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hugging_face(kind)
    ids, _ = rows(0)
    logits = model(input_ids=ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    reference = {"outputs": {"logits": logits.detach()}, "gradients": gradients}
    assert_parity(reference, run(2, hugging_face_on_this_rank, kind), axes={"cp": 2}, rtol=2e-5)


# ------------------------------------------------------------------------------------------------------------ errors


def labels_in_a_chunk() -> None:
    model = build("phi-moe")
    axis = core.Mesh(cp=2).cp
    tensor.parallelize(model, None, core.Mesh(cp=2).tp, context_axis=axis)
    ids = tensor.split_sequence(rows(0)[0], axis)
    model(input_ids=ids, labels=ids)


def test_labels_must_be_shifted_before() -> None:
    pytest.importorskip("nanopar_models")
    with pytest.raises(ValueError, match="shift them before split_sequence"):
        run(2, labels_in_a_chunk)


def test_a_model_without_an_attention_core() -> None:
    axis = core.Axis("cp", 2, 0, None, ((0, 1),), communicates=False)
    with pytest.raises(ValueError, match="names no module of style attention_core"):
        tensor.parallelize(nn.ModuleDict({"a": nn.Linear(4, 4)}), {"a": "colwise"}, core.Mesh().tp, context_axis=axis)
