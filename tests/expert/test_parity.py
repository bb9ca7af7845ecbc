"""Models whose experts are divided train as in one process: outputs, losses, norms, every gradient, weights."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_expert as expert
from nanopar_core.sharding import merge_state_dict
from nanopar_core.testing import assert_parity, run, train_plainly
from nanopar_expert import dispatch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytestmark = pytest.mark.long

STEPS, ROWS, LENGTH, VOCABULARY = 5, 8, 7, 53


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)
        self.moe = expert.MoE(
            expert.TopKRouter(9, 8, 3, scores="sigmoid", groups=4, top_groups=2, scale=1.5),
            expert.Experts(8, 9, 5),
            shared=nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 9)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))  # type: ignore[no-any-return]


class Own(nn.Module):
    """A user's model: odd sizes, shared experts, frozen ones, and an input that needs no gradient before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 9)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(9, VOCABULARY)
        self.context_fn: Any = None
        self.embed.weight.requires_grad_(False)
        self.blocks[1].moe.experts.down_proj.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.context_fn is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
        return self.head(x)  # type: ignore[no-any-return]


def hugging_face(kind: str, **changes: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 20,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
        "use_cache": False,
        "pad_token_id": 0,
        **changes,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):  # some versions begin with zeros, where all experts tie
            nn.init.normal_(parameter)
    model.set_experts_implementation("eager")  # the only one for float64
    return model  # type: ignore[no-any-return]


def phi_moe() -> nn.Module:
    models = pytest.importorskip("nanopar_models")
    shape = models.PhiMoEConfig.preset("nano", vocab_size=VOCABULARY, num_hidden_layers=2, router_jitter_noise=0.2)
    return models.PhiMoE(shape)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "phi-moe": phi_moe,
    "mixtral": lambda: hugging_face("Mixtral"),
    "qwen3-moe": lambda: hugging_face("Qwen3Moe", num_experts=8, mlp_only_layers=[], norm_topk_prob=True),
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
    """The share of these rows in a step's mean."""
    losses = F.cross_entropy(logits_of(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return losses / (ROWS * (LENGTH - 1))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def recompute(model: Any, context_fn: Any) -> None:
    """As each kind of model is told to."""
    if isinstance(model, Own):
        model.context_fn = context_fn
    elif hasattr(model, "set_recompute"):
        model.set_recompute(True, context_fn)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})


@dataclasses.dataclass
class Way:
    """A layout, and how the model runs in it. Rows are divided among ``dp`` ranks; those of tp have the same."""

    dp: int
    ep: int
    tp: int = 1
    etp: int = 1
    chunks: int = 1
    recompute: bool = False
    uneven: bool = False
    fewest: int = 0
    forgets: str = ""

    def rows(self, rank: int) -> slice:
        if self.uneven:  # the first rank has none, or one where a model's attention cannot do that
            edges = [0, self.fewest, *range(ROWS - self.dp + 2, ROWS + 1)]
            return slice(edges[rank], edges[rank + 1])
        return slice(rank * ROWS // self.dp, (rank + 1) * ROWS // self.dp)


def on_this_rank(name: str, way: Way) -> dict[str, Any]:
    """What zero does with specs, by hand: gradients summed over their data axis, the norm counted once."""
    mesh = core.Mesh(dp=way.dp, tp=way.tp, ep=way.ep, etp=way.etp)
    model = build(name)
    specs = expert.parallelize(
        model,
        None,
        mesh.ep,
        data_axis=mesh.edp,
        tensor_axis=mesh.etp,
        token_axis=mesh.tp if way.etp == 1 else None,
        chunks=way.chunks,
    )
    if way.recompute:
        recompute(model, core.keep_communicated)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = adamw(list(trained.values()))
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(step)[way.rows(mesh.dp.rank)])
        loss.backward()
        for n, p in trained.items():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            axis = specs[n].data_axis if n in specs and way.forgets != "data axis" else mesh.dp
            if way.forgets != "dense" or n in specs:
                core.all_reduce(p.grad, axis or mesh.dp, out=p.grad)
        gradients = merge_state_dict({n: p.grad.clone() for n, p in trained.items()}, specs)
        shards = {n: tuple(s.axis for s in specs[n].shards) if n in specs else () for n in trained}
        if way.forgets == "norm":
            shards = dict.fromkeys(trained, ())
        norm = core.global_norm([(p.grad, shards[n]) for n, p in trained.items()])
        for p in trained.values():
            p.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        losses.append(core.all_reduce(loss.detach(), mesh.dp).item())
        norms.append(norm.item())
    weights = merge_state_dict({n: p.detach() for n, p in model.named_parameters()}, specs)
    return {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights}


def reference(name: str) -> dict[str, Any]:
    return train_plainly(build(name), [[(tokens(step),)] for step in range(STEPS)], loss_of, adamw, max_norm=1.0)


