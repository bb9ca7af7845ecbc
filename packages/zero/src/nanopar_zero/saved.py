"""Checkpoints of model and optimizer, for any other layout: every rank's parts are boxes of whole parameters.

    checkpoint               what it holds
    model.<name>             weights and buffers; trained parameters as the masters, in full precision
    optimizer.<key>.<name>   the optimizer's state of that parameter: exp_avg, exp_avg_sq, step, momentum_buffer, ...
    checkpoint.json          the parameter groups' options, and what the caller adds

    a bucket     |p0 |p1    |p2  |      what lies between two places of a flat buffer is some elements of some
    on 2 ranks   |- 0 --|- 1 ----|      parameters, or of a rank's part of them: boxes of the whole ones

Nothing is gathered, to save or to load. Of what several ranks have each writes a share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanopar_core import ParamSpec, checkpoint, gather_objects, split_sizes
from nanopar_core.checkpoint import Parts, Saving, Stored
from nanopar_core.sharding import boxes, places_of_part, whole_shape
from nanopar_zero.buckets import Bucket
from nanopar_zero.layout import Slot
from nanopar_zero.optimizer import FlatShard, ZeroOptimizer
from nanopar_zero.state import Entry, entries_of, loose, publish, settled, specs_of
from nanopar_zero.torch_private import COMPILED

_ABOUT = "nanopar_zero"
_MODEL, _OPTIMIZER = "model.", "optimizer."


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: ZeroOptimizer,
    *,
    extra: Mapping[str, Any] | None = None,
    write_files: Callable[[Path], None] | None = None,
    only_weights: bool = False,
) -> None:
    """Write weights and optimizer state to the directory ``path``; called on all ranks.

    The directory appears when it is whole, or not at all. ``extra`` (JSON values) and the files that ``write_files``
    puts into the directory on rank 0 are kept with it; ``nanopar_core.checkpoint.read_extra`` gives ``extra`` back.
    ``only_weights`` leaves the optimizer's state out, as for an export; ``load`` cannot go on from that.

    Raises:
        RuntimeError: on all ranks, when one of them could not write.
        ValueError: the optimizer keeps what is not a tensor.
    """
    tensors, about = _contents(model, optimizer, only_weights)
    checkpoint.save(path, tensors, {**(extra or {}), _ABOUT: about}, write_files)


def save_in_background(
    path: str | Path,
    model: nn.Module,
    optimizer: ZeroOptimizer,
    *,
    extra: Mapping[str, Any] | None = None,
    write_files: Callable[[Path], None] | None = None,
) -> Saving:
    """As ``save``, but only copies; the directory appears when all ranks call ``finish`` of what this returns."""
    tensors, about = _contents(model, optimizer, only_weights=False)
    return Saving(path, tensors, {**(extra or {}), _ABOUT: about}, write_files)


@torch.no_grad()
def load(path: str | Path, model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Fill model and optimizer in place from a checkpoint of the same model; called on all ranks.

    Layout, stage, number of ranks, units, bucket size, precision and the parameters' assignment to groups may differ
    from those at saving.

    Raises:
        ValueError: no whole checkpoint of ``save`` at ``path``, a damaged file, or names and shapes that do not fit the
            model; nothing has changed then.
    """
    about = checkpoint.read_extra(path).get(_ABOUT)
    if not isinstance(about, dict) or not {"groups", "keys", "elementwise", "tied", "optimizer"} <= set(about):
        raise ValueError(f"checkpoint {path} was not written by nanopar_zero.save")
    buckets = settled(optimizer)
    entries, spec_of = entries_of(model, buckets), specs_of(model, optimizer)
    with checkpoint.reading(path) as found:
        stored = _under_all_names(found, about["tied"])
        others, problem = _names_of_other_stages(optimizer, entries), ""
        keys_of: list[list[str]] = []
        try:
            if not about["groups"]:
                raise ValueError(f"checkpoint {path} holds weights only: it has no state to go on from")
            _check_weights(path, entries, spec_of, stored, others)
            keys_of = _check_states(path, entries, optimizer, stored, about)
        except ValueError as error:
            problem = str(error)
        checkpoint.refuse_together(problem)
        for entry in loose(entries, buckets):
            spec = spec_of(entry)
            part = entry.tensor.contiguous()
            _read(stored[f"{_MODEL}{entry.name}"], spec, part.shape, 0, part.view(-1))
            entry.tensor.copy_(part)
        for bucket in buckets:
            for slot, name in _names_of_slots(bucket, entries).items():
                _read_slot(stored[f"{_MODEL}{name}"], slot, optimizer, bucket.own.start, bucket.masters)
        for group, options in zip(optimizer.param_groups, about["groups"], strict=True):
            _set_options(group, options)
        for shard in optimizer.shards:
            names = _with_states(_names_of_slots(shard.bucket, entries), shard.run.group)
            options = optimizer.param_groups[shard.run.group]
            optimizer.state[shard.flat] = {
                key: _read_state(key, shard, names, stored, options, optimizer, along=key in about["elementwise"])
                for key in (keys_of[shard.run.group] if names else ())
            }
    optimizer.load_extra_state(about["optimizer"])
    publish(optimizer, buckets)


