"""``shard``: put data parallelism on a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nanopar_core import Axis, ParamSpec, all_reduce, as_axis, broadcast
from nanopar_zero.buckets import Bucket, Reduction
from nanopar_zero.groups import resolve_groups
from nanopar_zero.layout import BucketLayout, Item, bucket_layouts
from nanopar_zero.optimizer import FlatShard, ZeroOptimizer
from nanopar_zero.precision import PrecisionPolicy
from nanopar_zero.reducer import Reducer, is_watched

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def shard(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    axis: Axis | DeviceMesh | ProcessGroup,
    stage: int,
    replicate: Axis | DeviceMesh | ProcessGroup | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    specs: Mapping[str, ParamSpec] | None = None,
    policy: PrecisionPolicy | None = None,
    reduce: str = "mean",
    bucket_bytes: int = 25 * 2**20,
) -> ZeroOptimizer:
    """Train ``model`` on every rank of ``axis`` as if one process saw the batches of all ranks.

    Stage 0 is data parallelism (DDP): weights, gradients and optimizer states are replicated; gradients are summed by
    one asynchronous all-reduce per bucket while backward is still running. The weights of the axis' first rank are
    copied to all others. Each rank then sends 2P(N-1)/N bytes a step for P bytes of gradients on N ranks.

    Args:
        model: any module; its trainable parameters become views of flat buffers, names and shapes stay.
        make_optimizer: builds an elementwise ``torch.optim`` optimizer from parameter groups; it receives ``groups`` in
            order, options kept, with this rank's flat shards as ``params``.
        axis: the data-parallel ranks: an ``Axis``, a one-dimensional ``DeviceMesh`` or a plain process group.
        stage: 0.
        replicate: a second data-parallel axis.
        groups: torch-style parameter groups whose ``params`` are parameters, names, or patterns such as ``"*.bias"``;
            by default one group of all trainable parameters.
        specs: how other strategies have divided parameters; by default every parameter is replicated.
        policy: mixed precision; by default computes in the parameters' own dtype.
        reduce: "mean" divides every gradient by the number of ranks on ``axis`` and ``replicate``, as DDP does; "sum"
            leaves the sum, for losses that are divided by the global number of tokens.
        bucket_bytes: gradients are sent in pieces of at least this size (the last ones may be smaller).

    Raises:
        ValueError: bad stage or reduce, groups that do not fit the model, no trainable parameters, a parameter on the
            meta device, specs for unknown parameters; on all ranks, where their models differ.
        RuntimeError: the model, or a part of it, is in the hands of another ``ZeroOptimizer``; ``close`` that first.
    """
    if stage != 0:
        raise ValueError(f"stage={stage!r} is not available: this version has stage=0, data parallelism")
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce must be "mean" or "sum", not {reduce!r}')
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
    _check_model(model, specs or {})
    data_axis = as_axis(axis)
    copies = () if replicate is None else (as_axis(replicate, "dp_replicate"),)
    divisor = data_axis.size * (copies[0].size if copies else 1) if reduce == "mean" else 1

    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    options, group_of = resolve_groups(groups, trainable)

    def reduction_of(name: str) -> Reduction:
        spec = (specs or {}).get(name, ParamSpec())
        axes = (spec.data_axis or data_axis, *copies, *spec.grad_sum)
        return Reduction(axes, divisor, tuple(part.axis for part in spec.shards))

    items = [
        Item(name, p.shape, p.element_size(), group_of[name], (p.dtype, p.device, reduction_of(name)))
        for name, p in trainable.items()
    ]
    plan = [(layout, reduction_of(layout.slots[0].item.name)) for layout in bucket_layouts(items, bucket_bytes)]
    _check_equal_plans(plan, 1 + len(copies), next(iter(trainable.values())).device)
    buckets = []
    for layout, reduction in plan:
        bucket = Bucket.build(layout, [trainable[slot.item.name] for slot in layout.slots], reduction, policy)
        bucket.synchronize_weights(reduction.axes[: 1 + len(copies)])
        buckets.append(bucket)
    _synchronize_rest(model, (data_axis, *copies), specs or {}, policy)

    flat_groups, shards = _flat_groups(options, buckets)
    return ZeroOptimizer(Reducer(model, buckets), make_optimizer(flat_groups), shards)


def _flat_groups(
    options: Iterable[Mapping[str, Any]], buckets: Iterable[Bucket]
) -> tuple[list[dict[str, Any]], list[FlatShard]]:
    """The user's groups with flat shards in place of parameters, and these shards."""
    flat_groups: list[dict[str, Any]] = [{"params": [], **option} for option in options]
    shards = []
    for bucket in buckets:
        for run in bucket.layout.runs:
            flat = nn.Parameter(bucket.masters[run.start : run.stop])
            flat_groups[run.group]["params"].append(flat)
            shards.append(FlatShard(bucket, run, flat))
    return flat_groups, shards


def _check_model(model: nn.Module, specs: Mapping[str, ParamSpec]) -> None:
    names = {name for name, _ in model.named_parameters()}
    if unknown := sorted(set(specs) - names):
        raise ValueError(f"specs name {unknown[0]}, which is not a parameter of the model")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameters")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: give it storage and values first")
        if is_watched(parameter):
            raise RuntimeError(f"parameter {name} is already trained by a ZeroOptimizer: close() that one first")


def _check_equal_plans(plan: Sequence[tuple[BucketLayout, Reduction]], data_axes: int, device: torch.device) -> None:
    """The ranks of an axis must agree on its buckets: sums of different parameters would go unnoticed.

    Only on the first ``data_axes`` axes of a reduction must names be equal: another stage may name a tied weight anew.
    """
    for axis in dict.fromkeys(axis for _, reduction in plan for axis in reduction.axes):
        parts: list[tuple[object, ...]] = []
        for layout, reduction in plan:
            if axis in reduction.axes:
                named = axis in reduction.axes[:data_axes]
                parts.append((layout.length, layout.runs))
                parts += [(s.start, s.item.shape, s.item.itemsize, s.item.name if named else "") for s in layout.slots]
        digest = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])
        largest = all_reduce(torch.tensor([digest, -digest], device=device), axis, op="max", label="same layout?")
        if largest.tolist() != [digest, -digest]:
            raise ValueError(
                f"the ranks of axis {axis.name} disagree: names, order, shapes and dtypes of trainable parameters, "
                f"their groups and specs, and bucket_bytes must be the same; rank {axis.rank} has {len(plan)} buckets "
                f"of {[layout.length for layout, _ in plan]} elements"
            )


def _synchronize_rest(
    model: nn.Module, axes: tuple[Axis, ...], specs: Mapping[str, ParamSpec], policy: PrecisionPolicy | None
) -> None:
    """Frozen parameters and buffers: equal to the first rank's; frozen parameters in the compute dtype."""
    data_axis, *copies = axes
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            continue
        if policy is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(policy.param_dtype)
        _copy_from_first(parameter.data, (specs.get(name, ParamSpec()).data_axis or data_axis, *copies))
    for buffer in model.buffers():
        _copy_from_first(buffer, axes)


def _copy_from_first(tensor: Tensor, axes: tuple[Axis, ...]) -> None:
    whole = tensor.contiguous()
    for axis in axes:
        broadcast(whole, axis, label="initial weights")
    if whole is not tensor:
        tensor.copy_(whole)
