"""From the configuration to tokenizer, rows, and the model in its layout.

    load_chat --> training_rows --> Batches
    build_model (no storage yet) --> build_parallel (parallel.py) --> train_in, or answer_in: values and optimizer

Whatever the user's files or keys get wrong is an ``InputError`` here, before anything is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanopar_models as models
import nanopar_zero as zero
from nanopar_core import Mesh
from nanopar_core.sharding import take
from nanopar_models.weights import read_config
from nanopar_sft import layout
from nanopar_sft.batches import Batches
from nanopar_sft.chat import Chat, Encoded
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.footprint import names_by_stage
from nanopar_sft.parallel import ParallelModel, ValueOf
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


def build_model(config: Config, chat: Chat, *, dtype: torch.dtype = torch.float32) -> models.PhiMoE:
    """The model without storage, on the meta device, its frozen parameters frozen.

    Raises:
        InputError: no such model, damaged files, or a model that does not fit the other keys.
    """
    shape = model_shape(config, chat)
    model = models.PhiMoE(shape, device="meta", dtype=dtype)
    freeze(model, config.freeze)
    return model


def model_shape(config: Config, chat: Chat) -> models.PhiMoEConfig:
    """The model's sizes and constants, with what our keys change.

    Raises:
        InputError: as ``build_model``.
    """
    if config.model in PRESETS:
        changes: dict[str, Any] = {
            "eos_token_id": tuple(sorted(chat.stop_ids)),
            "pad_token_id": chat.tokenizer.pad_token_id,
        }
        if config.model == "nano":
            changes["vocab_size"] = len(chat.tokenizer)
        shape = models.PhiMoEConfig.preset(config.model, **changes)
    else:
        with _model_errors(config):
            shape = read_config(models.checkpoint_folder(config.model))
    shape = _changed(shape, config)
    if len(chat.tokenizer) > shape.vocab_size:
        raise InputError(
            f"the tokenizer has {len(chat.tokenizer)} tokens, the model {shape.vocab_size}: they do not belong "
            "together; name the model's own with --tokenizer"
        )
    if config.seq_len > shape.max_position_embeddings:
        raise InputError(
            f"seq_len={config.seq_len} is longer than the model's {shape.max_position_embeddings} positions"
        )
    return shape


@contextmanager
def values_of(config: Config, shape: models.PhiMoEConfig) -> Iterator[ValueOf]:
    """The parameters' values, part by part: a preset's initial ones, or those in the model's files, in fp32.

    Raises:
        InputError: damaged files, or a tensor that is missing, unexpected or of another shape.
    """
    if config.model in PRESETS:

        def initial(name: str, whole: tuple[int, ...], places: Sequence[Sequence[range]]) -> Tensor:
            value = models.initial_value(name, whole, shape, config.seed)
            for dim, ranges in enumerate(places):
                if ranges != [range(whole[dim])]:
                    value = take(value, dim, ranges)
            return value

        yield initial
        return
    with _model_errors(config), models.opened(config.model) as weights:
        yield lambda name, _whole, places: weights.read(name, places)


@contextmanager
def _model_errors(config: Config) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        hint = f" (presets: {', '.join(PRESETS)})" if not Path(config.model).exists() else ""
        raise InputError(f"model={config.model}: {error}{hint}") from None


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


def check_layout(config: Config, shape: models.PhiMoEConfig, *, training: bool) -> None:
    """Refuse a layout that does not fit the model.

    Raises:
        InputError: with the reason, and the layouts next to it that are possible.
    """
    wanted = config.layout()
    if not training:  # any batch will do
        wanted = dataclasses.replace(wanted, microbatches=1)
    if why := layout.explained(wanted, shape, config.batch_size if training else wanted.batches, config.seq_len):
        raise InputError(why)
    parts = wanted.batches * wanted.cp * wanted.microbatches
    if training and shape.output_router_logits and shape.router_aux_loss_coef > 0 and (parts > 1 or wanted.pp > 1):
        raise InputError(
            f"the model's router_aux_loss_coef is {shape.router_aux_loss_coef:g}: its balancing loss is one over the "
            "whole batch, and would change with the parts that dp, cp, pp and microbatches cut it into; set it to 0 in "
            "the model's config.json, or use none of these"
        )


def model_to_train(config: Config, chat: Chat) -> models.PhiMoE:
    """``build_model``, checked against layout and files before any rank communicates."""
    model = build_model(config, chat, dtype=torch.float64 if config.precision == "fp64" else torch.float32)
    check_layout(config, model.config, training=True)
    _check_stages(config, model)
    _check_values(config, model.config)
    return model


def model_to_answer(config: Config, chat: Chat) -> models.PhiMoE:
    """Likewise, for what only evaluates and generates."""
    model = build_model(config, chat)
    check_layout(config, model.config, training=False)
    _check_values(config, model.config)
    return model


def _check_values(config: Config, shape: models.PhiMoEConfig) -> None:
    """Open the model's files, which checks that they have all its tensors."""
    with values_of(config, shape):
        pass


def _check_stages(config: Config, model: models.PhiMoE) -> None:
    """Every stage must have something to train."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for rank, names in enumerate(names_by_stage(config, model)):
        if not names & trained:
            raise InputError(
                f"freeze={','.join(config.freeze)} leaves rank {rank} of pp={config.pp} nothing to train: use fewer "
                "pipeline ranks"
            )


def build_parallel(config: Config, model: models.PhiMoE) -> ParallelModel:
    """The model divided as the configuration says; called on all ranks."""
    wanted = config.layout()
    sizes = {name: getattr(wanted, name) for name in layout.AXES}
    return ParallelModel(
        model,
        wanted,
        Mesh(**sizes, etp=wanted.etp),
        schedule=config.schedule,
        longest=config.seq_len,
        recompute=config.recompute,
    )


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
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


def train_in(config: Config, parallel: ParallelModel, groups: list[dict[str, Any]], device: torch.device) -> None:
    """Values and fused AdamW for a divided model; ``groups``: ``parameter_groups`` of the undivided one."""
    dtype = saved_dtype(config)
    with values_of(config, parallel.model.config) as value_of:
        parallel.shard(
            lambda own: torch.optim.AdamW(own, lr=config.lr, betas=config.betas, fused=True),
            value_of,
            stage=config.zero,
            groups=groups,
            policy=None if dtype in (torch.float32, torch.float64) else zero.PrecisionPolicy(param_dtype=dtype),
            device=device,
        )


def answer_in(config: Config, parallel: ParallelModel, device: torch.device) -> None:
    """Values for a divided model that only evaluates and generates."""
    with values_of(config, parallel.model.config) as value_of:
        parallel.fill(value_of, device=device, dtype=saved_dtype(config))


def saved_dtype(config: Config) -> torch.dtype:
    """The dtype in which the model computes, and in which finished weights are written."""
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes[config.precision]


def generation_config(chat: Chat) -> Mapping[str, Any]:
    """What transformers' ``generate`` must know: where answers end, and what fills short ones."""
    return {"eos_token_id": sorted(chat.stop_ids), "pad_token_id": chat.tokenizer.pad_token_id}
