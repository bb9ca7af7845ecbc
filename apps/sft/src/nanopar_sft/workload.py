"""What ``compare`` trains: one model, one stream of tokens and one loss, the same for every candidate.

    dense   Qwen3, 8 layers, hidden size 384      25.2 M parameters, made with transformers
    moe     Phi-MoE, 6 layers, 8 experts, top 2   22.6 M parameters, nanopar_models
    else    a preset, a directory in Hugging Face form, or a hub id

Weights, tokens and their order follow from fixed seeds alone, so that all candidates, in processes of their own, start
from the same numbers. Optimizer: AdamW, lr 1e-3, weight decay 0.01 on everything, one group, fp32.

Shapes: B sequences per step over all ranks, S tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import nanopar_models as models
import nanopar_tensor as tensor
from nanopar_models.loss import cross_entropy
from nanopar_sft.floors import Sizes

GENERATED = ("dense", "moe")
PRESETS = ("nano", "phi-tiny-moe", "phi-mini-moe")
MOST_POSITIONS = 512  # of the generated ones
SEED = 0
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


def build_model(name: str) -> nn.Module:
    """The model in training mode, fp32, on the CPU; the same weights in every process."""
    if name == "dense":
        model = _dense()
    elif name == "moe":
        model = models.PhiMoE(_moe_shape(), seed=SEED)
    elif name in PRESETS:
        model = models.PhiMoE(models.PhiMoEConfig.preset(name), seed=SEED)
    else:
        model = _from_files(name)
    return model.train()


def _dense() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=MOST_POSITIONS,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(SEED)
    model: nn.Module = Qwen3ForCausalLM(shape)
    return model


def _moe_shape() -> models.PhiMoEConfig:
    return models.PhiMoEConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_local_experts=8,
        max_position_embeddings=MOST_POSITIONS,
    )


def _from_files(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if AutoConfig.from_pretrained(name, trust_remote_code=False).model_type == "phimoe":
        return models.load(name, dtype=torch.float32)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, use_cache=False, trust_remote_code=False
    )
    return model


def positions(name: str) -> int | None:
    """The longest sequence of a model that is made here; None for files."""
    if name in GENERATED:
        return MOST_POSITIONS
    return models.PhiMoEConfig.preset(name).max_position_embeddings if name in PRESETS else None


def vocabulary(model: nn.Module) -> int:
    """Number of different tokens."""
    size = model.config.vocab_size  # type: ignore[union-attr]  # what both libraries call it
    return int(size)  # type: ignore[arg-type]


def sizes(model: nn.Module, tokens: int) -> Sizes:
    """What its collectives carry, with ``tokens`` in a batch, in fp32."""
    config: Any = model.config
    parameters = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    hidden = tokens * config.hidden_size * 4
    experts = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." in name)
    return Sizes(
        parameters, hidden, config.num_hidden_layers, experts, hidden * getattr(config, "num_experts_per_tok", 0)
    )


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that the model carries, with embedding, norms and head: logits stay divided."""
    layer = "model.layers.*."
    norms = [layer + "input_layernorm", layer + "post_attention_layernorm", "model.norm"]
    ends = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise"}
    return {**tensor.plan_of(model), **dict.fromkeys(norms, "sequence_parallel"), **ends}


def batch(step: int, sequences: int, length: int, vocabulary: int) -> Tensor:
    """Tokens ``[B, S]`` of one step. Frequent and rare tokens differ widely, as in text: a uniform number, cubed."""
    numbers = torch.Generator().manual_seed(1000 + step)
    return (torch.rand(sequences, length, generator=numbers).pow(3) * vocabulary).long()


def loss_of(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    loss: Tensor = model(input_ids=ids_BS, labels=ids_BS).loss
    return loss


def share_of_loss(sequences: int) -> Callable[[Tensor, Tensor], Tensor]:
    """``loss(logits [b, S, V], next labels [b, S])``: the share of b sequences in the mean over so many."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten()).sum() / (sequences * (labels.shape[1] - 1))

    return loss


def adamw(parameters: Iterable[Tensor] | list[dict[str, object]], fused: bool) -> torch.optim.AdamW:
    """The optimizer that everybody uses; not ``fused``: torch's own default, a loop over the parameters on a CPU."""
    return torch.optim.AdamW(parameters, **adamw_options(fused))  # type: ignore[arg-type]


def adamw_options(fused: bool) -> dict[str, object]:
    """Its arguments, for libraries that build it themselves."""
    return {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True if fused else None}
