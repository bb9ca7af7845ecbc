"""``shard``: put data parallelism on a model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nanopar_core import Axis, ParamSpec, all_reduce, as_axis
from nanopar_zero.buckets import Bucket, Reduction
from nanopar_zero.groups import resolve_groups
from nanopar_zero.layout import BucketLayout, Item, bucket_layouts
from nanopar_zero.loss_scale import LossScaler
from nanopar_zero.meta import filled, home
from nanopar_zero.optimizer import FlatShard, ZeroOptimizer
from nanopar_zero.precision import PrecisionPolicy
from nanopar_zero.reducer import Reducer, hooks_on
from nanopar_zero.replicas import copy_from_first
from nanopar_zero.rounding import Rounding
from nanopar_zero.stages import STAGES, Stage
from nanopar_zero.units import find_units, unit_of_parameters
from nanopar_zero.windows import Unit, Windows

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def shard(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    axis: Axis | DeviceMesh | ProcessGroup,
    stage: int,
    replicate: Axis | DeviceMesh | ProcessGroup | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    units: Sequence[str | nn.Module] | None = None,
    specs: Mapping[str, ParamSpec] | None = None,
    init: Callable[[nn.Module], object] | None = None,
    policy: PrecisionPolicy | None = None,
    reduce: str = "mean",
    bucket_bytes: int = 8 * 2**20,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
) -> ZeroOptimizer:
    """Train ``model`` on every rank of ``axis`` as if one process saw the batches of all ranks.

    The stages are those of ZeRO: 0 replicates everything (DDP), 1 divides the optimizer's states among the ranks, 2 the
    gradients too, 3 the parameters too. The table in ``nanopar_zero.stages`` says what each of them holds and sends.
    The weights of the axis' first rank are copied to all others. In stage 3 all ranks run forward and backward equally
    often, through ``model`` itself, and a parameter is read only while the module of its unit runs.

    Args:
        model: any module; its parameters become views of flat buffers, names and shapes stay.
        make_optimizer: builds an elementwise ``torch.optim`` optimizer from parameter groups; it receives ``groups`` in
            order, options kept, with this rank's flat shards as ``params``.
        axis: the data-parallel ranks: an ``Axis``, a one-dimensional ``DeviceMesh`` or a plain process group.
        stage: 0, 1, 2 or 3.
        replicate: a second data-parallel axis, over which everything is replicated (HSDP).
        groups: torch-style parameter groups whose ``params`` are parameters, names, or patterns such as ``"*.bias"``;
            by default one group of all trainable parameters.
        units: modules (or their names; ``"layers.*"`` names all children) whose parameters are gathered at once, in the
            order of forward; by default the repeated blocks, and large embeddings and linear layers.
        specs: how other strategies have divided parameters; by default every parameter is replicated.
        init: for a model, or parts of it, on the meta device: called without gradients for each module that has
            parameters or buffers of its own there, in model order, once these have storage (on torch's default device),
            to fill them in place. Beside its part a rank of stage 3 never holds more than two units.
        policy: mixed precision; by default computes in the parameters' own dtype.
        reduce: "mean" divides every gradient by the number of ranks on ``axis`` and ``replicate``, as DDP does; "sum"
            leaves the sum, for losses that are divided by the global number of tokens.
        bucket_bytes: stages 0 to 2 send gradients in pieces of at least this size (the last ones may be smaller);
            stage 3 sends unit by unit.
        prefetch: stage 3 gathers this many units ahead of the one that runs; at most ``prefetch + 1`` are whole.
        reshard_after_forward: False keeps units whole from forward to backward: one gather less, more memory.

    Raises:
        ValueError: bad stage, reduce, units or groups that do not fit the model, no trainable parameters, a parameter
            on the meta device without ``init``, specs for unknown parameters; on all ranks, where their models differ.
        RuntimeError: the model, or a part of it, is in the hands of another ``ZeroOptimizer``; ``close`` that first.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce must be "mean" or "sum", not {reduce!r}')
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
    if prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, not {prefetch}")
    specs = _under_first_names(model, specs or {})
    _check_model(model, init)
    divides = STAGES[stage]
    data_axis = as_axis(axis)
    copies = () if replicate is None else (as_axis(replicate, "dp_replicate"),)
    divisor = data_axis.size * (copies[0].size if copies else 1) if reduce == "mean" else 1
    modules = find_units(model, units)
    unit_of = unit_of_parameters(model, modules)
    flat = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or (divides.divides_parameters and parameter.is_floating_point())
    }
    options, group_of = resolve_groups(groups, {name: p for name, p in flat.items() if p.requires_grad})

    def reduction_of(name: str) -> Reduction:
        spec = specs.get(name, ParamSpec())
        return Reduction(
            spec.data_axis or data_axis,
            divides.divides_states,
            (*copies, *spec.grad_sum),
            divisor,
            tuple(part.axis for part in spec.shards),
        )

    items = [
        _item(name, p, group_of.get(name, 0), reduction_of(name), unit_of[name], divides) for name, p in flat.items()
    ]

    def bytes_of(key: Hashable) -> float:
        if divides.divides_parameters:
            return float("inf")  # all parameters of a unit
        if not _key(key).reduction.communicates and not (policy is not None and policy.stochastic_rounding):
            return 1  # a bucket of one parameter takes its gradient as it is; random numbers go by bucket
        return bucket_bytes

    layouts = bucket_layouts(items, bytes_of, lambda key: _key(key).reduction.parts)
    if divides.divides_parameters:  # the last unit has its gradients first, the root's are there at the end
        layouts.sort(key=lambda layout: -_key(layout.slots[0].item.key).unit)
    _check_equal_plans(layouts, 1 + len(copies), home(next(iter(flat.values()))))

    def build(layout: BucketLayout) -> Bucket:
        reduction = _key(layout.slots[0].item.key).reduction
        return Bucket.build(
            layout,
            [flat[slot.item.name] for slot in layout.slots],
            reduction,
            policy,
            frees_parameters=divides.divides_parameters,
            keeps_local=not divides.divides_gradients,
            equal_axes=reduction.axes[: 1 + len(copies)],
        )

    is_first = all(axis.rank == 0 for axis in (data_axis, *copies))
    buckets = _build_as_filled(layouts, flat, filled(model, init, is_first=is_first), build)
    _synchronize_rest(model, set(flat), (data_axis, *copies), specs, policy)

    trained = [bucket for bucket in buckets if bucket.members[0].requires_grad]
    rounding = Rounding(policy.rounding_seed, trained) if policy is not None and policy.stochastic_rounding else None
    scaler = LossScaler(policy.loss_scale) if policy is not None and policy.loss_scale is not None else None
    flat_groups, shards = _flat_groups(options, trained, rounding)
    inner = make_optimizer(flat_groups)
    reducer = Reducer(
        trained, keeps_local=not divides.divides_gradients, by_units=divides.divides_parameters, scaler=scaler
    )
    windows = Windows(
        _units(modules, unit_of, buckets, divides),
        reducer,
        frees=divides.divides_parameters,
        prefetch=prefetch,
        reshard_after_forward=reshard_after_forward,
        loose=[(p, reduction_of(name)) for name, p in model.named_parameters() if name not in flat],
    )
    return ZeroOptimizer(reducer, windows, inner, shards, specs, rounding)


