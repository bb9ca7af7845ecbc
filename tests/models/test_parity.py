"""Our model against transformers' PhimoeForCausalLM: logits, loss and the gradient of every parameter."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_models as models
from nanopar_core.testing import assert_parity

SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [1.0 + 0.8 * i for i in range(8)]
LONGROPE = {
    "type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "short_mscale": 1.1,
    "long_mscale": 1.25,
    "original_max_position_embeddings": 48,
}


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 320, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding_mask(batch: int, length: int, side: str) -> Tensor:
    lengths = torch.tensor([length, length - 7, length // 2])[:batch]
    mask = (torch.arange(length) < lengths[:, None]).long()
    return mask.flip(1) if side == "left" else mask


def reference_loss(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """The definition, written out: mean over (position, next token) pairs in which both are real."""
    counted = labels[:, 1:] != -100
    if mask is not None:
        counted = counted & (mask[:, 1:] == 1) & (mask[:, :-1] == 1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits[:, :-1][counted].to(wide), labels[:, 1:][counted])


# Rounding seen is 2e-6 in gradients and less before. Where it is near nothing an absolute floor counts: k_proj.bias has
# a true gradient of almost zero (a softmax does not see a constant).
FP32 = {"outputs": 1.2e-6, "loss": 3e-7, "gradients": 5e-6}
FLOAT64 = dict.fromkeys(FP32, 1e-13)


def result_of(model: nn.Module, logits: Tensor, loss: Tensor) -> dict[str, Any]:
    """Loss, the logits that count, and the gradient of every parameter."""
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"outputs": {"logits": logits.detach()}, "loss": loss.detach(), "gradients": gradients}


def assert_logits(got: Tensor, want: Tensor) -> None:
    assert_parity({"outputs": {"logits": want}}, {"outputs": {"logits": got}}, rtol=FP32["outputs"])


def compare(
    pair: SimpleNamespace,
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    own_loss: bool = False,
    position_ids: Tensor | None = None,
) -> None:
    """Forward and backward of both; ``own_loss`` computes the reference's loss from its logits by definition."""
    labels = ids.clone()
    labels[:, : ids.shape[1] // 3] = -100
    want = pair.reference(input_ids=ids, labels=labels, attention_mask=mask, position_ids=position_ids)
    loss = reference_loss(want.logits, labels, mask) if own_loss else want.loss
    got = pair.ours(ids, labels=labels, attention_mask=mask, position_ids=position_ids)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask == 1
    assert got.logits.dtype == want.logits.dtype
    assert got.loss.dtype == loss.dtype
    assert_parity(
        result_of(pair.reference, want.logits[real], loss),
        result_of(pair.ours, got.logits[real], got.loss),
        rtol=FLOAT64 if want.logits.dtype == torch.float64 else FP32,
    )


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_fp32(make_pair, implementation):
    pair = make_pair()
    pair.reference.set_experts_implementation(implementation)
    for seed in (1, 2):  # twice: nothing may leak from one batch into the next
        compare(pair, tokens(2, 24, seed))


def test_float64(make_pair):
    pair = make_pair(dtype=torch.float64)
    assert next(pair.ours.parameters()).dtype == torch.float64
    compare(pair, tokens(2, 24), own_loss=True)


def test_bf16(make_pair):
    pair = make_pair(dtype=torch.bfloat16)
    ids = tokens(2, 24)
    want = pair.reference(input_ids=ids, labels=ids).loss
    got = pair.ours(ids, labels=ids)
    assert got.logits.dtype == torch.bfloat16 and got.loss.dtype == torch.float32
    assert_parity({"loss": want}, {"loss": got.loss}, rtol=3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(make_pair, side, dtype):
    pair = make_pair(dtype=dtype)
    compare(pair, tokens(3, 26), mask=padding_mask(3, 26, side), own_loss=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sliding_window(make_pair, dtype):
    pair = make_pair(dtype=dtype, sliding_window=20)
    compare(pair, tokens(2, 64), own_loss=dtype == torch.float64)
    wider = dataclasses.replace(pair.ours.config, sliding_window=21)
    other = models.PhiMoE(wider, dtype=dtype)
    other.load_state_dict(pair.ours.state_dict())
    with torch.no_grad():  # one key more or less shows
        assert (other(tokens(2, 64)).logits - pair.ours(tokens(2, 64)).logits).abs().max() > 1e-3


@pytest.mark.parametrize("length", [9, 10])
def test_sequences_as_long_as_the_window_and_one_longer(make_pair, length):
    compare(make_pair(sliding_window=9), tokens(2, length))


def test_sliding_window_with_left_padding(make_pair):
    pair = make_pair(sliding_window=9)
    compare(pair, tokens(3, 26), mask=padding_mask(3, 26, "left"), own_loss=True)


@pytest.mark.parametrize("length", [40, 48, 49, 64])
def test_longrope_as_transformers_does_it(make_pair, length):
    compare(make_pair(rope_scaling=LONGROPE, original_max_position_embeddings=48), tokens(2, length))


def test_longrope_float64(make_pair):
    pair = make_pair(dtype=torch.float64, rope_scaling=LONGROPE, original_max_position_embeddings=48)
    compare(pair, tokens(2, 64), own_loss=True)


def test_longrope_as_the_original_does_it(make_pair):
    """Beyond the original length the original code uses long_factor: our switch against a reference made to do so."""
    pair = make_pair(rope_scaling=LONGROPE, original_max_position_embeddings=48)
    changed = models.PhiMoE(dataclasses.replace(pair.ours.config, original_longrope=True))
    changed.load_state_dict(pair.ours.state_dict())
    with torch.no_grad():
        before = pair.reference(input_ids=tokens(2, 64)).logits
        assert_logits(changed(tokens(2, 48)).logits, pair.reference(input_ids=tokens(2, 48)).logits)
        pair.reference.config.rope_parameters["short_factor"] = LONG
        want = pair.reference(input_ids=tokens(2, 64)).logits
        assert_logits(changed(tokens(2, 64)).logits, want)
    assert (want - before).abs().max() > 0.1


def test_position_ids(make_pair):
    compare(
        make_pair(), tokens(2, 24), position_ids=torch.arange(24).mul(3)[None].expand(2, -1) + 5, mask=torch.ones(2, 24)
    )


def test_auxiliary_loss(make_pair):
    pair = make_pair(output_router_logits=True, router_aux_loss_coef=0.02)
    ids = tokens(2, 24)
    compare(pair, ids)
    want = pair.reference(input_ids=ids).aux_loss
    assert_parity({"outputs": {"aux_loss": want}}, {"outputs": {"aux_loss": pair.ours(ids).aux_loss}}, rtol=2.5e-7)
    assert 1.5 < want.item() < 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stochastic_router_with_the_same_seed(make_pair, seed):
    pair = make_pair(router_noise=True)
    pair.ours.set_noise(models.GeneratorNoise())
    pair.ours.train()
    pair.reference.train()
    ids = tokens(2, 24, seed)
    torch.manual_seed(seed)
    want = pair.reference(input_ids=ids, labels=ids)
    torch.manual_seed(seed)
    got = pair.ours(ids, labels=ids, sample_ids=torch.arange(2))
    expected = result_of(pair.reference, want.logits, want.loss)
    assert_parity(expected, result_of(pair.ours, got.logits, got.loss), rtol=FP32)
    with torch.no_grad():
        deterministic = pair.ours.eval()(ids).logits
    assert (deterministic - got.logits).abs().max() > 0.1  # the noise did something


def test_training_mode_is_deterministic_by_default(make_pair):
    pair = make_pair()
    ids = tokens(2, 24)
    pair.ours.train()
    with torch.no_grad():
        assert_logits(pair.ours(ids).logits, pair.reference(input_ids=ids).logits)


# Each fault of a predecessor's model must fail the comparison above.


class _BiasedRMSNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def _with_rms_norm(model: models.PhiMoE) -> None:
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer.set_submodule(name, _as_rms_norm(layer.get_submodule(name)))
    model.model.norm = _as_rms_norm(model.model.norm)


def _as_rms_norm(norm: nn.LayerNorm) -> nn.LayerNorm:
    wrong = _BiasedRMSNorm(norm.normalized_shape, eps=norm.eps)
    wrong.weight, wrong.bias = norm.weight, norm.bias
    return wrong


class _InterleavedCore(nn.Module):
    """Attention whose queries and keys were turned with interleaved pairs against half-split tables."""

    def __init__(self, core: nn.Module, theta: float) -> None:
        super().__init__()
        self.core, self.theta = core, theta

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.core(self.wrong(q), self.wrong(k), v, mask)

    def wrong(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        frequency = 1.0 / self.theta ** (torch.arange(0, size, 2) / size)
        angles = torch.arange(x.shape[2])[:, None] * frequency
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        a, b = x.chunk(2, -1)
        unturned = x * cos - torch.cat((-b, a), -1) * sin
        pairs = torch.stack((-unturned[..., 1::2], unturned[..., ::2]), -1).flatten(-2)
        return unturned * cos + pairs * sin


def _with_interleaved_rotation(model: models.PhiMoE) -> None:
    for layer in model.model.layers:
        layer.self_attn.core = _InterleavedCore(layer.self_attn.core, model.config.rope_theta)


class _SoftmaxTop2Router(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.t()
        best, indices = logits.topk(2, 1)
        return logits, best.softmax(1), indices


def _with_softmax_router(model: models.PhiMoE) -> None:
    for layer in model.model.layers:
        layer.mlp.router = _SoftmaxTop2Router(layer.mlp.router.weight)


class _UnitWeightRouter(_SoftmaxTop2Router):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, indices = super().forward(x)
        return logits, torch.ones_like(weights), indices


def _with_unit_weights(model: models.PhiMoE) -> None:
    for layer in model.model.layers:
        layer.mlp.router = _UnitWeightRouter(layer.mlp.router.weight)


def _with_a_lost_expert(model: models.PhiMoE) -> None:
    """One expert's gradient is dropped, forward is right."""
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj.register_hook(lambda gradient: gradient * (torch.arange(len(gradient)) != 3)[:, None, None])


FORWARD = "first deviation outputs.logits: no constant ratio; the forward pass has other weights, inputs or arithmetic"
PLANTS = {
    _with_rms_norm: FORWARD,
    _with_interleaved_rotation: FORWARD,
    _with_softmax_router: FORWARD,
    _with_unit_weights: FORWARD,
    _with_a_lost_expert: "first deviation model.layers.1.mlp.experts.gate_up_proj: no constant ratio",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_fail_the_comparison(make_pair, plant):
    pair = make_pair()
    compare(pair, tokens(2, 64))
    plant(pair.ours)
    with pytest.raises(AssertionError, match=re.escape(PLANTS[plant])):
        compare(pair, tokens(2, 64))
