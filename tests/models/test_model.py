"""Seams, plans, padding, packing, recomputation, initial values: what other packages build on."""

import doctest
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

import nanopar_models as models
from nanopar_core.testing import assert_parity
from nanopar_models.torch_private import sdpa_backend


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 320, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_outputs(got: Any, want: Any) -> None:
    assert_parity({"outputs": want}, {"outputs": got}, rtol=2e-14)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def model(make_pair) -> models.PhiMoE:
    return make_pair(dtype=torch.float64).ours


def test_example_in_the_docstring():
    assert doctest.testmod(models).failed == 0
    assert set(models.__all__) == {name for name in vars(models) if name in models.__all__}


def test_parameter_names_are_transformers(make_reference):
    reference = make_reference()
    ours = models.PhiMoE(models.PhiMoEConfig.from_dict(reference.config.to_dict()), device="meta")
    want = {name: parameter.shape for name, parameter in reference.named_parameters()}
    assert {name: parameter.shape for name, parameter in ours.named_parameters()} == want
    assert set(ours.state_dict()) == set(want)  # no buffers


def test_plans_fit_the_model(model):
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    for plan in (model.tp_plan, model.ep_plan):
        for pattern in plan:
            name = pattern.replace("*", "2")
            assert name in modules or name in parameters, pattern
    assert list(model.pp_plan) == ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]


def test_plans_agree_with_transformers(model, make_reference):
    reference = make_reference()
    base = {f"model.{key}": style for key, style in reference.config.base_model_tp_plan.items()}
    assert base.items() <= model.tp_plan.items()
    assert reference._tp_plan.items() <= {**model.tp_plan}.items()
    assert {f"model.{key}": style for key, style in reference.config.base_model_ep_plan.items()} == model.ep_plan


def test_pipeline_plan_runs_module_by_module(model):
    """An executor that knows only the plan gets the model's logits."""
    ids = tokens(3, 14)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    want = model(ids, attention_mask=mask).logits
    values = {"input_ids": ids, "attention_mask": mask, "position_ids": None, "sample_ids": None, "cache": None}
    for name, (inputs, outputs) in model.pp_plan.items():
        module = model.get_submodule(name)
        for part in module if isinstance(module, nn.ModuleList) else [module]:
            values[outputs[0]] = part(*(values[key] for key in inputs))
            if isinstance(module, nn.ModuleList):
                named = part(**{key: values[key] for key in inputs[1:]}, hidden_states=values[inputs[0]])
                assert named.shape == values[outputs[0]].shape
                assert list(inspect.signature(part.forward).parameters)[: len(inputs)] == inputs
    assert_outputs(values["logits"], want)


def test_every_seam_can_be_replaced(model):
    called = []

    class Spy(nn.Module):
        def __init__(self, name: str, inner: nn.Module) -> None:
            super().__init__()
            self.name, self.inner = name, inner

        def forward(self, *args):
            called.append(self.name)
            return self.inner(*args)

    ids = tokens(2, 8)
    want = model(ids, labels=ids).loss.item()
    names = ["self_attn.core", "mlp.router", "mlp.experts", "self_attn", "mlp"]
    seams = [f"model.layers.1.{name}" for name in names] + ["model.embed_tokens", "lm_head", "loss"]
    for name in seams:
        model.set_submodule(name, Spy(name, model.get_submodule(name)))
    assert model(ids, labels=ids).loss.item() == want
    assert set(called) == set(seams)


def test_padding_visits_no_expert_and_changes_nothing(model):
    ids = tokens(3, 20)
    lengths = [20, 13, 6]
    want = [model(ids[i : i + 1, :n]).logits[0] for i, n in enumerate(lengths)]
    seen = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    for side in ("right", "left"):
        mask = torch.zeros_like(ids)
        padded = torch.full_like(ids, 7)
        positions = torch.zeros_like(ids)
        for i, n in enumerate(lengths):
            place = slice(0, n) if side == "right" else slice(20 - n, 20)
            mask[i, place], padded[i, place], positions[i, place] = 1, ids[i, :n], torch.arange(n)
        got = model(padded, attention_mask=mask, position_ids=positions).logits
        assert_outputs([got[i][mask[i] == 1] for i in range(3)], want)
    assert seen == [39, 39]


def test_a_batch_of_padding_only(model):
    ids = tokens(2, 5)
    out = model(ids, labels=ids, attention_mask=torch.zeros_like(ids))
    out.loss.backward()
    assert out.loss.item() == 0
    assert all(parameter.grad is not None and (parameter.grad == 0).all() for parameter in model.parameters())


@pytest.mark.parametrize("numbers", [(1, 2, 3), (3, 2, 1), (7, 1, 2)])
def test_packed_documents_do_not_see_each_other(model, numbers):
    """Each document has a number of its own, in any order."""
    a, b, c = tokens(1, 7, 1), tokens(1, 9, 2), tokens(1, 4, 3)
    packed = torch.cat((a, b, c, torch.zeros(1, 2, dtype=torch.long)), 1)
    documents = torch.tensor([[numbers[0]] * 7 + [numbers[1]] * 9 + [numbers[2]] * 4 + [0] * 2])
    positions = torch.cat([torch.arange(n) for n in (7, 9, 4, 2)])[None]
    got = model(packed, attention_mask=documents, position_ids=positions).logits
    want = torch.cat([model(ids).logits for ids in (a, b, c)], 1)
    assert_outputs(got[:, :20], want)