class _Key(NamedTuple):
    """What parameters must have in common to share a bucket; ``unit`` is -1 where that does not matter."""

    dtype: torch.dtype
    device: torch.device
    reduction: Reduction
    trained: bool
    unit: int


def _key(key: Hashable) -> _Key:
    assert isinstance(key, _Key)
    return key


def _item(name: str, p: nn.Parameter, group: int, reduction: Reduction, unit: int, stage: Stage) -> Item:
    """Stage 3 has the buckets of each unit, stages 1 and 2 those of the root, which is needed first, apart."""
    apart = unit if stage.divides_parameters else min(unit, 1) if stage.divides_states else 1
    return Item(name, p.shape, p.element_size(), group, _Key(p.dtype, home(p), reduction, p.requires_grad, apart))


def _build_as_filled(
    layouts: Sequence[BucketLayout],
    flat: dict[str, nn.Parameter],
    filling: Iterable[Mapping[str, nn.Parameter]],
    build: Callable[[BucketLayout], Bucket],
) -> list[Bucket]:
    """Build each bucket as soon as all its parameters have values; ``flat`` gets those that have come."""
    number_of = {slot.item.name: number for number, layout in enumerate(layouts) for slot in layout.slots}
    missing = Counter(number_of.values())
    built: dict[int, Bucket] = {}
    for come in filling:
        flat |= {name: parameter for name, parameter in come.items() if name in flat}
        missing.subtract(number_of[name] for name in come if name in number_of)
        for number, left in missing.items():
            if not left and number not in built:
                built[number] = build(layouts[number])
    return [built[number] for number in range(len(layouts))]


