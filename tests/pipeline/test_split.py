"""Models in stages: by their plans, balanced, under the names of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.pipeline.test_runner import Model
from torch import Tensor, nn

import nanopar_core as core
import nanopar_pipeline as pipeline
from nanopar_core.testing import assert_parity, run, train_plainly
from nanopar_pipeline import schedules
from nanopar_pipeline.split import balanced


def test_balanced() -> None:
    assert balanced([1, 1, 1, 1], 2) == [0, 2, 4]
    assert balanced([0, 1, 1, 1, 3], 2) == [0, 4, 5]
    assert balanced([5, 1, 1], 3) == [0, 1, 2, 3]
    assert balanced([1, 1, 1, 1, 1], 3) in ([0, 1, 3, 5], [0, 2, 4, 5], [0, 2, 3, 5], [0, 1, 3, 5])


def axis(size: int, rank: int = 0) -> core.Axis:
    return core.Axis("pp", size, rank, None, (tuple(range(size)),), communicates=False)


def test_names_stay_and_nothing_is_made() -> None:
    with torch.device("meta"):
        model = Model()
    names: list[str] = []
    for rank in range(4):
        stages, specs = pipeline.split(model, None, axis(4, rank))
        names += [name for stage in stages for name, _ in stage.named_parameters()]
        assert all(parameter.is_meta for stage in stages for parameter in stage.parameters())
        assert all(spec.stages is not None and not spec.grad_sum for spec in specs.values())
    assert names == [name for name, _ in model.named_parameters()]


def test_uneven_counts_and_costs() -> None:
    sizes = [len(pipeline.split(Model(), None, axis(3, rank))[0][0].items) for rank in range(3)]
    assert sum(sizes) == 8
    costs = {"layers.0": 1e9, "head": 1e9}
    parts = [[i.name for i in pipeline.split(Model(), None, axis(3, r), costs=costs)[0][0].items] for r in range(3)]
    assert parts[2] == ["head"]
    assert parts[0] in (["embed", "layers.0"], ["embed"])


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ({"embed": (["ids"], ["hidden"]), "none": (["hidden"], ["y"])}, {}, r"plan\['none'\] is no module of Model"),
        ({"embed": (["ids"], ["hidden"])}, {}, "layers.0.norm.weight belongs to no module of the plan"),
        (None, {"chunks": 5}, "8 modules are too few for 10 stages, 5 on each of 2 ranks"),
        (None, {"costs": {"tail": 1.0}}, "costs name tail, which is no item of the plan"),
    ],
)
def test_plans_that_do_not_fit(plan: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline.split(Model(), plan, axis(2), **options)


def test_a_model_without_a_plan() -> None:
    with pytest.raises(ValueError, match="Linear carries no pipeline plan"):
        pipeline.split(nn.Linear(2, 2), None, axis(2))


# -------------------------------------------------------------------------------------------------------- Phi-MoE


ROWS, LENGTH, VOCABULARY, STEPS = 6, 7, 41, 3


def phi_moe() -> Any:
    models = pytest.importorskip("nanopar_models")
    shape = models.PhiMoEConfig.preset("nano", vocab_size=VOCABULARY, num_hidden_layers=4)
    return models.PhiMoE(shape, seed=2).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1, 4:] = 0
    mask[4, 3:] = 2
    return ids, mask


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 40


def labels_of(ids: Tensor, mask: Tensor) -> Tensor:
    return ids.roll(1, 1).masked_fill(mask == 0, -100)


def plain_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return loss_fn(model(ids, attention_mask=mask).logits, labels_of(ids, mask))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def phi_moe_on_this_rank(name: str, chunks: int) -> dict[str, Any]:
    mesh = core.Mesh(pp=2)
    schedule = schedules.NAMED[name](2, chunks, 3)
    stages, _ = pipeline.split(phi_moe(), None, mesh.pp, chunks=chunks, placement=schedule.placement)
    runner = pipeline.Runner(stages, schedule, mesh.pp, loss_fn)
    parameters = {n: p for stage in stages for n, p in stage.named_parameters()}
    optimizer = adamw(list(parameters.values()))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, mask = batch(step)
        losses.append(runner.step({"input_ids": ids, "attention_mask": mask}, labels_of(ids, mask)).item())
        optimizer.step()
    lists: list[Any] = [None, None]
    torch.distributed.all_gather_object(lists, {name: p.detach() for name, p in parameters.items()})
    return {"loss": losses, "weights": lists[0] | lists[1]}


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zbv", 2)])
def test_phi_moe_by_its_plan(name: str, chunks: int) -> None:
    right = train_plainly(phi_moe(), [[batch(step)] for step in range(STEPS)], plain_loss, adamw)
    found = run(2, phi_moe_on_this_rank, name, chunks)
    assert_parity({key: right[key] for key in ("loss", "weights")}, found, axes={"pp": 2})


# ------------------------------------------------------------------------------------------------- Hugging Face's


def hugging_face(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "tie_word_embeddings": kind == "Qwen3",
    }
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).double()


def hugging_face_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return loss_fn(model(input_ids=ids, attention_mask=(mask > 0).long()).logits, labels_of(ids, mask))


def hugging_face_on_this_rank(kind: str, name: str, chunks: int) -> dict[str, Any]:
    mesh = core.Mesh(pp=2)
    schedule = schedules.NAMED[name](2, chunks, 3)
    model = hugging_face(kind)
    every = list(model.state_dict())
    stages, specs = pipeline.split(model, None, mesh.pp, chunks=chunks, placement=schedule.placement)
    runner = pipeline.Runner(stages, schedule, mesh.pp, loss_fn)
    parameters = {n: p for stage in stages for n, p in stage.named_parameters()}
    assert set(parameters) < set(every)
    optimizer = adamw(list(dict.fromkeys(parameters.values())))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, mask = batch(step)
        inputs = {"input_ids": ids, "attention_mask": (mask > 0).long()}
        losses.append(runner.step(inputs, labels_of(ids, mask)).item())
        for parameter_name, spec in specs.items():
            for over in spec.grad_sum:
                gradient = parameters[parameter_name].grad
                core.all_reduce(gradient, over, out=gradient)  # type: ignore[arg-type]
        optimizer.step()
    lists: list[Any] = [None, None]
    torch.distributed.all_gather_object(lists, {name: p.detach() for name, p in parameters.items()})
    weights = lists[0] | lists[1]
    if kind == "Qwen3":
        assert torch.equal(weights.pop("lm_head.weight"), weights["model.embed_tokens.weight"])
    return {"loss": losses, "weights": weights}


@pytest.mark.parametrize(
    ("kind", "name", "chunks"), [("Qwen3", "1f1b", 1), ("Llama", "interleaved", 2), ("Qwen3", "zbv", 2)]
)
def test_hugging_face_models_by_their_own_code(kind: str, name: str, chunks: int) -> None:
    right = train_plainly(hugging_face(kind), [[batch(step)] for step in range(STEPS)], hugging_face_loss, adamw)
    found = run(2, hugging_face_on_this_rank, kind, name, chunks)
    assert_parity({key: right[key] for key in ("loss", "weights")}, found, axes={"pp": 2}, rtol=2e-5)


def test_a_body_without_a_head() -> None:
    with pytest.raises(ValueError, match="Qwen3Model has no head; split the model around it"):
        pipeline.split(hugging_face("Qwen3").model, None, axis(2))
