"""``ParamSpec`` says how one parameter is divided among the ranks; everything else is derived from it, here or in zero.

    {"layers.0.up.weight": ParamSpec(shards=(Shard(tp, dim=0),)),                  column-parallel weight
     "layers.0.norm.weight": ParamSpec(grad_sum=(tp,)),                            norm under sequence parallelism
     "layers.0.experts.down": ParamSpec(shards=(Shard(ep, dim=0),), data_axis=edp)} expert weight

Each strategy says its own axes only; the application merges what they return. A parameter without an entry is
replicated: ``ParamSpec()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanopar_core.collectives import all_reduce
from nanopar_core.mesh import Axis


@dataclass(frozen=True)
class Shard:
    """One division of a parameter: over which axis and dim, and how.

    Attributes:
        axis: the axis over whose ranks the parameter is divided.
        dim: the divided dim of the parameter.
        sections: full lengths along ``dim`` of the parts of a packed weight (gate and up, or q, k and v) that are
            divided one by one; None for a plain weight.
        sizes: local lengths along ``dim`` by rank of the axis where the division is uneven; None where it is even.
    """

    axis: Axis
    dim: int
    sections: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ParamSpec:
    """How one parameter is divided and over which axes its gradient is summed.

    Attributes:
        shards: the divisions, each over another axis.
        data_axis: the axis over which zero shards this parameter and sums its gradient; None means the axis that
            ``zero.shard`` is given (an expert's is ``edp``).
        grad_sum: further axes over which this rank's gradient is only a partial sum.
        stages: the axis of whose ranks each has parameters of its own, as the stages of a pipeline; None where all
            ranks have this one, or a part of it.
    """

    shards: tuple[Shard, ...] = ()
    data_axis: Axis | None = None
    grad_sum: tuple[Axis, ...] = ()
    stages: Axis | None = None


def default_specs(model: nn.Module) -> dict[str, ParamSpec]:
    """The specs of a model to which no strategy was applied: every parameter replicated."""
    return {name: ParamSpec() for name, _ in model.named_parameters()}


def merge_specs(*specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """What several strategies say of one model, in the order in which they were applied.

    Raises:
        ValueError: two of them divide one parameter along one dim, or name two data axes, or two axes of stages.
    """
    merged: dict[str, ParamSpec] = {}
    for one in specs:
        for name, spec in one.items():
            merged[name] = _merged(name, merged[name], spec) if name in merged else spec
    return merged


def _merged(name: str, first: ParamSpec, second: ParamSpec) -> ParamSpec:
    dims = [shard.dim for shard in (*first.shards, *second.shards)]
    if len(set(dims)) < len(dims):
        raise ValueError(f"{name}: two strategies divide it along dim {max(dims, key=dims.count)}")
    for what in ("data_axis", "stages"):
        axes = [getattr(spec, what) for spec in (first, second) if getattr(spec, what) is not None]
        if len(set(axes)) > 1:
            raise ValueError(f"{name}: two strategies name a {what}, {axes[0].name} and {axes[1].name}")
    return ParamSpec(
        (*first.shards, *second.shards),
        first.data_axis or second.data_axis,
        tuple(dict.fromkeys((*first.grad_sum, *second.grad_sum))),
        first.stages or second.stages,
    )


def global_norm(gradients: Iterable[tuple[Tensor, tuple[Axis, ...]]], *, stages: Axis | None = None) -> Tensor:
    """Euclidean norm of a gradient that lies in pieces on many ranks, each element counted once.

    Args:
        gradients: this rank's pieces, each with the axes over whose ranks the pieces are *different* parts of the
            gradient: the axes of the parameter's shards, and the data axis where zero keeps only a part. Over all
            other axes the pieces are copies. All ranks name the same axes in the same order, even where they hold no
            piece: give an empty tensor then.
        stages: an axis of whose ranks each has pieces of other parameters, on other axes too, of one dtype: added up
            last.

    Returns:
        0-dim tensor in the widest dtype of the pieces (at least fp32), equal on all ranks. One all-reduce of a few
        numbers per axis; no host sync.
    """
    pieces: dict[tuple[Axis, ...], list[Tensor]] = {}
    for gradient, axes in gradients:
        pieces.setdefault(axes, []).append(gradient)
    if not pieces and stages is None:
        return torch.zeros(())
    if not pieces:
        raise ValueError("a stage without pieces: give an empty tensor, so that its dtype and device are known")
    dtype = (
        torch.float64 if any(g.dtype == torch.float64 for group in pieces.values() for g in group) else torch.float32
    )
    squares = {axes: _sum_of_squares(group, dtype) for axes, group in pieces.items()}
    for axis in dict.fromkeys(axis for axes in squares for axis in axes):
        over = [axes for axes in squares if axis in axes]
        summed = all_reduce(torch.stack([squares[axes] for axes in over]), axis, label="norm")
        squares |= dict(zip(over, summed.unbind(), strict=True))
    total = torch.stack(list(squares.values())).sum()
    return (total if stages is None else all_reduce(total, stages, label="norm")).sqrt()


def _sum_of_squares(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    return torch.stack(norms).square().sum()
