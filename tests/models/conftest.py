"""The reference of this package's tests: transformers' PhimoeForCausalLM with weights in which every fault shows."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nanopar_models as models

os.environ.setdefault("HF_HUB_OFFLINE", "1")

transformers = pytest.importorskip("transformers")

# head_dim is not hidden_size / heads, and no two sizes are equal, so that a mix-up of sizes cannot pass.
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "attention_bias": True,
    "lm_head_bias": True,
    "initializer_range": 0.1,
    "router_jitter_noise": 0.01,
    "input_jitter_noise": 0.01,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_reference(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """transformers' model with every bias, norm and router randomised; a fresh one has them all trivial."""
    config = transformers.PhimoeConfig(**{**SIZES, **changes})
    torch.manual_seed(seed)
    reference = transformers.PhimoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0, 0.05)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif "router" in name:
                parameter.normal_(0, 0.3)
    if dtype is torch.float64:
        reference.set_experts_implementation("eager")  # grouped_mm has no float64
    return reference.to(dtype).eval()


@pytest.fixture
def sizes() -> dict[str, Any]:
    return dict(SIZES)


@pytest.fixture
def make_reference() -> Callable[..., Any]:
    return build_reference


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """``make_pair(**config)`` -> the reference and our model, whose weights came through the reference's own files."""

    def make(
        seed: int = 0, dtype: torch.dtype = torch.float32, router_noise: bool = False, **changes: Any
    ) -> SimpleNamespace:
        reference = build_reference(seed, dtype, **changes)
        folder = tmp_path / f"reference-{seed}"
        reference.save_pretrained(folder, max_shard_size="300KB")
        ours = models.load(folder, router_noise=router_noise)
        return SimpleNamespace(reference=reference, ours=ours.eval(), folder=folder)

    return make
