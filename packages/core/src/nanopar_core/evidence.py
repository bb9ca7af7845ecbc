"""What ``verify`` knows of two runs: their values by name, which deviate, and between which ranks copies differ.

{"loss": [2.0, 1.5], "gradients": {"up": tensor}}  -->  loss[0], loss[1], gradients.up: one leaf each
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanopar_core.grid import RankLists, expert_sizes, rank_lists
from nanopar_core.mesh import DENSE, EXPERT, Axis, Mesh
from nanopar_core.specs import ParamSpec


@dataclass(frozen=True)
class Difference:
    """One disagreement.

    Attributes:
        name: path of the value, as ``gradients.layers.0.weight`` or ``loss[2]``.
        kind: "value", "replicas", "shape", "missing" or "unexpected".
        deviation: largest absolute difference from the reference, or between replicas.
        size: largest absolute value of the reference.
        tolerance: largest deviation allowed; 0 between replicas.
        ratio: candidate / reference where that is one constant.
        detail: for replicas the axes on which they differ, for shapes both shapes.
    """

    name: str
    kind: str
    deviation: float = math.inf
    size: float = 0.0
    tolerance: float = 0.0
    ratio: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        if self.kind in ("missing", "unexpected"):
            return f"{self.kind}: {self.name}"
        if self.kind == "shape":
            return f"{self.name}: {self.detail}"
        if self.kind == "replicas":
            return f"{self.name}: replicas on {self.detail} differ by {self.deviation:.3e}"
        ratio = "" if self.ratio is None else f", ratio {self.ratio:.3f}"
        values = f"differs by {self.deviation:.3e}, largest value {self.size:.3e}"
        return f"{self.name}: {values}, tolerance {self.tolerance:.1e}{ratio}"

    @property
    def excess(self) -> float:
        """Deviation in units of the tolerance, for ordering."""
        return self.deviation / self.tolerance if self.tolerance and math.isfinite(self.deviation) else math.inf


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested dictionaries and lists with its path: ``("weights.up", tensor)``, ``("loss[0]", 2.0)``."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{prefix}[{index}]")
    else:
        yield prefix, value


def as_tensor(value: Any) -> Tensor:
    """Numbers as float64, tensors as they are."""
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def largest(tensor: Tensor) -> float:
    """Largest absolute value, NaN where there is one, 0 of nothing."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def constant_ratio(expected: Tensor, actual: Tensor, slack: float) -> float | None:
    """c with actual = c * expected up to a relative error of ``slack``, by least squares; None where there is none."""
    size = largest(expected.double())
    if not 0.0 < size < math.inf:
        return None
    x, y = expected.double().flatten() / size, actual.double().flatten() / size  # else squares of small values vanish
    ratio = (x.dot(y) / x.dot(x)).item()
    return ratio if largest(y - ratio * x) <= slack * abs(ratio) else None


def axes_of(spec: ParamSpec) -> list[Axis]:
    """All axes that a spec names."""
    data_axis = () if spec.data_axis is None else (spec.data_axis,)
    return [*(shard.axis for shard in spec.shards), *spec.grad_sum, *data_axis]


def ranks_by_axis(
    axes: Mesh | Mapping[str, int] | None, specs: Mapping[str, ParamSpec], ranks: int
) -> dict[str, RankLists]:
    """For each axis of more than one rank the lists of ranks along it.

    Args:
        axes: a mesh, or the sizes that one was made with; without these and without ``specs`` one axis dp.
        specs: may bring axes of their own (flattened or split ones).
        ranks: how many ranks there are to compare, 1 or the whole world.
    """
    found: dict[str, RankLists] = {}
    if isinstance(axes, Mesh):
        found = {name: getattr(axes, name).siblings for name in (*DENSE, *EXPERT)}
    elif axes is not None or not specs:
        sizes = {"dp": ranks} if axes is None else dict(axes)
        if unknown := sorted(set(sizes) - {*DENSE, *EXPERT}):
            raise ValueError(f"axes names {unknown[0]}, which is none of {', '.join((*DENSE, *EXPERT))}")
        dense = {name: sizes.get(name, 1) for name in DENSE}
        expert = expert_sizes(dense, sizes.get("ep", 1), sizes.get("etp", dense["tp"]))
        found = {name: rank_lists(view, [name]) for view in (dense, expert) for name in view}
    for spec in specs.values():
        for axis in axes_of(spec):
            found.setdefault(axis.name, axis.siblings)
    world = max((sum(map(len, lists)) for lists in found.values()), default=1)
    if ranks > 1 and world != ranks:
        raise ValueError(f"candidate has {ranks} ranks, but the axes are those of {world}: give axes={{name: size}}")
    return {name: lists for name, lists in found.items() if len(lists[0]) > 1}


