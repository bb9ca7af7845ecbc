"""Weights and optimizer state under the model's own names, in memory and in checkpoints.

    checkpoint               what it holds
    model.<name>             weights and buffers; trained parameters as the masters, in full precision
    optimizer.<key>.<name>   the optimizer's state of that parameter: exp_avg, exp_avg_sq, step, momentum_buffer, ...
    checkpoint.json          the parameter groups' options, and what the caller adds

Since everything is stored by parameter, a checkpoint fits any number of ranks and any bucket size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanopar_core import checkpoint
from nanopar_zero.layout import Slot
from nanopar_zero.optimizer import FlatShard, ZeroOptimizer


def full_state_dict(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """The unsharded weights under the model's own names, on rank 0 of the data-parallel axes; empty on other ranks.

    Keys are those of ``model.state_dict()``, buffers and tied names included; trained parameters come in the masters'
    precision. Called on all ranks. The tensors may share storage with the model: copy them to keep them.
    """
    return _weights(model, optimizer) if optimizer.reducer.buckets[0].reduction.leads else {}


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: ZeroOptimizer,
    *,
    extra: Mapping[str, Any] | None = None,
    write_files: Callable[[Path], None] | None = None,
) -> None:
    """Write weights and optimizer state to the directory ``path``; called on all ranks.

    The directory appears when it is whole, or not at all. ``extra`` (JSON values) and the files that ``write_files``
    puts into the directory on rank 0 are kept with it; ``nanopar_core.checkpoint.read_extra`` gives ``extra`` back.

    Raises:
        RuntimeError: on all ranks, when one of them could not write.
    """
    tensors = {f"model.{name}": tensor for name, tensor in _weights(model, optimizer).items()}
    elementwise = set()
    for key, shard, value in _optimizer_state(optimizer):
        along = value.shape == shard.flat.shape
        elementwise |= {key} if along else set()
        for slot in _slots(shard):  # what a flat shard has only once (a step count) is repeated for each parameter
            tensors[f"optimizer.{key}.{slot.item.name}"] = _part(value, shard, slot) if along else value.clone()
    groups = [{key: value for key, value in group.items() if _is_plain(value)} for group in optimizer.param_groups]
    keys = sorted({key for key, _, _ in _optimizer_state(optimizer)})
    about = {"groups": groups, "state": keys, "elementwise": sorted(elementwise)}
    checkpoint.save(path, tensors, {**(extra or {}), **about}, write_files)


def load(path: str | Path, model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Fill model and optimizer in place from a checkpoint of the same model; called on all ranks.

    The number of ranks, the bucket size and the parameters' assignment to groups may differ from those at saving.

    Raises:
        ValueError: no whole checkpoint at ``path``, a damaged file, or names and shapes that do not fit the model.
    """
    stored = checkpoint.describe(path)
    tensors = {f"model.{name}": tensor for name, tensor in _weights(model, optimizer).items()}
    if unexpected := [name for name in stored if name.startswith("model.") and name not in tensors]:
        raise ValueError(
            f"checkpoint {path} holds {unexpected[0].removeprefix('model.')}, which the model does not have"
        )
    extra = checkpoint.read_extra(path)
    if (there := len(extra["groups"])) != (here := len(optimizer.param_groups)):
        raise ValueError(f"checkpoint {path} has {there} parameter groups, the optimizer {here}")
    repeated: dict[tuple[int, str], list[Tensor]] = {}
    for index, shard in enumerate(optimizer.shards):
        optimizer.state[shard.flat] = {}
        for slot in _slots(shard):
            for name, key in ((f"optimizer.{key}.{slot.item.name}", key) for key in extra["state"]):
                if name in stored and key in extra["elementwise"]:
                    flat = optimizer.state[shard.flat].setdefault(key, _flat_like(shard, stored[name].dtype))
                    tensors[name] = _part(flat, shard, slot)
                elif name in stored:
                    tensors[name] = torch.empty_like(stored[name], device="cpu")
                    repeated.setdefault((index, key), []).append(tensors[name])
    checkpoint.load(path, tensors)
    for (index, key), values in repeated.items():
        if not all(torch.equal(value, values[0]) for value in values):
            raise ValueError(f"checkpoint {path}: {key} differs among parameters that share a bucket here")
        shard = optimizer.shards[index]
        options = optimizer.param_groups[shard.run.group]
        on_device = options.get("fused") or options.get("capturable")  # torch's rule for where a step count lives
        optimizer.state[shard.flat][key] = values[0].to(shard.flat.device) if on_device else values[0]
    for group, options in zip(optimizer.param_groups, extra["groups"], strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
    for bucket in optimizer.reducer.buckets:
        bucket.publish()


def _weights(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """The model's state dict with masters in place of trained parameters."""
    masters: dict[int, Tensor] = {}
    for bucket in optimizer.reducer.buckets:
        bucket.adopt_edits()
        for slot, member in zip(bucket.layout.slots, bucket.members, strict=True):
            masters[id(member)] = bucket.masters[slot.start : slot.start + slot.numel].view(slot.item.shape)
    state = model.state_dict(keep_vars=True)
    return {name: masters.get(id(value), value.detach()) for name, value in state.items() if isinstance(value, Tensor)}


def _slots(shard: FlatShard) -> list[Slot]:
    """The parameters of a flat shard: a bucket has one run per group."""
    return [slot for slot in shard.bucket.layout.slots if slot.item.group == shard.run.group]


def _part(flat: Tensor, shard: FlatShard, slot: Slot) -> Tensor:
    """One parameter's part of a tensor that runs along a flat shard."""
    start = slot.start - shard.run.start
    return flat[start : start + slot.numel].view(slot.item.shape)


def _flat_like(shard: FlatShard, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shard.flat.shape, dtype=dtype, device=shard.flat.device)


def _optimizer_state(optimizer: ZeroOptimizer) -> Iterator[tuple[str, FlatShard, Tensor]]:
    """(key, flat shard, value) of everything that the user's optimizer keeps."""
    for shard in optimizer.shards:
        for key, value in optimizer.state.get(shard.flat, {}).items():
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(f"the optimizer keeps {key} as {type(value).__name__}, only tensors can be saved")
            if value is not None:
                yield key, shard, value


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold an option of a parameter group (its parameters, and tensors, it cannot)."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(inner, (bool, int, float, str)) for inner in value)
    return value is None or isinstance(value, (bool, int, float, str))