def _units(
    modules: Sequence[tuple[str, nn.Module]], unit_of: Mapping[str, int], buckets: Sequence[Bucket], stage: Stage
) -> list[Unit]:
    """The units with all buckets that hold parameters of theirs, in the order of forward; stage 0 has the root only."""
    units = [Unit(name, module, []) for name, module in modules]
    for bucket in reversed(buckets):
        for index in sorted({unit_of[slot.item.name] for slot in bucket.layout.slots}):
            units[index].buckets.append(bucket)
    return units if stage.divides_states else units[:1]


def _flat_groups(
    options: Iterable[Mapping[str, Any]], buckets: Iterable[Bucket], rounding: Rounding | None
) -> tuple[list[dict[str, Any]], list[FlatShard]]:
    """The user's groups with flat shards in place of parameters, and these shards."""
    flat_groups: list[dict[str, Any]] = [{"params": [], **option} for option in options]
    shards = []
    for bucket in buckets:
        for run in bucket.layout.runs_within(bucket.own.start, bucket.own.stop):
            masters = bucket.masters[run.start - bucket.own.start : run.stop - bucket.own.start]
            flat = nn.Parameter(masters if rounding is None else rounding.absent(masters))
            flat_groups[run.group]["params"].append(flat)
            shards.append(FlatShard(bucket, run, flat))
    return flat_groups, shards


def _under_first_names(model: nn.Module, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """The specs of tied parameters too, which may be given under any of their names."""
    every = dict(model.named_parameters(remove_duplicate=False))
    if unknown := sorted(set(specs) - set(every)):
        raise ValueError(f"specs name {unknown[0]}, which is not a parameter of the model")
    first = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, ParamSpec] = {}
    for name, spec in specs.items():
        if found.setdefault(first[every[name]], spec) != spec:
            raise ValueError(f"{first[every[name]]} and {name} are one parameter, but their specs differ")
    return found


def _check_model(model: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameters")
    for name, parameter in model.named_parameters():
        if parameter.is_meta and init is None:
            raise ValueError(
                f"parameter {name} is on the meta device: give it storage and values first, or pass init to fill it"
            )
        if hooks_on(parameter):
            raise RuntimeError(f"parameter {name} is already trained by a ZeroOptimizer: close() that one first")


def _check_equal_plans(layouts: Sequence[BucketLayout], data_axes: int, device: torch.device) -> None:
    """The ranks of an axis must agree on its buckets: sums of different parameters would go unnoticed.

    Only on the first ``data_axes`` axes of a reduction must names be equal: another stage may name a tied weight anew.
    """
    plan = [(layout, _key(layout.slots[0].item.key)) for layout in layouts]
    for axis in dict.fromkeys(axis for _, key in plan for axis in key.reduction.axes):
        parts: list[tuple[object, ...]] = []
        for layout, key in plan:
            if axis in key.reduction.axes:
                named = axis in key.reduction.axes[:data_axes]
                parts.append((layout.length, layout.runs, key.reduction.divided, key.trained, key.unit))
                parts += [(s.start, s.item.shape, s.item.itemsize, s.item.name if named else "") for s in layout.slots]
        digest = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])
        largest = all_reduce(torch.tensor([digest, -digest], device=device), axis, op="max", label="same layout?")
        if largest.tolist() != [digest, -digest]:
            raise ValueError(
                f"the ranks of axis {axis.name} disagree: names, order, shapes and dtypes of trainable parameters, "
                f"their groups and specs, stage, units and bucket_bytes must be the same; rank {axis.rank} has "
                f"{len(layouts)} buckets of {[layout.length for layout in layouts]} elements"
            )


def _synchronize_rest(
    model: nn.Module,
    flat: Collection[str],
    axes: tuple[Axis, ...],
    specs: Mapping[str, ParamSpec],
    policy: PrecisionPolicy | None,
) -> None:
    """Parameters outside of the buckets and buffers: equal to the first rank's; parameters in the compute dtype."""
    data_axis, *copies = axes
    for name, parameter in model.named_parameters():
        if name in flat:
            continue
        if policy is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(policy.param_dtype)
        axes_here = (specs.get(name, ParamSpec()).data_axis or data_axis, *copies)
        copy_from_first(parameter.data, axes_here, label="initial weights")
    for buffer in model.buffers():
        copy_from_first(buffer, axes, label="initial weights")
