"""From the configuration to tokenizer, model, rows and optimizer: the one place where strategies meet the model.

    load_chat -> read_rows -> build_model -> build_optimizer (nanopar_zero)

Whatever the user's files or keys get wrong is an ``InputError`` here, before anything is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanopar_models as models
import nanopar_zero as zero
from nanopar_core import Axis
from nanopar_models.weights import read_config
from nanopar_sft.batches import Batches
from nanopar_sft.chat import Chat, Encoded
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.rows import Row, load_rows
from nanopar_sft.synthetic import Difficulty
from nanopar_sft.tokenizer import BUILTIN, load_tokenizer

PRESETS = ("nano", "phi-tiny-moe", "phi-mini-moe")
FILE_ENDINGS = (".jsonl", ".json")


def load_chat(config: Config) -> Chat:
    """The tokenizer: the named one, else the model's own, else the built-in one."""
    return Chat(load_tokenizer(config.tokenizer or (BUILTIN if config.model in PRESETS else config.model)))


def training_rows(config: Config) -> list[Row]:
    """The rows to train on."""
    return _rows(config, config.data, "train", config.train_rows)


def held_back_rows(config: Config) -> list[Row]:
    """The rows to evaluate on while training: ``eval_data``, else the test split of ``data`` where it has one."""
    if config.eval_data is None and (config.data.endswith(FILE_ENDINGS) or ":" in config.data):
        return []
    return test_rows(config)


def test_rows(config: Config) -> list[Row]:
    """The rows of the command ``eval``: ``eval_data``, or the test split (the whole of a file) of ``data``."""
    return _rows(config, config.eval_data or config.data, "test", config.eval_rows)


def _rows(config: Config, source: str, split: str, count: int | None) -> list[Row]:
    shares = (1 - config.two_step - config.three_step, config.two_step, config.three_step)
    difficulty = Difficulty(operands=(2, config.max_operand), step_shares=shares)
    return load_rows(source, split, seed=config.seed, count=count, difficulty=difficulty)


def build_model(config: Config, chat: Chat, *, meta: bool = False) -> models.PhiMoE:
    """The model with its weights, in fp32 (the optimizer's masters); ``meta``: sizes only.

    Raises:
        InputError: no such model, damaged files, or a model that does not fit the other keys.
    """
    if config.model in PRESETS:
        model = _from_preset(config, chat, meta)
    else:
        model = _from_files(config, meta)
    if len(chat.tokenizer) > model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {len(chat.tokenizer)} tokens, the model {model.config.vocab_size}: they do not belong "
            "together; name the model's own with --tokenizer"
        )
    if config.seq_len > model.config.max_position_embeddings:
        raise InputError(
            f"seq_len={config.seq_len} is longer than the model's {model.config.max_position_embeddings} positions"
        )
    return model


def _from_preset(config: Config, chat: Chat, meta: bool) -> models.PhiMoE:
    changes: dict[str, Any] = {
        "eos_token_id": tuple(sorted(chat.stop_ids)),
        "pad_token_id": chat.tokenizer.pad_token_id,
    }
    if config.model == "nano":
        changes["vocab_size"] = len(chat.tokenizer)
    shape = _changed(models.PhiMoEConfig.preset(config.model, **changes), config)
    model = models.PhiMoE(shape, device="meta" if meta else None)
    if not meta:
        model.init_weights(config.seed)
    return model


def _from_files(config: Config, meta: bool) -> models.PhiMoE:
    try:
        if meta:
            return models.PhiMoE(_changed(read_config(models.checkpoint_folder(config.model)), config), device="meta")
        loaded = models.load(config.model, dtype=torch.float32)
    except ValueError as error:
        hint = f" (presets: {', '.join(PRESETS)})" if not Path(config.model).exists() else ""
        raise InputError(f"model={config.model}: {error}{hint}") from None
    model = models.PhiMoE(_changed(loaded.config, config), device="meta")
    weights = loaded.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
    return model


def _changed(shape: models.PhiMoEConfig, config: Config) -> models.PhiMoEConfig:
    """The model's configuration with what our keys change."""
    changes: dict[str, Any] = {"router_noise": config.router_noise}
    if config.layers is not None:
        if config.layers > shape.num_hidden_layers:
            raise InputError(f"layers={config.layers}: the model has only {shape.num_hidden_layers}")
        changes["num_hidden_layers"] = config.layers
    if config.router_jitter_noise is not None:
        changes["router_jitter_noise"] = config.router_jitter_noise
    if shape.router_aux_loss_coef == 0:
        changes["output_router_logits"] = False
    return dataclasses.replace(shape, **changes)


def training_batches(config: Config, chat: Chat) -> tuple[Encoded, Batches]:
    """The training rows as tokens, with what became of them, and the batches made of them."""
    encoded = chat.encode(training_rows(config), config.seq_len)
    return encoded, Batches(encoded.examples, config.batch_size, seed=config.seed)


def training_model(config: Config, chat: Chat, *, meta: bool = False) -> models.PhiMoE:
    """The model as it will be trained: checked against the layout, its frozen parameters frozen."""
    model = build_model(config, chat, meta=meta)
    _check_balancing_loss(model.config, (config.dp or 1) * config.microbatches)
    _freeze(model, config.freeze)
    return model


def _check_balancing_loss(shape: models.PhiMoEConfig, parts: int) -> None:
    """Refuse the batch-wide balancing loss where the batch is cut: its value would depend on the cut."""
    if shape.output_router_logits and shape.router_aux_loss_coef > 0 and parts > 1:
        raise InputError(
            f"the model's router_aux_loss_coef is {shape.router_aux_loss_coef:g}: its balancing loss is one over the "
            f"whole batch, and would change with the {parts} parts that dp x microbatches cut it into; set it to 0 in "
            "the model's config.json, or use dp=1 and microbatches=1"
        )


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Stop the training of parameters whose names match."""
    for pattern in patterns:
        matching = [parameter for name, parameter in model.named_parameters() if fnmatchcase(name, pattern)]
        if not matching:
            raise InputError(f"freeze={pattern} matches no parameter, such as {next(model.named_parameters())[0]}")
        for parameter in matching:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"freeze={','.join(patterns)} leaves nothing to train")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's two groups: matrices decay; norms, biases and embeddings do not."""
    still = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if isinstance(module, (nn.LayerNorm, nn.Embedding)) or name == "bias"
    }
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [name for name in names if name not in still], "weight_decay": weight_decay},
        {"params": [name for name in names if name in still], "weight_decay": 0.0},
    ]


def build_optimizer(config: Config, model: nn.Module, axis: Axis) -> zero.ZeroOptimizer:
    """Data parallelism over ``axis`` with fused AdamW; gradients are summed: each loss is a share of the step's."""
    dtype = saved_dtype(config)
    policy = None if dtype is torch.float32 else zero.PrecisionPolicy(param_dtype=dtype)
    return zero.shard(
        model,
        lambda groups: torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True),
        axis=axis,
        stage=config.zero,
        groups=parameter_groups(model, config.weight_decay),
        policy=policy,
        reduce="sum",
    )


def saved_dtype(config: Config) -> torch.dtype:
    """The dtype in which the model computes, and in which finished weights are written."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]


def generation_config(chat: Chat) -> Mapping[str, Any]:
    """What transformers' ``generate`` must know: where answers end, and what fills short ones."""
    return {"eos_token_id": sorted(chat.stop_ids), "pad_token_id": chat.tokenizer.pad_token_id}
