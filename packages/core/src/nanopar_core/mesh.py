"""``Mesh`` names the axes of a job; an ``Axis`` is what every layer, bucket and dispatcher receives.

    dense view  (outer to inner)   pp, dp_replicate, dp,  cp, tp
    expert view of the same ranks  pp, dp_replicate, edp, ep, etp      edp = dp*cp*tp / (ep*etp), ep inside edp

Groups are made once, in one order, on all ranks; axes over the same ranks share one group. Work with other libraries
goes through torch's ``DeviceMesh``: ``Mesh(device_mesh=...)`` takes a user's, ``mesh.device_mesh`` gives ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nanopar_core.grid import RankLists, expert_sizes, rank_lists
from nanopar_core.torch_private import world_timeout

DENSE = ("pp", "dp_replicate", "dp", "cp", "tp")
EXPERT = ("edp", "ep", "etp")


@dataclass(frozen=True, eq=False)
class Axis:
    """One named direction of the mesh, seen from this rank.

    Attributes:
        name: as in errors and in the ledger.
        size: number of ranks along the axis.
        rank: this process's position, 0 to size - 1.
        group: torch's process group of these ranks; None where nothing is ever sent.
        siblings: the global ranks of this axis and of its parallel copies in the mesh, in mesh order.
        communicates: False makes every collective an identity (the usual case at size 1).
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None
    siblings: RankLists = field(repr=False)
    communicates: bool = field(repr=False)

    def __deepcopy__(self, _memo: object) -> Axis:
        """A copied module talks to the same ranks."""
        return self

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks along the axis, in axis order."""
        here = _here()
        return next(ranks for ranks in self.siblings if here in ranks)

    def split(self, parts: int) -> tuple[Axis, Axis]:
        """Split into (outer, inner): across ``parts`` blocks of neighbours, and within a block.

        Every rank of the world calls this, since groups are made; an axis that covers only some of the world's ranks
        (from ``subset``, or from a user's group) cannot be split. An axis ``tp`` over ranks (0,1,2,3) split in 2 gives
        ``tp_outer`` over (0,2) (1,3) and ``tp_inner`` over (0,1) (2,3).
        """
        if parts < 1 or self.size % parts:
            raise ValueError(f"axis {self.name} of size {self.size} cannot be split into {parts} equal parts")
        self._check_covers_world(f"axis {self.name} cannot be split")
        width = self.size // parts
        outer = tuple(ranks[i::width] for ranks in self.siblings for i in range(width))
        inner = tuple(ranks[i * width : (i + 1) * width] for ranks in self.siblings for i in range(parts))
        forced = self.communicates and self.size == 1
        return _make_axis(f"{self.name}_outer", outer, forced), _make_axis(f"{self.name}_inner", inner, forced)

    def subset(self, places: Sequence[int], name: str) -> Axis | None:
        """An axis over the ranks at some places of this one, in the order given; None on ranks at other places.

        Every rank of the world calls this, as with ``split``: each of the parallel copies gets a group of its own.
        """
        if not places or len(set(places)) != len(places) or not set(places) <= set(range(self.size)):
            raise ValueError(f"subset {name}: {list(places)} is not a list of different places below {self.size}")
        self._check_covers_world(f"axis {self.name} cannot have a subset")
        lists = tuple(tuple(ranks[place] for place in places) for ranks in self.siblings)
        if any(_here() in ranks for ranks in lists):
            return _make_axis(name, lists, self.communicates and len(places) == 1)
        for ranks in lists if len(places) > 1 or self.communicates else ():
            _new_group(ranks)  # every rank of the world takes part in the making of a group
        return None

    def _check_covers_world(self, problem: str) -> None:
        known, world = sum(map(len, self.siblings)), dist.get_world_size() if dist.is_initialized() else 1
        if known != world:
            raise ValueError(
                f"{problem}: it covers {known} of {world} ranks, and all ranks make groups together; use an axis of a "
                "Mesh"
            )


def as_axis(group: Axis | DeviceMesh | dist.ProcessGroup, name: str = "dp") -> Axis:
    """Accept what a user has: an ``Axis``, a one-dimensional ``DeviceMesh``, or a plain process group."""
    if isinstance(group, Axis):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"a DeviceMesh passed as one axis must have one dimension, not {group.ndim}: slice it")
        name = group.mesh_dim_names[0] if group.mesh_dim_names else name
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"an axis is an Axis, a one-dimensional DeviceMesh or a process group of this rank, not {group!r}"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), dist.get_rank(group), group, (ranks,), communicates=len(ranks) > 1)


class Mesh:
    """The axes of one job over all its ranks; axes that are not named have size 1.

    ``Mesh(dp=2, tp=2)`` has ``mesh.dp``, ``mesh.tp`` and all other axes as attributes of type ``Axis``. Without a
    process group (one plain process) every axis has size 1. All ranks make the same meshes in the same order.

    Args:
        pp, dp_replicate, dp, cp, tp: sizes of the dense axes, outer to inner; their product is the number of ranks.
        ep, etp: expert axes over the ranks of a stage; ``etp`` is 1 or tp (the default).
        device_mesh: take sizes and groups of the dense axes from this ``DeviceMesh``, whose dimension names are names
            of dense axes in the order above.
        always_communicate: issue real collectives on axes of size 1 too, so that one GPU can exercise NCCL.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks, or the expert view does not fit; before any group
            is made, naming the axes and numbers.
    """

    pp: Axis
    dp_replicate: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    edp: Axis
    ep: Axis
    etp: Axis

    def __init__(
        self,
        *,
        pp: int = 1,
        dp_replicate: int = 1,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        device_mesh: DeviceMesh | None = None,
        always_communicate: bool = False,
    ) -> None:
        dense = dict(zip(DENSE, (pp, dp_replicate, dp, cp, tp), strict=True))
        if device_mesh is not None:
            dense |= _sizes_of(device_mesh, dense)
        _check_sizes({**dense, "ep": ep, "etp": 1 if etp is None else etp})
        world = dist.get_world_size() if dist.is_initialized() else 1
        if prod(dense.values()) != world:
            shown = " x ".join(f"{name}={size}" for name, size in dense.items() if size > 1) or "every axis of size 1"
            raise ValueError(f"{shown} needs {prod(dense.values())} ranks, but the world has {world}")
        expert = expert_sizes(dense, ep, dense["tp"] if etp is None else etp)

        self.sizes: dict[str, int] = dense | {name: expert[name] for name in EXPERT}
        self._forced = always_communicate and dist.is_initialized()
        self._groups: dict[RankLists, dist.ProcessGroup] = {}
        if dist.is_initialized() and dist.group.WORLD is not None:
            self._groups[(tuple(range(world)),)] = dist.group.WORLD
        if device_mesh is not None:
            for name in device_mesh.mesh_dim_names or ():
                self._groups[rank_lists(dense, [name])] = device_mesh.get_group(name)
        for name in DENSE:
            setattr(self, name, self._axis(name, rank_lists(dense, [name])))
        for name in EXPERT:
            setattr(self, name, self._axis(name, rank_lists(expert, [name])))

    def _axis(self, name: str, lists: RankLists) -> Axis:
        axis = _make_axis(name, lists, self._forced, self._groups.get(lists))
        if axis.group is not None:
            self._groups[lists] = axis.group
        return axis

    def flatten(self, *names: str) -> Axis:
        """One axis from several of one view, the last name fastest: ``flatten("dp", "cp")``. Called by all ranks."""
        if not names or len(set(names)) != len(names):
            raise ValueError(f"flatten needs different axis names, not {names}")
        expert = [name for name in names if name in EXPERT]
        dense = [name for name in names if name in ("dp", "cp", "tp")]
        if expert and dense:
            raise ValueError(f"cannot flatten {dense} of the dense view with {expert} of the expert view")
        view = ("pp", "dp_replicate", *EXPERT) if expert else DENSE
        return self._axis("_".join(names), rank_lists({name: self.sizes[name] for name in view}, names))

    def subset(self, ranks: Sequence[int], name: str) -> Axis | None:
        """An axis over some global ranks in the order given; None on ranks outside. Every rank of the mesh calls it."""
        world = prod(self.sizes[axis] for axis in DENSE)
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world)):
            raise ValueError(f"subset {name}: {list(ranks)} is not a list of different ranks below {world}")
        if _here() in ranks:
            return _make_axis(name, (tuple(ranks),), self._forced)
        if len(ranks) > 1 or self._forced:
            _new_group(ranks)  # every rank of the world takes part in the making of a group
        return None

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """torch's mesh of the dense axes that have more than one rank, on the same groups."""
        names = [name for name in DENSE if self.sizes[name] > 1]
        if not names:
            raise ValueError("a mesh of one rank has no DeviceMesh")
        groups = [getattr(self, name).group for name in names]
        shape = [self.sizes[name] for name in names]
        ranks = torch.arange(prod(shape), dtype=torch.int).view(shape)
        device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        only = groups[0] if len(groups) == 1 else groups
        return DeviceMesh.from_group(only, device_type, mesh=ranks, mesh_dim_names=tuple(names))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1)
        return f"Mesh({shown or 'one rank'})"


