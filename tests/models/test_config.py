"""Configurations: the presets' sizes, config.json both ways, and one clear error for what does not fit."""

import dataclasses
import json

import pytest

import nanopar_models as models

# The hub's file of Phi-tiny-MoE-instruct.
PHI_TINY = """
{"_name_or_path": "Phi-tiny-MoE", "architectures": ["PhiMoEForCausalLM"], "attention_bias": true,
 "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_slimmoe.PhiMoEConfig"}, "bos_token_id": 1,
 "eos_token_id": 32000, "expert_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_dropout": 0.0,
 "hidden_size": 4096, "initializer_range": 0.02, "input_jitter_noise": 0.01, "intermediate_size": 448,
 "lm_head_bias": true, "max_position_embeddings": 4096, "model_type": "phimoe", "num_attention_heads": 16,
 "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 4, "num_local_experts": 16,
 "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
 "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 2047, "tie_word_embeddings": false,
 "torch_dtype": "bfloat16", "transformers_version": "4.43.3", "use_cache": true, "vocab_size": 32064}
"""


@pytest.mark.parametrize(("preset", "parameters"), [("phi-tiny-moe", 3_755_220_288), ("phi-mini-moe", 7_647_632_704)])
def test_presets_have_the_published_size(preset, parameters):
    model = models.PhiMoE(models.PhiMoEConfig.preset(preset), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_preset_equals_the_hubs_file():
    assert models.PhiMoEConfig.from_dict(json.loads(PHI_TINY)) == models.PhiMoEConfig.preset("phi-tiny-moe")


def test_nano_is_small_and_fits_the_grouped_kernel():
    config = models.PhiMoEConfig.preset("nano", vocab_size=51)
    model = models.PhiMoE(config, device="meta")
    assert 1.0e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.4e6
    assert config.hidden_size % 16 == config.intermediate_size % 16 == config.head_dim % 16 == 0


def test_round_trip_and_transformers_reads_the_same(sizes):
    transformers = pytest.importorskip("transformers")
    config = models.PhiMoEConfig.from_dict({**sizes, "model_type": "phimoe"})
    written = json.loads(json.dumps(config.to_dict()))
    assert models.PhiMoEConfig.from_dict(written) == config
    assert "router_noise" not in written
    noisy = dataclasses.replace(config, router_noise=True)
    assert models.PhiMoEConfig.from_dict(json.loads(json.dumps(noisy.to_dict()))) == noisy
    theirs = transformers.PhimoeConfig.from_dict(written)
    for name in sizes:
        if name != "rope_theta":
            assert getattr(theirs, name) == sizes[name], name
    assert theirs.rope_parameters["rope_theta"] == 10000.0
    assert models.PhiMoEConfig.from_dict(json.loads(theirs.to_json_string())) == config


def test_longrope_round_trip(sizes):
    scaling = {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "short_mscale": 1.1,
        "long_mscale": 1.2,
    }
    values = {**sizes, "model_type": "phimoe", "rope_scaling": scaling, "original_max_position_embeddings": 64}
    config = models.PhiMoEConfig.from_dict(values)
    assert config.rope_scaling is not None and config.rope_scaling.original_max_position_embeddings == 64
    assert models.PhiMoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type must be 'phimoe', got 'mixtral'"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok must be 2"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"hidden_size": "96"}, "hidden_size must be int, got '96'"),
        ({"hidden_size": True}, "hidden_size must be int, got True"),
        ({"hidden_size": 0}, "hidden_size must be positive, got 0"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be float"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"eos_token_id": ["a"]}, "eos_token_id"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' is not supported"),
        ({"rope_scaling": 3}, "rope_scaling must be an object or null"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "rope_scaling.long_factor"),
    ],
)
def test_what_does_not_fit_is_named(sizes, change, message):
    with pytest.raises(ValueError, match=message):
        models.PhiMoEConfig.from_dict({**sizes, "model_type": "phimoe", **change})


def test_wrong_number_of_longrope_factors(sizes):
    scaling = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 8, "short_mscale": 1.1, "long_mscale": 1.2}
    values = {**sizes, "model_type": "phimoe", "rope_scaling": {"type": "longrope", **scaling}}
    with pytest.raises(ValueError, match=r"short_factor needs head_dim/2 = 8 values, got 4"):
        models.PhiMoEConfig.from_dict({**values, "original_max_position_embeddings": 64})


def test_missing_keys_are_listed(sizes):
    del sizes["hidden_size"], sizes["rope_theta"]
    with pytest.raises(ValueError, match="lacks hidden_size, rope_theta"):
        models.PhiMoEConfig.from_dict({**sizes, "model_type": "phimoe"})


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown preset 'nanoo'; known: nano, phi-mini-moe, phi-tiny-moe"):
        models.PhiMoEConfig.preset("nanoo")