# ------------------------------------------------------------------------------------------------------ what is saved


@torch.no_grad()
def _contents(
    model: nn.Module, optimizer: ZeroOptimizer, only_weights: bool
) -> tuple[dict[str, Tensor | Parts], dict[str, Any]]:
    """This rank's tensors, and what else is needed to load them."""
    buckets = settled(optimizer)
    entries, spec_of = entries_of(model, buckets), specs_of(model, optimizer)
    tensors: dict[str, Tensor | Parts] = {}
    for entry in loose(entries, buckets):
        spec = spec_of(entry)
        part = entry.tensor.detach().contiguous()
        tensors[f"{_MODEL}{entry.name}"] = _parts(spec, part.shape, 0, part.view(-1)) if spec.shards else part
    for bucket in buckets:
        start, stop = _share(bucket, optimizer)
        flat = bucket.masters[start - bucket.own.start : stop - bucket.own.start]
        for slot, name in _names_of_slots(bucket, entries).items():
            parts = _parts_of_slot(slot, optimizer, start, flat)
            if parts.boxes:
                tensors[f"{_MODEL}{name}"] = parts
    kept: dict[str, bool] = {}
    for shard in () if only_weights else optimizer.shards:
        _add_states(tensors, shard, entries, optimizer, kept)
    tied = {name.replace(COMPILED, ""): entry.name for entry in entries for name in entry.names[1:]}
    if optimizer.stages is not None:
        tied = {name: first for of_stage in gather_objects(tied, optimizer.stages) for name, first in of_stage.items()}
    about = {
        "groups": [] if only_weights else [_options(group) for group in optimizer.param_groups],
        "keys": sorted(kept),
        "elementwise": sorted(key for key, along in kept.items() if along),
        "tied": tied,
        "optimizer": optimizer.extra_state(),
    }
    return tensors, about


def _share(bucket: Bucket, optimizer: ZeroOptimizer) -> tuple[int, int]:
    """The elements of a bucket that this rank writes: its own, or of what is equal on the data axis a part."""
    if any(axis.rank for axis in bucket.reduction.more_axes if not optimizer.is_among_stages(axis)):
        # Of equal copies the first is written; of a tied weight every stage's, since they call it differently.
        return bucket.own.start, bucket.own.start
    if bucket.reduction.divided:
        return bucket.own.start, bucket.own.stop
    axis = bucket.reduction.data_axis
    lengths = split_sizes(bucket.layout.length, axis.size)
    start = sum(lengths[: axis.rank])
    return start, start + lengths[axis.rank]


def _add_states(
    tensors: dict[str, Tensor | Parts],
    shard: FlatShard,
    entries: Sequence[Entry],
    optimizer: ZeroOptimizer,
    kept: dict[str, bool],
) -> None:
    """What the optimizer keeps of one flat shard; ``kept`` learns whether a key has an element per weight."""
    start, stop = _share(shard.bucket, optimizer)
    start, stop = max(start, shard.run.start), min(stop, shard.run.stop)
    names = _with_states(_names_of_slots(shard.bucket, entries), shard.run.group)
    for key, value in optimizer.state.get(shard.flat, {}).items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"the optimizer keeps {key} as {type(value).__name__}, only tensors can be saved")
        along = value.shape == shard.flat.shape
        kept[key] = along
        for slot, name in names.items():
            if max(slot.start, start) >= min(slot.start + slot.numel, stop):
                continue
            full_name = f"{_OPTIMIZER}{key}.{name}"
            if along:
                flat = value[start - shard.run.start : stop - shard.run.start]
                tensors[full_name] = _parts_of_slot(slot, optimizer, start, flat)
            else:
                tensors[full_name] = value


def _parts_of_slot(slot: Slot, optimizer: ZeroOptimizer, start: int, flat: Tensor) -> Parts:
    """What of a parameter lies in ``flat``, the elements of its bucket from ``start`` on."""
    first, last = max(slot.start, start), min(slot.start + slot.numel, start + flat.numel())
    spec = optimizer.specs.get(slot.item.name, ParamSpec())
    return _parts(spec, slot.item.shape, first - slot.start, flat[first - start : max(first, last) - start])


def _parts(spec: ParamSpec, part_shape: torch.Size, start: int, flat: Tensor) -> Parts:
    """``flat``, the elements of a rank's part from ``start`` on, as boxes of the whole parameter."""
    shape = whole_shape(torch.empty(part_shape, device="meta"), spec)
    if 0 in shape:
        return Parts(shape, {(0,) * len(shape): flat.new_empty(shape)})
    found = boxes(places_of_part(shape, spec), start, start + flat.numel())
    return Parts(
        shape,
        {
            tuple(one.start for one in box.ranges): flat[box.start - start : box.stop - start].view(box.shape)
            for box in found
        },
    )


# ------------------------------------------------------------------------------------------------------- what is read


