"""Small models of odd sizes and random layouts, for ``verify``; the same number draws the same ones everywhere."""

from __future__ import annotations

import random
import re
from typing import Any

from nanopar_models import PhiMoEConfig
from nanopar_sft import layout
from nanopar_sft.config import TWO_STAGES, Config

NAME = re.compile(r"tiny-(\d+)")
DRAWN = (
    "model", "precision", "seq_len", "batch_size", "microbatches", "steps", "clip", "freeze", "seed", "dp",
    "dp_replicate", "tp", "sp", "cp", "cp_method", "pp", "schedule", "virtual_stages", "ep", "etp", "zero", "recompute",
    "packing", "router_noise", "lr",
)  # fmt: skip
TRIES = 10_000


def is_tiny(model: str) -> bool:
    """Whether ``model`` is one of these."""
    return NAME.fullmatch(model) is not None


def shape(model: str) -> PhiMoEConfig:
    """The sizes of ``tiny-N``."""
    found = NAME.fullmatch(model)
    assert found is not None
    rng = random.Random(f"model {found[1]}")
    kv = rng.choice([1, 2, 2, 3, 4])
    return PhiMoEConfig(
        vocab_size=rng.choice([31, 37, 53, 64]),
        hidden_size=rng.choice([12, 20, 24, 28]),
        intermediate_size=rng.choice([8, 12, 20, 24]),
        num_hidden_layers=rng.randint(2, 5),
        num_attention_heads=kv * rng.choice([1, 2, 4]),
        num_key_value_heads=kv,
        head_dim=rng.choice([4, 6, 8]),
        num_local_experts=rng.choice([2, 4, 4, 6, 8]),
        max_position_embeddings=256,
        sliding_window=rng.choice([None, None, None, 5, 16]),
        attention_bias=rng.random() < 0.7,
        lm_head_bias=rng.random() < 0.7,
        initializer_range=0.2,
        input_jitter_noise=0.05,
    )


def draw(seed: int, number: int, most_ranks: int) -> Config:
    """A layout with options that a tiny model admits."""
    rng = random.Random(f"{seed}/{number}")
    for _ in range(TRIES):
        config = _any(rng, seed * 1_000_000 + number, most_ranks)
        wanted = config.layout()
        if wanted.ranks == 1 or layout.problem(wanted, shape(config.model), config.batch_size, config.seq_len):
            continue
        return config
    raise RuntimeError(f"no layout of {most_ranks} ranks was found in {TRIES} tries")


def _any(rng: random.Random, model: int, most_ranks: int) -> Config:
    sizes: dict[str, int] = dict.fromkeys(("dp", "dp_replicate", "tp", "cp", "pp"), 1)
    left = rng.choice([ranks for ranks in (2, 4, 8) if ranks <= most_ranks])
    while left > 1:
        sizes[rng.choice(["dp", "dp", "dp_replicate", "tp", "tp", "cp", "pp", "pp"])] *= 2
        left //= 2
    tp, pp = sizes["tp"], sizes["pp"]
    inner = sizes["dp"] * sizes["cp"] * tp
    values: dict[str, Any] = {
        **sizes,
        "model": f"tiny-{model}",
        "ep": rng.choice([size for size in (1, 1, 2, 4, 8) if inner % size == 0]),
        "etp": rng.choice([None, 1]) if tp > 1 else None,
        "sp": tp > 1 and rng.random() < 0.5,
        "cp_method": rng.choice(["all_gather", "ulysses", "ring"]),
        "schedule": rng.choice(["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"]) if pp > 1 else "1f1b",
        "virtual_stages": 1,
        "zero": rng.randint(0, 3),
        "microbatches": rng.choice([1, 2, 3, 4]) if pp == 1 else rng.randint(1, 5),
        "batch_size": 0,
        "seq_len": rng.choice([9, 16, 23, 40]),
        "recompute": rng.random() < 0.4,
        "packing": rng.random() < 0.3,
        "router_noise": rng.random() < 0.3,
        "clip": rng.choice([None, 0.05, 1.0]),
        "precision": "fp64",
        "steps": 3,
        "seed": rng.randint(0, 1000),
        "freeze": rng.choice([(), (), (), ("model.embed_tokens.*",), ("*.router.*",), ("*.experts.*",)]),
        "lr": 1e-3,
        "timeout_s": 120.0,
    }
    if values["schedule"] in ("gpipe", "interleaved"):
        values["virtual_stages"] = rng.choice([1, 2, 2, 3])
    elif values["schedule"] in TWO_STAGES:
        values["virtual_stages"] = 2
    parts = sizes["dp"] * sizes["dp_replicate"] * values["microbatches"]
    values["batch_size"] = parts * rng.choice([1, 2, 3])
    return Config.model_validate({name: value for name, value in values.items() if value is not None or name == "clip"})