def check(name: str, way: Way) -> None:
    rtol = None  # 1e-9
    if name in ("mixtral", "qwen3-moe"):
        pytest.importorskip("transformers")
        rtol = 1e-5  # transformers' norms, routers and rotary tables are fp32 in any model
    found = run(way.dp * way.tp, on_this_rank, name, way)
    assert_parity(reference(name), found, axes={"dp": way.dp, "tp": way.tp}, rtol=rtol)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("dp", "ep"), [(2, 2), (4, 4), (4, 2)])
def test_divided_experts_train_as_in_one_process(name: str, dp: int, ep: int) -> None:
    check(name, Way(dp, ep))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("own", Way(2, 2, chunks=3)),
        ("own", Way(2, 2, recompute=True)),
        ("own", Way(4, 4, uneven=True, chunks=2)),
        ("phi-moe", Way(2, 2, recompute=True, chunks=2)),
        ("phi-moe", Way(2, 2, uneven=True)),
        ("phi-moe", Way(2, 2, tp=2, etp=2)),
        ("phi-moe", Way(2, 4, tp=2)),
        ("phi-moe", Way(1, 2, tp=2, recompute=True)),
        ("mixtral", Way(2, 2, uneven=True, fewest=1)),
        ("mixtral", Way(2, 2, tp=2, etp=2, chunks=2)),
        ("qwen3-moe", Way(2, 2, recompute=True)),
    ],
    ids=str,
)
def test_other_ways(name: str, way: Way) -> None:
    check(name, way)


def outputs_of(kind: str, divides: bool) -> dict[str, Any]:
    """In fp32, with the experts' implementation that transformers takes by itself; a rank whose tokens avoid it all."""
    torch.manual_seed(0)
    model: Any = hugging_face(kind, hidden_size=32, intermediate_size=16, moe_intermediate_size=16)
    model.set_experts_implementation("grouped_mm")
    ids = tokens(0)
    if divides:
        mesh = core.Mesh(dp=2, ep=2)
        specs = expert.parallelize(model, None, mesh.ep)
        ids = ids[mesh.dp.rank :: 2]
    for router in expert.routers_of(model).values():  # all to the first two experts, which the first rank has
        router.register_forward_hook(lambda _m, _x, out: (out[0], out[1], torch.arange(2).expand_as(out[2])))
    loss_of(model, ids).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    if divides:
        summed = {n: g if n in specs else core.all_reduce(g, mesh.dp) for n, g in gradients.items()}
        gradients = merge_state_dict(summed, specs)
    return {"gradients": gradients}


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_grouped_products_of_transformers_and_a_rank_without_rows(kind: str) -> None:
    pytest.importorskip("transformers")
    assert_parity(outputs_of(kind, False), run(2, outputs_of, kind, True), axes={"dp": 2}, rtol=2e-5)


# ------------------------------------------------------------------------------------------- these tests see faults


def expert_gradients_averaged(name: str, way: Way) -> dict[str, Any]:
    """The sum over a token's gradients divided by the ranks, as if the way back were a mean."""
    real = dispatch._Send.backward

    def divided(ctx: Any, *tickets: Tensor) -> Any:
        x, weights, nothing = real(ctx, *tickets)
        return x / 2, weights, nothing

    dispatch._Send.backward = staticmethod(divided)  # type: ignore[method-assign]
    return on_this_rank(name, way)


def weights_cut_off(name: str, way: Way) -> dict[str, Any]:
    """The router gets no gradient through what travels."""
    real = dispatch._Send.backward

    def cut(ctx: Any, *tickets: Tensor) -> Any:
        x, weights, nothing = real(ctx, *tickets)
        return x, torch.zeros_like(weights), nothing

    dispatch._Send.backward = staticmethod(cut)  # type: ignore[method-assign]
    return on_this_rank(name, way)


FAULTS: list[tuple[Callable[..., Any], Way, str]] = [
    (expert_gradients_averaged, Way(2, 2), "blocks.0"),
    (weights_cut_off, Way(2, 2), "router.weight"),
    (on_this_rank, Way(2, 2, forgets="dense"), "replicas on dp differ"),  # replicated gradients not reduced
    (on_this_rank, Way(4, 2, forgets="data axis"), "experts"),  # experts' gradients over the wrong group
    (on_this_rank, Way(2, 2, forgets="norm"), "norm"),  # each rank clips by its own norm
]


@pytest.mark.parametrize(("broken", "way", "diagnosis"), FAULTS)
def test_these_tests_see_faults(broken: Callable[..., Any], way: Way, diagnosis: str) -> None:
    with pytest.raises(AssertionError, match=r"differences? from the reference") as failure:
        assert_parity(reference("own"), run(way.dp, broken, "own", way), axes={"dp": way.dp})
    assert diagnosis in str(failure.value), str(failure.value)