def _under_all_names(found: Mapping[str, Stored], tied: Mapping[str, str]) -> dict[str, Stored]:
    """Tied weights, which stand there once, under their other names too: another stage may call them so."""
    stored = dict(found)
    for other, name in tied.items():
        for key, value in found.items():
            if key.endswith(f".{name}"):
                stored.setdefault(f"{key.removesuffix(name)}{other}", value)
    return stored


def _read(stored: Stored, spec: ParamSpec, part_shape: torch.Size, start: int, out: Tensor) -> None:
    """Fill ``out``, the elements of a rank's part of a parameter from ``start`` on."""
    places = places_of_part(whole_shape(torch.empty(part_shape, device="meta"), spec), spec)
    for box in boxes(places, start, start + out.numel()):
        stored.read(box.ranges, out=out[box.start - start : box.stop - start].view(box.shape))


def _read_slot(stored: Stored, slot: Slot, optimizer: ZeroOptimizer, start: int, out: Tensor) -> None:
    """Read what of a parameter lies in ``out``, which is its bucket's buffer from element ``start`` on."""
    first, last = max(slot.start, start), min(slot.start + slot.numel, start + out.numel())
    if first < last:
        spec = optimizer.specs.get(slot.item.name, ParamSpec())
        _read(stored, spec, slot.item.shape, first - slot.start, out[first - start : last - start])


def _read_state(
    key: str,
    shard: FlatShard,
    names: Mapping[Slot, str],
    stored: Mapping[str, Stored],
    options: Mapping[str, Any],
    optimizer: ZeroOptimizer,
    *,
    along: bool,
) -> Tensor:
    """One key of a flat shard's state; ``along``: it has an element per weight."""
    name = next(iter(names.values()))
    example, weight, flat = stored[f"{_OPTIMIZER}{key}.{name}"], stored[f"{_MODEL}{name}"], shard.flat
    if not along:
        on_device = options.get("fused") or options.get("capturable")  # torch's rule for where a step count lives
        return example.read().to(flat.device if on_device else "cpu")
    dtype = flat.dtype if example.dtype == weight.dtype else example.dtype  # a state of its weights' dtype follows them
    values = torch.zeros(flat.shape, dtype=dtype, device=flat.device)
    for slot, name_of_slot in names.items():
        _read_slot(stored[f"{_OPTIMIZER}{key}.{name_of_slot}"], slot, optimizer, shard.run.start, values)
    return values


# ---------------------------------------------------------------------------------------------- what fits a model


def _check_weights(
    path: str | Path,
    entries: Sequence[Entry],
    spec_of: Callable[[Entry], ParamSpec],
    stored: Mapping[str, Stored],
    others: set[str],
) -> None:
    wanted = {f"{_MODEL}{entry.name}": whole_shape(entry.tensor, spec_of(entry)) for entry in entries}
    for name, shape in wanted.items():
        if name not in stored:
            raise ValueError(f"checkpoint {path} has no {name}")
        if tuple(stored[name].shape) != shape:
            raise ValueError(
                f"checkpoint {path}: {name} has shape {list(stored[name].shape)}, the model needs {list(shape)}"
            )
    known = {name.replace(COMPILED, "") for entry in entries for name in entry.names}
    known |= others
    for name in stored:
        if name.startswith(_MODEL) and name not in wanted and name.removeprefix(_MODEL) not in known:
            raise ValueError(f"checkpoint {path} holds {name.removeprefix(_MODEL)}, which the model does not have")


def _names_of_other_stages(optimizer: ZeroOptimizer, entries: Sequence[Entry]) -> set[str]:
    if optimizer.stages is None or optimizer.stages.size == 1:
        return set()
    of_stages = gather_objects([entry.name for entry in entries], optimizer.stages)
    return {name for names in of_stages for name in names}


def _check_states(
    path: str | Path,
    entries: Sequence[Entry],
    optimizer: ZeroOptimizer,
    stored: Mapping[str, Stored],
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
            name: [key for key in about["keys"] if f"{_OPTIMIZER}{key}.{name}" in stored]
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
                value = stored[f"{_OPTIMIZER}{key}.{first}"].read()
                for name in others:
                    if not torch.equal(stored[f"{_OPTIMIZER}{key}.{name}"].read(), value):
                        raise ValueError(f"checkpoint {path}: {key} of {first} and {name} differ, which share a bucket")
    return keys_of


def _names_of_slots(bucket: Bucket, entries: Sequence[Entry]) -> dict[Slot, str]:
    """The parameters of a bucket with their names in checkpoints."""
    names = {id(entry.tensor): entry.name for entry in entries}
    return {slot: names[id(p)] for slot, p in zip(bucket.layout.slots, bucket.members, strict=True)}


def _with_states(names: Mapping[Slot, str], group: int) -> dict[Slot, str]:
    """Those of one group. A parameter without elements has no states, since nothing of it is in any flat shard."""
    return {slot: name for slot, name in names.items() if slot.numel and slot.item.group == group}


# --------------------------------------------------------------------------------------------- options of the groups


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
