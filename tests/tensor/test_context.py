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


HF_LENGTH = 21


def packed_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens; documents of which the second row has two; positions within the document."""
    ids = torch.randint(VOCABULARY, (2, HF_LENGTH), generator=torch.Generator().manual_seed(7))
    documents = torch.ones(2, HF_LENGTH, dtype=torch.int64)
    documents[1, 8:] = 2
    positions = torch.arange(HF_LENGTH).repeat(2, 1)
    positions[1, 8:] -= 8
    return ids, documents, positions


def hf_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "Qwen3 with windows":
        windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        return hugging_face("Qwen3", **windows)
    return hugging_face(kind)


def hf_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def hf_on_this_rank(kind: str, method: str, cp: int, tp: int, what: str) -> dict[str, Any]:
    mesh, model = core.Mesh(cp=cp, tp=tp), hf_model(kind)
    specs = tensor.parallelize(model, None, mesh.tp, context_axis=mesh.cp, context_method=method)
    ids, documents, positions = packed_rows()
    labels = next_labels(ids, documents)
    part = {"input_ids": tensor.split_sequence(ids, mesh.cp)}
    if what != "causal":
        part["attention_mask"] = tensor.split_sequence(documents if what == "packed" else documents % 2, mesh.cp)
    if what == "packed":
        part["position_ids"] = tensor.split_sequence(positions, mesh.cp)
    if what == "padded":
        labels = next_labels(ids, documents % 2)
    logits = model(**part).logits
    hf_loss(logits, tensor.split_sequence(labels, mesh.cp, padding=-100)).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        for axis in (mesh.cp, *specs.get(name, core.ParamSpec()).grad_sum):
            core.all_reduce(parameter.grad, axis, out=parameter.grad)
        gradients[name] = parameter.grad
    whole = tensor.merge_sequence(logits, mesh.cp, HF_LENGTH)
    if what == "padded":
        whole = whole[documents == 1]
    return {"outputs": {"logits": whole}, "gradients": tensor.merge_state_dict(gradients, specs)}


def hf_plainly(kind: str, what: str) -> dict[str, Any]:
    model = hf_model(kind)
    ids, documents, positions = packed_rows()
    labels = next_labels(ids, documents if what != "padded" else documents % 2)
    more = {"packed": {"position_ids": positions}, "padded": {"attention_mask": documents % 2}, "causal": {}}[what]
    model.config.use_cache = False  # type: ignore[union-attr]  # with a cache packed rows are not told apart
    logits = model(input_ids=ids, **more).logits
    hf_loss(logits, labels).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "outputs": {"logits": logits.detach()[documents == 1] if what == "padded" else logits.detach()},
        "gradients": gradients,
    }


@pytest.mark.parametrize(
    ("kind", "method", "cp", "tp", "what"),
    [
        ("Llama", "ring", 2, 1, "causal"),
        ("Qwen3", "all_gather", 2, 2, "packed"),
        ("Qwen3", "ring", 2, 1, "padded"),
        ("Qwen3 with windows", "ulysses", 2, 1, "padded"),
        ("Qwen3 with windows", "ring", 4, 1, "packed"),
    ],
)
def test_hugging_face_models(kind: str, method: str, cp: int, tp: int, what: str) -> None:
    pytest.importorskip("transformers")
    found = run(cp * tp, hf_on_this_rank, kind, method, cp, tp, what)
    reference = hf_plainly(kind, what)
    assert_parity(reference, found, axes={"cp": cp, "tp": tp}, rtol=2e-5)


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


def hf_misused(how: str) -> None:
    axis, model = core.Mesh(cp=2).cp, hf_model("Qwen3")
    if how == "longrope":
        model.config.rope_parameters = {"rope_type": "longrope"}  # type: ignore[union-attr]
    tensor.parallelize(model, None, core.Mesh(cp=2).tp, context_axis=axis)
    ids = tensor.split_sequence(rows(0)[0], axis)
    if how == "labels":
        model(input_ids=ids, labels=ids)
    model(input_ids=ids, attention_mask=torch.ones(ROWS, LENGTH))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mask", r"attention_mask must be \[3, 8\], this rank's positions, not \[3, 13\]"),
        ("labels", "shift them before split_sequence"),
        ("longrope", "rotary positions of type longrope depend on the longest position"),
    ],
)
def test_hugging_face_models_misused(how: str, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=message):
        run(2, hf_misused, how)


def long_rope() -> None:
    import nanopar_models as models

    scaling = models.config.LongRope([1.0] * 4, [2.0] * 4, 1.0, 1.1, 8)
    config = models.PhiMoEConfig.preset("nano", rope_scaling=scaling, head_dim=8)
    axis = core.Mesh(cp=2).cp
    tensor.parallelize(models.PhiMoE(config), None, core.Mesh(cp=2).tp, context_axis=axis)


def test_long_rope_is_refused() -> None:
    pytest.importorskip("nanopar_models")
    with pytest.raises(ValueError, match="rotary positions of type LongRope depend on the longest position"):
        run(2, long_rope)