def _here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _check_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"axis {name} must have a whole size of at least 1, not {size!r}")


def _sizes_of(device_mesh: DeviceMesh, given: dict[str, int]) -> dict[str, int]:
    names = list(device_mesh.mesh_dim_names or ())
    if not names or names != [name for name in DENSE if name in names]:
        raise ValueError(f"a DeviceMesh needs dimension names out of {DENSE}, in this order, not {names}")
    if clash := [name for name, size in given.items() if size != 1]:
        raise ValueError(f"give the sizes of {clash} either by name or by device_mesh, not both")
    if device_mesh.mesh.flatten().tolist() != list(range(device_mesh.size())):
        raise ValueError("a DeviceMesh must hold the ranks 0, 1, 2, ... row by row")
    return dict(zip(names, device_mesh.shape, strict=True))


def _make_axis(name: str, lists: RankLists, forced: bool, group: dist.ProcessGroup | None = None) -> Axis:
    """This rank's axis out of parallel ones; makes the groups of all of them, in order, where they need any."""
    size = len(lists[0])
    communicates = size > 1 or forced
    if communicates and group is None:
        groups = {ranks: _new_group(ranks) for ranks in lists}
        group = next(made for ranks, made in groups.items() if _here() in ranks)
    mine = next(ranks for ranks in lists if _here() in ranks)
    return Axis(name, size, mine.index(_here()), group if communicates else None, lists, communicates)


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    timeout = world_timeout(default=timedelta(minutes=5))
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)
    return group
