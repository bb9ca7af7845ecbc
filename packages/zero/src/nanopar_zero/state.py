"""Weights and optimizer state under the model's own names, in memory and in checkpoints.

    checkpoint               what it holds
    model.<name>             weights and buffers; trained parameters as the masters, in full precision
    optimizer.<key>.<name>   the optimizer's state of that parameter: exp_avg, exp_avg_sq, step, momentum_buffer, ...
    checkpoint.json          the parameter groups' options, and what the caller adds

Everything is stored by parameter, whole, so a checkpoint fits any number of ranks, any stage and any buckets. No rank
ever holds more than its share of the files, and one bucket:

    save   bucket by bucket: its parts |a|b|c|d| are gathered, each rank keeps those parameters that it is to write
    load   each rank reads the elements that lie in its part of a bucket
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanopar_core import Axis, all_gather, broadcast, checkpoint, send_recv
from nanopar_zero.buckets import Bucket
from nanopar_zero.layout import Slot
from nanopar_zero.optimizer import FlatShard, ZeroOptimizer
from nanopar_zero.replicas import copy_from_first
from nanopar_zero.torch_private import COMPILED

_ABOUT = "nanopar_zero"


@torch.no_grad()
def full_state_dict(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """Copies of the unsharded weights in CPU memory, on rank 0 of the data-parallel axes; empty on other ranks.

    Keys are those of ``model.state_dict()``, buffers and tied names included; trained parameters come in the masters'
    precision. Called on all ranks, of which the others hold one bucket at a time.
    """
    buckets, leads = _settled(optimizer), _leads(optimizer)
    entries = _entries(model, buckets)
    copies: dict[int, Tensor] = {}
    for bucket in buckets:
        whole = _gather(bucket.masters, bucket)
        if leads:
            for slot, member in zip(bucket.layout.slots, bucket.members, strict=True):
                copies[id(member)] = _place(whole, slot).to("cpu", copy=True)
        del whole  # before the next one is gathered
    if not leads:
        return {}
    copies |= {id(entry.tensor): entry.tensor.detach().to("cpu", copy=True) for entry in _loose(entries, buckets)}
    state = model.state_dict(keep_vars=True)
    return {name: copies[id(value)] for name, value in state.items() if isinstance(value, Tensor)}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, optimizer: ZeroOptimizer, state: Mapping[str, Tensor] | None) -> None:
    """Give a sharded model the whole weights that its first rank has; called on all ranks.

    No other rank ever holds more than what it keeps anyway; the first holds one bucket beside ``state``, whose values
    may lie in files (``nanopar_core.checkpoint.reading``). Masters get the values in full precision. The optimizer's
    state stays as it is.

    Args:
        model: what was given to ``shard``.
        optimizer: what that gave.
        state: on rank 0 of the data-parallel axes the weights by the names of ``model.state_dict()`` (one name of a
            tied weight is enough); None or empty on others.

    Raises:
        ValueError: on the first rank, names or shapes that do not fit; on the others, that it has refused.
    """
    _refuse_divided(optimizer, "load_full_state_dict")
    buckets, leads = _settled(optimizer), _leads(optimizer)
    entries, state = _entries(model, buckets), state or {}
    problem = _misfit(entries, state) if leads else ""
    if not _all_hear(not problem, optimizer):
        raise ValueError(problem or "the first rank's state does not fit the model: see its error")
    values = {id(entry.tensor): state[name] for entry in entries for name in entry.names if name in state}
    for bucket in buckets:
        whole = None
        if leads:
            whole = bucket.masters.new_zeros(bucket.layout.length)
            for slot, member in zip(bucket.layout.slots, bucket.members, strict=True):
                _place(whole, slot).copy_(values[id(member)])
        _scatter(whole, bucket)
        del whole
    for entry in _loose(entries, buckets):
        if leads:
            entry.tensor.copy_(values[id(entry.tensor)])
        copy_from_first(entry.tensor.detach(), buckets[0].reduction.axes, label="full state")
    _publish(optimizer, buckets)


@torch.no_grad()
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
        ValueError: the optimizer keeps what is not a tensor, or parameters are divided over other axes too.
    """
    _refuse_divided(optimizer, "save")
    buckets = _settled(optimizer)
    entries = _entries(model, buckets)
    tensors = {f"model.{entry.name}": entry.tensor for entry in _loose(entries, buckets)}
    kept = _kept_on_any_rank(optimizer, buckets)
    bytes_of: dict[Axis, list[int]] = {}
    for bucket, of_groups in zip(buckets, kept, strict=True):
        axis, copies = bucket.reduction.data_axis, bucket.reduction.more_axes
        if any(other.rank for other in copies):
            continue  # of equal copies the first is written
        for name, value in _whole_tensors(bucket, _names_of_slots(bucket, entries), of_groups, optimizer):
            written = bytes_of.setdefault(axis, [0] * axis.size)
            writer = written.index(min(written))
            written[writer] += value.nbytes
            if writer == axis.rank:
                tensors[name] = value.to("cpu", copy=bucket.reduction.parts > 1)
            del value  # a view of the gathered buffer, which is to be gone before the next one comes
    states = [state for of_groups in kept for states in of_groups.values() for state in states.values()]
    about = {
        "groups": [_options(group) for group in optimizer.param_groups],
        "keys": sorted({state.key for state in states}),
        "elementwise": sorted({state.key for state in states if state.value is None}),
        "optimizer": optimizer.extra_state(),
    }
    checkpoint.save(path, tensors, {**(extra or {}), _ABOUT: about}, write_files)


