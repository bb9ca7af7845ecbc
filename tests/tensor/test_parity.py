"""A model divided over 2 and 4 ranks trains as in one process: outputs, losses, norms, every gradient, weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_core as core
import nanopar_tensor as tensor
import nanopar_tensor.linear
from nanopar_core.testing import assert_parity, run, train_plainly

os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS, ROWS, LENGTH, VOCABULARY = 5, 3, 7, 53


class Block(nn.Module):
    """Its own input is added to what the two layers make of it, and a third layer reads something else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.beside = nn.Linear(9, 20), nn.Linear(9, 20, bias=False)
        self.other = nn.Linear(9, 20)
        self.down = nn.Linear(20, 9)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.beside(x) + self.other(x.sin()))


class Own(nn.Module):
    """A user's model: odd sizes, a vocabulary that no number of ranks divides, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 9, padding_idx=3)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(9, VOCABULARY)
        self.blocks[0].up.weight.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OWN_PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.beside": "colwise",
    "blocks.*.other": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def hugging_face(kind: str, **changes: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 32,
        "use_cache": False,
        "pad_token_id": 0,
        **changes,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def phi_moe() -> nn.Module:
    models = pytest.importorskip("nanopar_models")
    shape = models.PhiMoEConfig.preset("nano", vocab_size=VOCABULARY, num_hidden_layers=2, num_key_value_heads=2)
    return models.PhiMoE(shape)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "qwen3": lambda: hugging_face("Qwen3", tie_word_embeddings=False),
    "qwen3 tied": lambda: hugging_face("Qwen3", tie_word_embeddings=True),
    "llama": lambda: hugging_face("Llama", mlp_bias=True),
    "phi-moe": phi_moe,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def tokens(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(input_ids=ids)
    return output if isinstance(output, Tensor) else output.logits


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def divided(name: str, size: int) -> tuple[nn.Module, dict[str, core.ParamSpec], core.Axis]:
    axis = core.Mesh(tp=size).tp
    model = build(name)
    return model, tensor.parallelize(model, OWN_PLAN if name == "own" else None, axis), axis


def on_this_rank(name: str, size: int) -> dict[str, Any]:
    """What zero does with specs, by hand."""
    model, specs, _ = divided(name, size)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = adamw(list(trained.values()))
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(step))
        loss.backward()
        for n, p in trained.items():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            for axis in specs.get(n, core.ParamSpec()).grad_sum:
                core.all_reduce(p.grad, axis, out=p.grad)
        gradients = tensor.merge_state_dict({n: p.grad.clone() for n, p in trained.items()}, specs)
        pieces = [(p.grad, tuple(s.axis for s in specs.get(n, core.ParamSpec()).shards)) for n, p in trained.items()]
        norm = core.global_norm(pieces)
        for p in trained.values():
            p.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    weights = tensor.merge_state_dict({n: p.detach() for n, p in model.named_parameters()}, specs)
    with torch.no_grad():
        outputs = {"logits": logits_of(model, tokens(STEPS))}
    return {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights, "outputs": outputs}


def reference(name: str) -> dict[str, Any]:
    model = build(name)
    result = train_plainly(model, [[(tokens(step),)] for step in range(STEPS)], loss_of, adamw, max_norm=1.0)
    with torch.no_grad():
        return {**result, "outputs": {"logits": logits_of(model, tokens(STEPS))}}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_divided_models_train_as_in_one_process(name: str, size: int) -> None:
    rtol = None  # 1e-9
    if name.split()[0] in ("qwen3", "llama"):
        pytest.importorskip("transformers")
        rtol = 1e-5  # transformers' norms and rotary tables are fp32 in any model
    assert_parity(reference(name), run(size, on_this_rank, name, size), axes={"tp": size}, rtol=rtol)


# ------------------------------------------------------------------------------------------------- cost, per layer


def calls_of_a_step(name: str) -> list[str]:
    model, _, _ = divided(name, 2)
    with core.ledger() as book:
        for step in range(2):
            book.clear()
            loss_of(model, tokens(step)).backward()
        return [f"{record.op} {record.label}: {record.bytes}" for record in book.records]


def test_one_collective_per_block_and_direction() -> None:
    pytest.importorskip("transformers")
    calls = run(2, calls_of_a_step, "qwen3")[0]
    sent = ROWS * LENGTH * 24 * 8  # 2 (N-1)/N = 1 times the activations, in float64
    layers = [f"model.layers.{n}" for n in range(2)]
    forward = [
        f"all_reduce {layer}.{block}: {sent}" for layer in layers for block in ("self_attn.o_proj", "mlp.down_proj")
    ]
    backward = [f"all_reduce {layer}.{block}: {sent}" for layer in layers[::-1] for block in ("mlp", "self_attn")]
    logits = f"all_gather lm_head: {ROWS * LENGTH * 27 * 8}"  # rank 0 has 27 of 53 entries
    embedding = f"all_reduce model.embed_tokens: {sent}"
    assert calls == [embedding, *forward, logits, f"all_reduce lm_head: {sent}", *backward]


# ------------------------------------------------------------------------------------------- these tests see faults


def input_gradient_not_summed(name: str, size: int) -> dict[str, Any]:
    real = nanopar_tensor.linear.all_reduce

    def all_reduce(x: Tensor, axis: core.Axis, *, label: str = "", async_op: bool = False, **options: Any) -> Any:
        if async_op:  # the one in backward
            return core.Pending(x)
        return real(x, axis, label=label, **options)

    nanopar_tensor.linear.all_reduce = all_reduce  # type: ignore[assignment]
    return on_this_rank(name, size)


def bias_on_every_rank(name: str, size: int) -> dict[str, Any]:
    real = nanopar_tensor.linear.all_reduce

    def all_reduce(x: Tensor, axis: core.Axis, *, label: str = "", async_op: bool = False, **options: Any) -> Any:
        result = real(x, axis, label=label, async_op=async_op, **options)
        return result if async_op else result.add_(0.01)

    nanopar_tensor.linear.all_reduce = all_reduce  # type: ignore[assignment]
    return on_this_rank(name, size)


@pytest.mark.parametrize(
    ("broken", "diagnosis"),
    [
        (input_gradient_not_summed, "replicas on tp differ"),
        (bias_on_every_rank, "first deviation outputs.logits: no constant ratio"),
    ],
)
def test_these_tests_see_faults(broken: Callable[..., Any], diagnosis: str) -> None:
    with pytest.raises(AssertionError, match="differences from the reference") as failure:
        assert_parity(reference("own"), run(2, broken, "own", 2), axes={"tp": 2})
    assert re.search(diagnosis, str(failure.value)), str(failure.value)