def test_causal_batches_need_no_mask(model):
    masks = []
    core = model.model.layers[0].self_attn.core
    core.register_forward_pre_hook(lambda _, args: masks.append(args[3]))
    ids = tokens(2, 12)
    right = torch.ones_like(ids)
    right[1, 8:] = 0
    for mask in (None, torch.ones_like(ids), right, right.bool()):
        model(ids, attention_mask=mask)
    assert masks == [None] * 4
    model(ids, attention_mask=right.flip(1))
    assert masks[-1].shape == (2, 1, 12, 12)


@pytest.mark.parametrize("noise", [None, models.CounterNoise(3), models.GeneratorNoise()])
def test_recompute_gives_bit_equal_gradients(make_pair, noise):
    model = make_pair(router_noise=noise is not None).ours.train()
    if noise is not None:
        model.set_noise(noise)
    ids = tokens(2, 24)
    calls = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for on in (False, True):
        model.set_recompute(on)
        model.zero_grad()
        torch.manual_seed(5)
        model(ids, labels=ids, sample_ids=torch.arange(2)).loss.backward()
        gradients.append({"gradients": gradients_of(model)})
    assert len(calls) == 3  # once, then twice
    assert_parity(*gradients, rtol=0.0)


def test_recompute_keeps_less(make_pair):
    model = make_pair().ours
    ids = tokens(2, 24)

    def kept_bytes() -> int:
        storages = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids, labels=ids).loss
        kept = sum(size for pointer, size in storages.items() if pointer not in own)
        del loss
        return kept

    whole = kept_bytes()
    model.set_recompute()
    assert kept_bytes() < whole / 2


def test_recompute_with_the_auxiliary_loss(make_pair):
    model = make_pair(output_router_logits=True, router_aux_loss_coef=0.1).ours
    ids = tokens(2, 24)
    results = []
    for on in (False, True):
        model.set_recompute(on)
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        results.append({"outputs": {"aux_loss": out.aux_loss}, "loss": out.loss, "gradients": gradients_of(model)})
    assert_parity(*results, rtol=0.0)


def test_initial_values_depend_on_seed_and_name_alone():
    config = models.PhiMoEConfig.preset("nano", vocab_size=64)
    one = models.PhiMoE(config, seed=3)
    torch.manual_seed(123)
    torch.rand(7)
    two = models.PhiMoE(config, dtype=torch.float64)
    two.init_weights(3)
    for name, parameter in one.named_parameters():
        assert torch.equal(two.get_parameter(name), parameter.double()), name
        assert torch.equal(models.initial_value(name, parameter.shape, config, 3), parameter), name
    other = models.PhiMoE(config, seed=4)
    assert not torch.equal(other.lm_head.weight, one.lm_head.weight)
    weight = one.model.layers[0].mlp.experts.gate_up_proj
    assert abs(weight.std().item() / config.initializer_range - 1) < 0.02 and abs(weight.mean().item()) < 1e-3
    assert not torch.equal(weight, one.model.layers[1].mlp.experts.gate_up_proj)
    assert (one.model.norm.weight == 1).all() and (one.lm_head.bias == 0).all()
    assert (one.model.layers[0].input_layernorm.bias == 0).all()


def test_attention_backend_is_reported(model):
    assert model.attention_backend(64) == model.attention_backend(64, masked=True) == "FLASH_ATTENTION"
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    assert sdpa_backend(q, k, k, None, True) == SDPBackend.FLASH_ATTENTION


def test_no_silent_slow_attention(model, monkeypatch):
    monkeypatch.setattr("nanopar_models.attention.sdpa_backend", lambda *_: SDPBackend.MATH)
    with pytest.warns(UserWarning, match="no fast attention kernel serves torch.float64 on cpu with head_dim 16"):
        model(tokens(1, 4))


def test_key_value_heads_are_repeated_only_where_that_helps(model, monkeypatch):
    ids = tokens(2, 12)
    want = model(ids).logits
    heads = []

    def choice(q, k, v, mask, causal):
        heads.append(k.shape[1])
        return SDPBackend.MATH if q.shape[1] != k.shape[1] else SDPBackend.EFFICIENT_ATTENTION

    monkeypatch.setattr("nanopar_models.attention.sdpa_backend", choice)
    assert_outputs(model(ids).logits, want)
    assert heads == [2, 4] * 3


def test_wrong_shapes_are_named(model):
    ids = tokens(2, 6)
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 6\], got \[2, 5\]"):
        model(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"position_ids must be \[2, 6\] or \[1, 6\], got \[6\]"):
        model(ids, position_ids=torch.arange(6))


def test_learns():
    """Ten steps on one batch: the loss of a fresh nano model starts at ln(vocabulary) and falls."""
    model = models.PhiMoE(models.PhiMoEConfig.preset("nano", vocab_size=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(10):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - 4.16) < 0.1 and losses[-1] < 0.6 * losses[0]
