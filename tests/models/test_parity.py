"""Our model against transformers' PhimoeForCausalLM: logits, loss and the gradient of every parameter."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_models as models

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


def assert_gradients(ours: nn.Module, reference: nn.Module, tolerance: float) -> None:
    expected = dict(reference.named_parameters())
    assert set(expected) == {name for name, _ in ours.named_parameters()}
    scale = max(parameter.grad.norm().item() for parameter in expected.values())
    for name, parameter in ours.named_parameters():
        want = expected[name].grad
        assert parameter.grad is not None, name
        difference = (parameter.grad - want).norm().item()
        # k_proj.bias has a true gradient of almost zero (a softmax does not see a constant), hence the floor.
        assert difference <= tolerance * max(want.norm().item(), 1e-3 * scale), (name, difference, want.norm().item())


def compare(
    pair: SimpleNamespace,
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    logits_atol: float = 2e-5,
    loss_atol: float = 2e-6,
    gradient_rtol: float = 1e-5,
    own_loss: bool = False,
    position_ids: Tensor | None = None,
) -> None:
    """Forward and backward of both; ``own_loss`` computes the reference's loss from its logits by definition."""
    labels = ids.clone()
    labels[:, : ids.shape[1] // 3] = -100
    pair.ours.zero_grad()
    pair.reference.zero_grad()
    want = pair.reference(input_ids=ids, labels=labels, attention_mask=mask, position_ids=position_ids)
    loss = reference_loss(want.logits, labels, mask) if own_loss else want.loss
    got = pair.ours(ids, labels=labels, attention_mask=mask, position_ids=position_ids)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask == 1
    torch.testing.assert_close(got.logits[real], want.logits[real], atol=logits_atol, rtol=0)
    torch.testing.assert_close(got.loss, loss, atol=loss_atol, rtol=0)
    loss.backward()
    got.loss.backward()
    assert_gradients(pair.ours, pair.reference, gradient_rtol)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_fp32(make_pair, implementation):
    pair = make_pair()
    pair.reference.set_experts_implementation(implementation)
    for seed in (1, 2):  # twice: nothing may leak from one batch into the next
        compare(pair, tokens(2, 24, seed), logits_atol=5e-6)


def test_float64(make_pair):
    pair = make_pair(dtype=torch.float64)
    assert next(pair.ours.parameters()).dtype == torch.float64
    compare(pair, tokens(2, 24), logits_atol=1e-12, loss_atol=1e-12, gradient_rtol=1e-12, own_loss=True)


def test_bf16(make_pair):
    pair = make_pair(dtype=torch.bfloat16)
    ids = tokens(2, 24)
    want = pair.reference(input_ids=ids, labels=ids).loss
    got = pair.ours(ids, labels=ids)
    assert got.logits.dtype == torch.bfloat16 and got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss, want, atol=2e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(make_pair, side, dtype):
    pair = make_pair(dtype=dtype)
    exact = dtype == torch.float64
    compare(
        pair,
        tokens(3, 26),
        mask=padding_mask(3, 26, side),
        own_loss=True,
        logits_atol=1e-12 if exact else 2e-5,
        loss_atol=1e-12 if exact else 2e-6,
        gradient_rtol=1e-12 if exact else 1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sliding_window(make_pair, dtype):
    exact = dtype == torch.float64
    pair = make_pair(dtype=dtype, sliding_window=20)
    compare(
        pair,
        tokens(2, 64),
        own_loss=exact,
        logits_atol=1e-12 if exact else 2e-5,
        loss_atol=1e-12 if exact else 2e-6,
        gradient_rtol=1e-12 if exact else 1e-5,
    )
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
    compare(pair, tokens(2, 64), own_loss=True, logits_atol=1e-12, loss_atol=1e-12, gradient_rtol=1e-12)


def test_longrope_as_the_original_does_it(make_pair):
    """Beyond the original length the original code uses long_factor: our switch against a reference made to do so."""
    pair = make_pair(rope_scaling=LONGROPE, original_max_position_embeddings=48)
    changed = models.PhiMoE(dataclasses.replace(pair.ours.config, original_longrope=True))
    changed.load_state_dict(pair.ours.state_dict())
    with torch.no_grad():
        before = pair.reference(input_ids=tokens(2, 64)).logits
        torch.testing.assert_close(
            changed(tokens(2, 48)).logits, pair.reference(input_ids=tokens(2, 48)).logits, atol=2e-5, rtol=0
        )
        pair.reference.config.rope_parameters["short_factor"] = LONG
        want = pair.reference(input_ids=tokens(2, 64)).logits
        torch.testing.assert_close(changed(tokens(2, 64)).logits, want, atol=2e-5, rtol=0)
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
    torch.testing.assert_close(pair.ours(ids).aux_loss, want, atol=1e-6, rtol=0)
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
    want.loss.backward()
    torch.manual_seed(seed)
    got = pair.ours(ids, labels=ids, sample_ids=torch.arange(2))
    got.loss.backward()
    torch.testing.assert_close(got.logits, want.logits, atol=2e-5, rtol=0)
    torch.testing.assert_close(got.loss, want.loss, atol=2e-6, rtol=0)
    assert_gradients(pair.ours, pair.reference, 1e-5)
    with torch.no_grad():
        deterministic = pair.ours.eval()(ids).logits
    assert (deterministic - got.logits).abs().max() > 0.1  # the noise did something


def test_training_mode_is_deterministic_by_default(make_pair):
    pair = make_pair()
    ids = tokens(2, 24)
    pair.ours.train()
    with torch.no_grad():
        torch.testing.assert_close(pair.ours(ids).logits, pair.reference(input_ids=ids).logits, atol=2e-5, rtol=0)


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


@pytest.mark.parametrize(
    "plant", [_with_rms_norm, _with_interleaved_rotation, _with_softmax_router, _with_unit_weights]
)
def test_planted_faults_fail_the_comparison(make_pair, plant):
    pair = make_pair()
    compare(pair, tokens(2, 64))
    plant(pair.ours)
    with pytest.raises(AssertionError, match="not close"):
        compare(pair, tokens(2, 64))