@torch.no_grad()
def load(path: str | Path, model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Fill model and optimizer in place from a checkpoint of the same model; called on all ranks.

    Stage, number of ranks, units, bucket size, precision and the parameters' assignment to groups may differ from
    those at saving.

    Raises:
        ValueError: no whole checkpoint of ``save`` at ``path``, a damaged file, or names and shapes that do not fit the
            model; nothing has changed then.
    """
    _refuse_divided(optimizer, "load")
    about = checkpoint.read_extra(path).get(_ABOUT)
    if about is None:
        raise ValueError(f"checkpoint {path} was not written by nanopar_zero.save")
    buckets = _settled(optimizer)
    entries = _entries(model, buckets)
    with checkpoint.reading(path) as stored:
        _check_weights(path, entries, stored)
        keys_of = _check_states(path, entries, optimizer, stored, about)
        for entry in _loose(entries, buckets):
            entry.tensor.copy_(stored[f"model.{entry.name}"])
        for bucket in buckets:
            for slot, name in _names_of_slots(bucket, entries).items():
                _read(stored[f"model.{name}"], slot, bucket.own.start, bucket.masters)
        for group, options in zip(optimizer.param_groups, about["groups"], strict=True):
            _set_options(group, options)
        for shard in optimizer.shards:
            names = _with_states(_names_of_slots(shard.bucket, entries), shard.run.group)
            options = optimizer.param_groups[shard.run.group]
            optimizer.state[shard.flat] = {
                key: _read_state(key, shard, names, stored, options, along=key in about["elementwise"])
                for key in (keys_of[shard.run.group] if names else ())
            }
    optimizer.load_extra_state(about["optimizer"])
    _publish(optimizer, buckets)


# ------------------------------------------------------------------------------------------------ names and buckets


class Entry(NamedTuple):
    """A parameter or buffer, and its names in the model's state dict: a tied weight has several."""

    tensor: Tensor
    names: list[str]

    @property
    def name(self) -> str:
        """That in checkpoints, where it stands once; the same whether the model is compiled or not."""
        return self.names[0].replace(COMPILED, "")


def _entries(model: nn.Module, buckets: Sequence[Bucket]) -> list[Entry]:
    """The state dict of the model that owns the buckets."""
    entries: dict[int, Entry] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            entries.setdefault(id(value), Entry(value, [])).names.append(name)
    for bucket in buckets:
        for slot, member in zip(bucket.layout.slots, bucket.members, strict=True):
            if id(member) not in entries:
                raise ValueError(f"this is not the model of this optimizer, whose {slot.item.name} it does not have")
    return list(entries.values())


def _loose(entries: Sequence[Entry], buckets: Sequence[Bucket]) -> list[Entry]:
    """What is in no bucket, and whole on every rank."""
    members = {id(member) for bucket in buckets for member in bucket.members}
    return [entry for entry in entries if id(entry.tensor) not in members]


def _names_of_slots(bucket: Bucket, entries: Sequence[Entry]) -> dict[Slot, str]:
    """The parameters of a bucket with their names in checkpoints."""
    names = {id(entry.tensor): entry.name for entry in entries}
    return {slot: names[id(p)] for slot, p in zip(bucket.layout.slots, bucket.members, strict=True)}


def _with_states(names: Mapping[Slot, str], group: int) -> dict[Slot, str]:
    """Those of one group. A parameter without elements has no states, since nothing of it is in any flat shard."""
    return {slot: name for slot, name in names.items() if slot.numel and slot.item.group == group}


def _settled(optimizer: ZeroOptimizer) -> list[Bucket]:
    """All buckets, once their parameters have arrived and weights that the user wrote are in the masters."""
    optimizer.wait()
    buckets = optimizer.windows.buckets
    for bucket in buckets:
        bucket.adopt_edits()
    return buckets


def _leads(optimizer: ZeroOptimizer) -> bool:
    return all(bucket.reduction.leads for bucket in optimizer.windows.buckets)


def _publish(optimizer: ZeroOptimizer, buckets: Sequence[Bucket]) -> None:
    """The masters are new: make the model's parameters so."""
    for bucket in buckets:
        bucket.publish()
    optimizer.wait()


def _refuse_divided(optimizer: ZeroOptimizer, what: str) -> None:
    buckets = ((bucket.layout.slots[0].item.name, bucket.reduction) for bucket in optimizer.windows.buckets)
    loose = (("a frozen parameter", reduction) for _, reduction in optimizer.windows.loose)
    for name, reduction in (*buckets, *loose):
        if axes := [axis.name for axis in reduction.shard_axes if axis.size > 1]:
            raise ValueError(f"{what} does not yet put together parameters that are divided over {axes[0]} too: {name}")


# --------------------------------------------------------------------------------------------------- whole and parts


def _gather(part: Tensor, bucket: Bucket) -> Tensor:
    """A whole flat buffer from the parts of the data axis."""
    parts = bucket.reduction.parts
    if parts == 1:
        return part
    return all_gather(part, bucket.reduction.data_axis, sizes=[part.numel()] * parts, label="whole bucket")


def _scatter(whole: Tensor | None, bucket: Bucket) -> None:
    """The masters of all ranks from the whole flat buffer that the first has."""
    axis, copies, parts = bucket.reduction.data_axis, bucket.reduction.more_axes, bucket.reduction.parts
    if whole is not None:
        own, *others = whole.chunk(parts)
        bucket.masters.copy_(own)
        send_recv([(part, rank) for rank, part in enumerate(others, start=1)], [], axis, label="full state")
    elif parts > 1 and not any(other.rank for other in copies):
        send_recv([], [(bucket.masters, 0)], axis, label="full state")
    for other in copies if parts > 1 else (axis, *copies):
        broadcast(bucket.masters, other, label="full state")


def _place(flat: Tensor, slot: Slot) -> Tensor:
    """One parameter in a whole flat buffer."""
    return flat[slot.start : slot.start + slot.numel].view(slot.item.shape)


def _read(stored: Tensor, slot: Slot, start: int, out: Tensor) -> None:
    """Read what of a parameter lies in ``out``, which is its bucket's buffer from element ``start`` on."""
    first, last = max(slot.start, start), min(slot.start + slot.numel, start + out.numel())
    if first < last:
        out[first - start : last - start].copy_(stored.view(-1)[first - slot.start : last - slot.start])


def _all_hear(answer: bool, optimizer: ZeroOptimizer) -> bool:
    """The first rank's answer."""
    bucket = optimizer.windows.buckets[0]
    flag = torch.tensor([answer], dtype=torch.uint8, device=bucket.masters.device)
    for axis in bucket.reduction.axes:
        broadcast(flag, axis, label="does it fit?")
    return bool(flag.item())


def _misfit(entries: Sequence[Entry], state: Mapping[str, Tensor]) -> str:
    known = {name: entry.tensor.shape for entry in entries for name in entry.names}
    for entry in entries:
        if not any(name in state for name in entry.names):
            return f"the state has no {entry.names[0]}"
    for name, value in state.items():
        if name not in known:
            return f"the state has {name}, which the model does not have"
        if value.shape != known[name]:
            return f"the state's {name} has shape {list(value.shape)}, the model needs {list(known[name])}"
    return ""


# ------------------------------------------------------------------------------------------ the optimizer's states


@dataclass(frozen=True)
class Kept:
    """What the user's optimizer keeps under one key for one group of a bucket.

    ``value`` is None for what has an element per weight; else it is kept once (a step count), equal on all ranks.
    """

    key: str
    dtype: str
    value: Any

    def tensor(self) -> Tensor:
        """The value as the optimizer had it."""
        return torch.tensor(self.value, dtype=getattr(torch, self.dtype))


KeptByGroup = dict[int, dict[str, Kept]]


def _kept_on_any_rank(optimizer: ZeroOptimizer, buckets: Sequence[Bucket]) -> list[KeptByGroup]:
    """For each bucket what is kept by group and key, also where this rank's part has nothing of the group."""
    kept: list[KeptByGroup] = [{} for _ in buckets]
    numbers = {id(bucket): number for number, bucket in enumerate(buckets)}
    found: dict[Axis, list[tuple[int, int, str, str, Any]]] = {}
    for axis in dict.fromkeys(bucket.reduction.data_axis for bucket in buckets):
        found[axis] = []
    for shard in optimizer.shards:
        for key, value in optimizer.state.get(shard.flat, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise ValueError(f"the optimizer keeps {key} as {type(value).__name__}, only tensors can be saved")
            once = None if value.shape == shard.flat.shape else value.tolist()
            dtype = str(value.dtype).removeprefix("torch.")
            place = (numbers[id(shard.bucket)], shard.run.group)
            found[shard.bucket.reduction.data_axis].append((*place, key, dtype, once))
    for axis, here in found.items():
        for line in _lines_of_all(json.dumps(here), axis, buckets[0].masters.device):
            for number, group, key, dtype, once in json.loads(line):
                kept[number].setdefault(group, {})[key] = Kept(key, dtype, once)
    return kept


def _lines_of_all(line: str, axis: Axis, device: torch.device) -> list[str]:
    data = torch.frombuffer(bytearray(line.encode() + b"\n"), dtype=torch.uint8).to(device)
    return bytes(all_gather(data, axis, label="optimizer keys").tolist()).decode().splitlines()


def _whole_tensors(
    bucket: Bucket, names: Mapping[Slot, str], kept: KeptByGroup, optimizer: ZeroOptimizer
) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of a bucket: weights, then states key by key. Views: only one gathered buffer exists."""
    whole = _gather(bucket.masters, bucket)
    for slot, name in names.items():
        yield f"model.{name}", _place(whole, slot)
    for key in sorted({key for states in kept.values() for key in states}):
        states = {group: of_group[key] for group, of_group in kept.items() if key in of_group}
        del whole
        whole = _gather(_own_part(key, states.values(), bucket, optimizer), bucket)
        for group, state in states.items():
            for slot, name in _with_states(names, group).items():
                yield f"optimizer.{key}.{name}", _place(whole, slot) if state.value is None else state.tensor()


def _own_part(key: str, states: Iterable[Kept], bucket: Bucket, optimizer: ZeroOptimizer) -> Tensor:
    """This rank's part of a state in the places of its weights; empty for what is kept once."""
    dtypes = {getattr(torch, state.dtype) for state in states if state.value is None}
    if not dtypes:
        return bucket.masters[:0]
    part = torch.zeros_like(bucket.masters, dtype=dtypes.pop())
    for shard in optimizer.shards:
        value = optimizer.state.get(shard.flat, {}).get(key)
        if shard.bucket is bucket and value is not None and value.shape == shard.flat.shape:
            part[shard.run.start - bucket.own.start : shard.run.stop - bucket.own.start] = value
    return part


def _read_state(
    key: str,
    shard: FlatShard,
    names: Mapping[Slot, str],
    stored: Mapping[str, Tensor],
    options: Mapping[str, Any],
    *,
    along: bool,
) -> Tensor:
    """One key of a flat shard's state; ``along``: it has an element per weight."""
    name = next(iter(names.values()))
    example, weight, flat = stored[f"optimizer.{key}.{name}"], stored[f"model.{name}"], shard.flat
    if not along:
        on_device = options.get("fused") or options.get("capturable")  # torch's rule for where a step count lives
        return example.to(flat.device if on_device else "cpu", copy=True)
    dtype = flat.dtype if example.dtype == weight.dtype else example.dtype  # a state of its weights' dtype follows them
    values = torch.zeros(flat.shape, dtype=dtype, device=flat.device)
    for slot, name_of_slot in names.items():
        _read(stored[f"optimizer.{key}.{name_of_slot}"], slot, shard.run.start, values)
    return values


# ---------------------------------------------------------------------------------------------- what fits a model


def _check_weights(path: str | Path, entries: Sequence[Entry], stored: Mapping[str, Tensor]) -> None:
    wanted = {f"model.{entry.name}": entry.tensor.shape for entry in entries}
    for name, shape in wanted.items():
        if name not in stored:
            raise ValueError(f"checkpoint {path} has no {name}")
        if stored[name].shape != shape:
            raise ValueError(
                f"checkpoint {path}: {name} has shape {list(stored[name].shape)}, the model needs {list(shape)}"
            )
    for name in stored:
        if name.startswith("model.") and name not in wanted:
            raise ValueError(f"checkpoint {path} holds {name.removeprefix('model.')}, which the model does not have")


def _check_states(
    path: str | Path,
    entries: Sequence[Entry],
    optimizer: ZeroOptimizer,
    stored: Mapping[str, Tensor],
    about: Mapping[str, Any],
) -> list[list[str]]:
    """The keys of each group: all its parameters have the same, and buckets equal values of what they keep once."""
    if (there := len(about["groups"])) != (here := len(optimizer.param_groups)):
        raise ValueError(f"checkpoint {path} has {there} parameter groups, the optimizer {here}")
    keys_of: list[list[str]] = []
    names_of = [_names_of_slots(bucket, entries) for bucket in optimizer.reducer.buckets]
    for group in range(here):
        in_buckets = [_with_states(names, group) for names in names_of]
        keys = {
            name: [key for key in about["keys"] if f"optimizer.{key}.{name}" in stored]
            for names in in_buckets
            for name in names.values()
        }
        first = next(iter(keys), "")
        if odd := next((name for name in keys if keys[name] != keys[first]), None):
            raise ValueError(
                f"checkpoint {path} has the states {keys[first]} of {first} and {keys[odd]} of {odd}, "
                f"which are both in parameter group {group}"
            )
        keys_of.append(keys.get(first, []))
        for key in set(keys_of[group]) - set(about["elementwise"]):
            for first, *others in (list(names.values()) for names in in_buckets if names):
                value = stored[f"optimizer.{key}.{first}"]
                if odd := next((n for n in others if not torch.equal(stored[f"optimizer.{key}.{n}"], value)), None):
                    raise ValueError(f"checkpoint {path}: {key} of {first} and {odd} differ, which share a bucket here")
    return keys_of


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options that JSON can hold; a learning rate that is a tensor as a number."""
    values = {k: v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for k, v in group.items()}
    return {key: value for key, value in values.items() if _is_plain(value)}


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold an option of a parameter group (its parameters it cannot)."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(inner, (bool, int, float, str)) for inner in value)
    return value is None or isinstance(value, (bool, int, float, str))
