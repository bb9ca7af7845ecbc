"""A model divided over 2 and 4 ranks trains as in one process: outputs, losses, norms, every gradient, weights."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.testing import assert_parity, run, train_plainly
from nanopar_tensor.sequence import WholeSequence

os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytestmark = pytest.mark.long

STEPS, ROWS, LENGTH, VOCABULARY = 5, 3, 7, 53


class Block(nn.Module):
    """Its own input is added to what the two layers make of it, and a third layer reads something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)
        self.up, self.beside = nn.Linear(9, 20), nn.Linear(9, 20, bias=False)
        self.other = nn.Linear(9, 20)
        self.down = nn.Linear(20, 9)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.tanh(self.up(y)) * self.beside(y) + self.other(y.sin()))


class Own(nn.Module):
    """A user's model: odd sizes, a vocabulary that no number of ranks divides, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 9, padding_idx=3)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(9, bias=False)
        self.head = nn.Linear(9, VOCABULARY)
        self.context_fn: Any = None
        self.blocks[0].up.weight.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            recompute = partial(checkpoint, block, use_reentrant=False, context_fn=self.context_fn)
            x = block(x) if self.context_fn is None else recompute(x)
        return self.head(self.norm(x))


OWN_PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.beside": "colwise",
    "blocks.*.other": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.norm": "sequence_parallel",
    "norm": "sequence_parallel",
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


def divided(name: str, size: int, how: str = "") -> tuple[nn.Module, dict[str, core.ParamSpec], core.Axis]:
    """``how``: "sequence", "recompute", both or neither."""
    axis = core.Mesh(tp=size).tp
    model = build(name)
    specs = tensor.parallelize(model, OWN_PLAN if name == "own" else None, axis, sequence="sequence" in how)
    if "recompute" in how:
        recompute(model, tensor.keep_sums)
    return model, specs, axis


def recompute(model: nn.Module, context_fn: Any) -> None:
    """As each kind of model is told to."""
    if isinstance(model, Own):
        model.context_fn = context_fn
    elif hasattr(model, "set_recompute"):
        model.set_recompute(True, context_fn)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})


def on_this_rank(name: str, size: int, how: str = "") -> dict[str, Any]:
    """What zero does with specs, by hand."""
    model, specs, _ = divided(name, size, how)
    if "forgetful" in how:
        specs = {n: dataclasses.replace(spec, grad_sum=()) for n, spec in specs.items()}
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


WAYS = [
    *[(name, size, how) for name in MODELS for size in (2, 4) for how in ("", "sequence")],
    *[(name, 2, how) for name in ("own", "qwen3", "phi-moe") for how in ("recompute", "sequence recompute")],
]


@pytest.mark.parametrize(("name", "size", "how"), WAYS)
def test_divided_models_train_as_in_one_process(name: str, size: int, how: str) -> None:
    rtol = None  # 1e-9
    if name.split()[0] in ("qwen3", "llama"):
        pytest.importorskip("transformers")
        rtol = 1e-5  # transformers' norms and rotary tables are fp32 in any model
    assert_parity(reference(name), run(size, on_this_rank, name, size, how), axes={"tp": size}, rtol=rtol)


# ------------------------------------------------------------------------------------------------- cost, per layer


def calls_of_a_step(name: str, how: str = "") -> list[str]:
    model, _, _ = divided(name, 2, how)
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


def test_sequence_parallelism_sends_what_all_reduces_send_and_each_layers_input_again() -> None:
    pytest.importorskip("transformers")
    calls = run(2, calls_of_a_step, "qwen3", "sequence")[0]
    part, rest = (ROWS * n * 24 * 8 for n in (4, 3))  # rank 0 has 4 of 7 positions; it sends 3 of them in a sum
    embedding = ["all_reduce model.embed_tokens"]
    layers = [f"model.layers.{n}" for n in range(2)]
    forward, backward = [], []
    for layer in layers:
        for block, last in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            forward += [f"all_gather {layer}.{block}", f"reduce_scatter {layer}.{block}.{last}"]
    for layer in layers[::-1]:
        for block, last in (("mlp", "down_proj"), ("self_attn", "o_proj")):
            own = [
                f"{op} {layer}.{block}" for op in ("all_gather", "reduce_scatter")
            ]  # the input once more, its gradient
            backward += [f"all_gather {layer}.{block}.{last}", *own]
    head = ["all_gather lm_head", "all_gather lm_head", "reduce_scatter lm_head"]  # input, logits; gradient
    ending = ["all_gather model.layers.0"]  # the gradient of what was scattered
    assert [call.split(":")[0] for call in calls] == [*embedding, *forward, *head, *backward, *ending]
    sizes = {"all_gather": part, "reduce_scatter": rest, "all_reduce": part + rest}
    for call in calls:
        what, sent = call.split(": ")
        if sent != str(ROWS * LENGTH * 27 * 8):  # the logits
            assert int(sent) == sizes[what.split()[0]], call


@pytest.mark.parametrize("how", ["", "sequence"])
@pytest.mark.parametrize("name", ["qwen3", "phi-moe"])
def test_recomputation_sends_nothing_again(name: str, how: str) -> None:
    pytest.importorskip("transformers")
    plain, again = (sorted(run(2, calls_of_a_step, name, f"{how}{more}")[0]) for more in ("", " recompute"))
    assert again == plain


# ------------------------------------------------------------------------------------------- these tests see faults


def input_gradient_not_summed(name: str, size: int) -> dict[str, Any]:
    real = WholeSequence.sum

    def only_forward(self: WholeSequence, make: Any, sizes: Any, label: str) -> core.Pending[Tensor]:
        return real(self, make, sizes, label) if label.endswith("down") else core.Pending(make(0))

    WholeSequence.sum = only_forward  # type: ignore[method-assign]
    return on_this_rank(name, size)


def bias_on_every_rank(name: str, size: int) -> dict[str, Any]:
    real = WholeSequence.sum

    def with_bias(self: WholeSequence, make: Any, sizes: Any, label: str) -> core.Pending[Tensor]:
        def biased(number: int) -> Tensor:
            summand: Tensor = make(number)
            summand[..., 0] += 0.01 * label.endswith("down")
            return summand

        return real(self, biased, sizes, label)

    WholeSequence.sum = with_bias  # type: ignore[method-assign]
    return on_this_rank(name, size)


def norms_not_summed(name: str, size: int) -> dict[str, Any]:
    return on_this_rank(name, size, "sequence forgetful")


@pytest.mark.parametrize(
    ("broken", "diagnosis"),
    [
        (input_gradient_not_summed, "replicas on tp differ"),
        (bias_on_every_rank, "first deviation outputs.logits: no constant ratio"),
        (norms_not_summed, "replicas on tp differ"),
    ],
)
def test_these_tests_see_faults(broken: Callable[..., Any], diagnosis: str) -> None:
    with pytest.raises(AssertionError, match="differences from the reference") as failure:
        assert_parity(reference("own"), run(2, broken, "own", 2), axes={"tp": 2})
    assert re.search(diagnosis, str(failure.value)), str(failure.value)