@dataclass
class Evidence:
    """Both sides by leaf, and what deviates.

    Attributes:
        expected: the reference.
        ranks: the candidate, by rank.
        limits: relative tolerance by leaf.
        floor: values below this are held to an absolute tolerance.
        places: lists of ranks by axis.
        wrong: leaves in which the first rank deviates from the reference.
        apart: leaves in which ranks differ, with the axes along which they do.
    """

    expected: dict[str, Tensor]
    ranks: list[dict[str, Tensor]]
    limits: dict[str, float]
    floor: float
    specs: Mapping[str, ParamSpec]
    places: Mapping[str, RankLists]
    micro_batches: int
    wrong: dict[str, Difference] = field(default_factory=dict)
    apart: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def find_deviations(self) -> Iterator[Difference]:
        """Of the first rank from the reference."""
        actual = self.ranks[0]
        for name in self.expected:
            if name not in actual:
                yield Difference(name, "missing")
            elif (difference := self.deviation(name, actual[name])) is not None:
                self.wrong[name] = difference
                yield difference
        yield from (Difference(name, "unexpected") for name in actual if name not in self.expected)

    def find_replicas_apart(self) -> Iterator[Difference]:
        """Of the other ranks from the first."""
        for name in dict.fromkeys(name for rank in self.ranks for name in rank):
            values = [rank.get(name) for rank in self.ranks]
            present = [value for value in values if value is not None]
            if len(present) < len(values):
                yield from (Difference(f"{name} on rank {r}", "missing") for r, v in enumerate(values) if v is None)
            elif not all(_same(present[0], value) for value in present[1:]):
                self.apart[name] = self._axes_apart(name, present)
                gaps = [largest(v.double() - present[0].double()) for v in present if v.shape == present[0].shape]
                yield Difference(name, "replicas", max(gaps), detail=" and ".join(self.apart[name]))

    def deviation(self, name: str, actual: Tensor) -> Difference | None:
        """How a value deviates from the reference, if it does."""
        expected, limit = self.expected[name], self.limits[name]
        if actual.shape != expected.shape:
            return Difference(name, "shape", detail=f"shape {list(actual.shape)} instead of {list(expected.shape)}")
        size, gap = largest(expected.double()), largest(actual.double() - expected.double())
        tolerance = limit * max(size, self.floor)
        if gap <= tolerance < math.inf:  # false for NaN
            return None
        return Difference(name, "value", gap, size, tolerance, constant_ratio(expected, actual, self.slack))

    @property
    def slack(self) -> float:
        """Relative error up to which a ratio counts as constant, and as equal to a size."""
        return max(4 * max(self.limits.values()), 1e-6)

    @property
    def steps(self) -> int:
        """How many optimizer steps the runs made."""
        return max(1, *(sum(name.startswith(f"{key}[") for name in self.expected) for key in ("loss", "norm")))

    @property
    def starts_right(self) -> bool:
        """Whether the first step's loss and norm are right, and its gradients where it is the only step."""
        first = {self.first("loss"), self.first("norm")}
        return not first & (self.wrong.keys() | self.apart.keys()) and (self.steps > 1 or not self.wrong_gradients)

    @property
    def wrong_gradients(self) -> list[str]:
        """The parameters with a wrong gradient, in the model's order."""
        return self.names("gradients", self.wrong)

    def spec(self, name: str) -> ParamSpec:
        """Of a parameter or of its gradient's or weight's leaf."""
        return self.specs.get(name.removeprefix("gradients.").removeprefix("weights."), ParamSpec())

    def own_axes(self, name: str) -> dict[str, RankLists]:
        """The axes that this parameter's spec names."""
        named = {axis.name for axis in axes_of(self.spec(name))}
        return {axis: lists for axis, lists in self.places.items() if axis in named}

    def view(self, name: str) -> dict[str, RankLists]:
        """The axes that this value knows: those of the expert view for a parameter with such a data axis."""
        data_axis = self.spec(name).data_axis
        expert = data_axis is not None and data_axis.name in EXPERT
        return {axis: lists for axis, lists in self.places.items() if (axis in EXPERT) == expert}

    def _axes_apart(self, name: str, values: Sequence[Tensor]) -> tuple[str, ...]:
        def differ(lists: RankLists) -> bool:
            return not all(_same(values[ranks[0]], values[rank]) for ranks in lists for rank in ranks)

        for places in (self.view(name), self.places):
            if found := tuple(axis for axis, lists in places.items() if differ(lists)):
                return found
        return tuple(self.places)

    def replicas(self, name: str) -> list[Tensor]:
        """The different copies: the values of all ranks that the axes in ``apart`` connect with the first rank."""
        connected = {0}
        for _ in self.apart[name]:
            for axis in self.apart[name]:
                connected.update(*(ranks for ranks in self.places[axis] if connected & set(ranks)))
        return [self.ranks[rank][name].double() for rank in sorted(connected)]

    def names(self, key: str, among: Iterable[str]) -> list[str]:
        """Names of the parameters whose gradient or weight is among these leaves, in the model's order."""
        return [name.removeprefix(f"{key}.") for name in among if name.startswith(f"{key}.")]

    def first(self, key: str) -> str:
        """The leaf of the first step."""
        return f"{key}[0]" if f"{key}[0]" in self.expected else key
