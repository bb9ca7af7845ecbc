"""Whole weights under the model's own names, in memory; the model's entries, which checkpoints share.

full_state_dict        bucket by bucket: the data axis' parts are put together, then the parts of each parameter
                       that is divided over other axes; the first rank keeps a copy
load_full_state_dict   bucket by bucket: the first rank sends every rank its part
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanopar_core import ParamSpec, all_gather, broadcast, send_recv
from nanopar_core.sharding import whole_parameter
from nanopar_zero.buckets import Bucket
from nanopar_zero.layout import Slot
from nanopar_zero.optimizer import ZeroOptimizer
from nanopar_zero.replicas import copy_from_first
from nanopar_zero.torch_private import COMPILED


@torch.no_grad()
def full_state_dict(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """Copies of the unsharded weights in CPU memory, on the first rank of all axes; empty on other ranks.

    Of a pipeline's stages each has a first rank, with the stage's weights.

    Keys are those of ``model.state_dict()``, buffers and tied names included; trained parameters come in the masters'
    precision. Called on all ranks, of which the others hold one bucket at a time.
    """
    buckets = settled(optimizer)
    entries = entries_of(model, buckets)
    leads = _leads(optimizer) and all(shard.axis.rank == 0 for s in optimizer.specs.values() for shard in s.shards)
    copies: dict[int, Tensor] = {}
    for bucket in buckets:
        gathered = _gather(bucket.masters, bucket)
        for slot, member in zip(bucket.layout.slots, bucket.members, strict=True):
            spec = optimizer.specs.get(slot.item.name, ParamSpec())
            if spec.shards and bucket.reduction.leads:
                value = whole_parameter(_place(gathered, slot), spec, label="full state")
            else:
                value = _place(gathered, slot)
            if leads:
                copies[id(member)] = value.to("cpu", copy=True)
            del value
        del gathered  # before the next one is
    spec_of = specs_of(model, optimizer)
    for entry in loose(entries, buckets):
        value = whole_parameter(entry.tensor.detach(), spec_of(entry), label="full state")
        if leads:
            copies[id(entry.tensor)] = value.to("cpu", copy=True)
    if not leads:
        return {}
    state = model.state_dict(keep_vars=True)
    return {name: copies[id(value)] for name, value in state.items() if isinstance(value, Tensor)}


@torch.no_grad()
def full_gradients(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """Whole gradients as they are now, by the names of ``model.named_parameters()``, on every rank: to look at them.

    Called on all ranks between backward and ``zero_grad``; gradients that are still local are reduced first. Of a
    pipeline each rank has those of its stages.
    """
    optimizer.reducer.reduce_now()
    gradients: dict[int, Tensor] = {}
    for bucket in optimizer.reducer.buckets:
        assert bucket.reduced is not None
        gathered = _gather(bucket.reduced, bucket)
        for slot, member in zip(bucket.layout.slots, bucket.members, strict=True):
            spec = optimizer.specs.get(slot.item.name, ParamSpec())
            gradients[id(member)] = whole_parameter(_place(gathered, slot).clone(), spec, label="full gradients")
    return {name: gradients[id(p)] for name, p in model.named_parameters() if id(p) in gradients}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, optimizer: ZeroOptimizer, state: Mapping[str, Tensor] | None) -> None:
    """Give a sharded model the whole weights that its first rank has; called on all ranks.

    No other rank ever holds more than what it keeps anyway; the first holds one bucket beside ``state``, whose values
    may be read from files one by one. Masters get the values in full precision. The optimizer's state stays as it
    is.

    Args:
        model: what was given to ``shard``.
        optimizer: what that gave.
        state: on rank 0 of the data-parallel axes the weights by the names of ``model.state_dict()`` (one name of a
            tied weight is enough); None or empty on others.

    Raises:
        ValueError: on the first rank, names or shapes that do not fit; on the others, that it has refused.
    """
    _refuse_divided(optimizer)
    buckets, leads = settled(optimizer), _leads(optimizer)
    entries, state = entries_of(model, buckets), state or {}
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
    for entry in loose(entries, buckets):
        if leads:
            entry.tensor.copy_(values[id(entry.tensor)])
        copy_from_first(entry.tensor.detach(), buckets[0].reduction.axes, label="full state")
    publish(optimizer, buckets)


# ------------------------------------------------------------------------------------------------ names and buckets


class Entry(NamedTuple):
    """A parameter or buffer, and its names in the model's state dict: a tied weight has several."""

    tensor: Tensor
    names: list[str]

    @property
    def name(self) -> str:
        """That in checkpoints, where it stands once; the same whether the model is compiled or not."""
        return self.names[0].replace(COMPILED, "")


def entries_of(model: nn.Module, buckets: Sequence[Bucket]) -> list[Entry]:
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


def loose(entries: Sequence[Entry], buckets: Sequence[Bucket]) -> list[Entry]:
    """What is in no bucket: buffers, and parameters that are frozen, in stages 0 to 2."""
    members = {id(member) for bucket in buckets for member in bucket.members}
    return [entry for entry in entries if id(entry.tensor) not in members]


def specs_of(model: nn.Module, optimizer: ZeroOptimizer) -> Callable[[Entry], ParamSpec]:
    """What says how an entry is divided; a buffer is not."""
    specs = {id(p): optimizer.specs[name] for name, p in model.named_parameters() if name in optimizer.specs}
    return lambda entry: specs.get(id(entry.tensor), ParamSpec())


def settled(optimizer: ZeroOptimizer) -> list[Bucket]:
    """All buckets, once their parameters have arrived and weights that the user wrote are in the masters."""
    optimizer.wait()
    buckets = optimizer.windows.buckets
    for bucket in buckets:
        bucket.adopt_edits()
    return buckets


def _leads(optimizer: ZeroOptimizer) -> bool:
    return all(bucket.reduction.leads for bucket in optimizer.windows.buckets)


def publish(optimizer: ZeroOptimizer, buckets: Sequence[Bucket]) -> None:
    """The masters are new: make the model's parameters so."""
    for bucket in buckets:
        bucket.publish()
    optimizer.wait()


def _refuse_divided(optimizer: ZeroOptimizer) -> None:
    for name, spec in optimizer.specs.items():
        if axes := [shard.axis.name for shard in spec.shards if shard.axis.size > 1]:
            raise ValueError(
                f"load_full_state_dict: {name} is divided over {axes[0]} too; fill the model before shard "
                "(nanopar_core.loading), or load a checkpoint"
            )


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
