"""Mesh and Axis: who is where, which ranks share a group, and what is refused before any group is made."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import nanopar_core as core
from nanopar_core import testing

ALL = ("pp", "dp_replicate", "dp", "cp", "tp", "edp", "ep", "etp")


def facts(axis: core.Axis) -> tuple[str, int, int, tuple[int, ...]]:
    """What an axis says, after checking that its group has the same ranks in the same order."""
    if axis.group is not None:
        assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks
        assert dist.get_rank(axis.group) == axis.rank
    assert axis.ranks[axis.rank] == (dist.get_rank() if dist.is_initialized() else 0)
    assert axis.communicates == (axis.size > 1)
    return axis.name, axis.size, axis.rank, axis.ranks


def gathered(axis: core.Axis) -> list[int]:
    """Global ranks in axis order, as the group itself delivers them."""
    return core.all_gather(torch.tensor([dist.get_rank()]), axis, sizes=[1] * axis.size).tolist()


def eight_ranks() -> dict[str, Any]:
    mesh = core.Mesh(pp=2, dp=2, tp=2, ep=4, etp=1)
    seen: dict[str, Any] = {name: facts(getattr(mesh, name)) for name in ALL}
    seen["flat"] = facts(mesh.flatten("dp", "tp"))
    seen["turned"] = facts(mesh.flatten("tp", "dp"))
    seen["outermost"] = facts(mesh.flatten("pp", "dp"))
    seen["turned gather"] = gathered(mesh.flatten("tp", "dp"))
    seen["ep gather"] = gathered(mesh.ep)
    seen["sum over pp"] = core.all_reduce(torch.tensor([dist.get_rank()]), mesh.pp).item()
    outer, inner = mesh.ep.split(2)
    seen["outer"], seen["inner"] = facts(outer), facts(inner)
    seen["outer gather"], seen["inner gather"] = gathered(outer), gathered(inner)
    return seen


def test_members_on_eight_ranks() -> None:
    ranks = testing.run(8, eight_ranks)
    pp = [(0, 4), (1, 5), (2, 6), (3, 7)] * 2
    dp = [(0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7)]
    tp = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    stage = [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4
    turned = [(0, 2, 1, 3)] * 4 + [(4, 6, 5, 7)] * 4
    outermost = [(0, 2, 4, 6), (1, 3, 5, 7)] * 4
    for rank, seen in enumerate(ranks):
        alone = (rank,)
        assert seen["pp"] == ("pp", 2, rank // 4, pp[rank])
        assert seen["dp"] == ("dp", 2, rank // 2 % 2, dp[rank])
        assert seen["tp"] == ("tp", 2, rank % 2, tp[rank])
        assert seen["ep"] == ("ep", 4, rank % 4, stage[rank])
        for name in ("dp_replicate", "cp", "edp", "etp"):
            assert seen[name] == (name, 1, 0, alone)
        assert seen["flat"] == ("dp_tp", 4, rank % 4, stage[rank])
        assert seen["turned"] == ("tp_dp", 4, turned[rank].index(rank), turned[rank])
        assert seen["outermost"] == ("pp_dp", 4, outermost[rank].index(rank), outermost[rank])
        assert seen["turned gather"] == list(turned[rank])
        assert seen["ep gather"] == list(stage[rank])
        assert seen["sum over pp"] == sum(pp[rank])
        base = rank // 4 * 4
        halves = [(base, base + 1), (base + 2, base + 3)]
        crossed = [(base, base + 2), (base + 1, base + 3)]
        assert seen["inner"] == ("ep_inner", 2, rank % 2, halves[rank % 4 // 2])
        assert seen["outer"] == ("ep_outer", 2, rank % 4 // 2, crossed[rank % 2])
        assert seen["inner gather"] == list(seen["inner"][3])
        assert seen["outer gather"] == list(seen["outer"][3])


def four_ranks() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with_tp = core.Mesh(dp=2, tp=2, ep=2)
    seen["etp=tp"] = {name: facts(getattr(with_tp, name)) for name in ("edp", "ep", "etp")}
    without = core.Mesh(dp=2, tp=2, ep=2, etp=1)
    seen["etp=1"] = {name: facts(getattr(without, name)) for name in ("edp", "ep", "etp")}
    seen["expert flatten"] = facts(without.flatten("edp", "ep"))
    seen["shared"] = with_tp.etp.group is with_tp.tp.group, with_tp.ep.group is with_tp.dp.group
    seen["world"] = core.Mesh(cp=4).cp.group is dist.group.WORLD
    seen["flatten shares"] = with_tp.flatten("dp").group is with_tp.dp.group
    # two meshes, two communicators over the same ranks, both usable
    seen["two meshes"] = [core.all_reduce(torch.ones(1), mesh.dp).item() for mesh in (with_tp, without)]

    subset = with_tp.subset([3, 1, 0], "odd")
    seen["subset"] = None if subset is None else (*facts(subset), gathered(subset))
    alone = with_tp.subset([2], "alone")
    seen["alone"] = None if alone is None else (facts(alone), alone.group)
    after = with_tp.subset([1, 2], "after")  # groups made after a subset still agree
    seen["after"] = None if after is None else gathered(after)

    half = with_tp.dp.split(1)
    seen["split in one"] = facts(half[0]), facts(half[1])
    seen["split in all"] = tuple(facts(axis) for axis in with_tp.flatten("dp", "tp").split(4))
    group = dist.new_group([0, 1]) if dist.get_rank() < 2 else None
    if dist.get_rank() >= 2:
        dist.new_group([0, 1])
    seen["refused"] = []
    if group is not None:
        for axis in (core.as_axis(group, "mine"), subset):
            if axis is not None:
                with pytest.raises(ValueError, match=r"covers \d of 4 ranks"):
                    axis.split(1)
                seen["refused"].append(axis.name)
    for bad in ([], [0, 0], [4], [-1, 0]):
        with pytest.raises(ValueError, match="subset bad"):
            with_tp.subset(bad, "bad")
    for names, message in (((), "different"), (("dp", "dp"), "different"), (("dp", "ep"), "dense view")):
        with pytest.raises(ValueError, match=message):
            with_tp.flatten(*names)
    with pytest.raises(ValueError, match="no axis 'xp'"):
        with_tp.flatten("xp")
    with pytest.raises(ValueError, match="dp of size 2 cannot be split into 3"):
        with_tp.dp.split(3)
    seen["repr"] = repr(with_tp)
    return seen


def test_members_on_four_ranks() -> None:
    for rank, seen in enumerate(testing.run(4, four_ranks)):
        rows, columns = [(0, 1), (2, 3)][rank // 2], [(0, 2), (1, 3)][rank % 2]
        assert seen["etp=tp"]["edp"] == ("edp", 1, 0, (rank,))
        assert seen["etp=tp"]["ep"] == ("ep", 2, rank // 2, columns)
        assert seen["etp=tp"]["etp"] == ("etp", 2, rank % 2, rows)
        assert seen["etp=1"]["edp"] == ("edp", 2, rank // 2, columns)
        assert seen["etp=1"]["ep"] == ("ep", 2, rank % 2, rows)
        assert seen["etp=1"]["etp"] == ("etp", 1, 0, (rank,))
        assert seen["expert flatten"] == ("edp_ep", 4, rank, (0, 1, 2, 3))
        assert seen["shared"] == (True, True)
        assert seen["world"]
        assert seen["flatten shares"]
        assert seen["two meshes"] == [2.0, 2.0]
        place = {3: 0, 1: 1, 0: 2}
        inside = rank in place
        assert seen["subset"] == (("odd", 3, place[rank], (3, 1, 0), [3, 1, 0]) if inside else None)
        assert seen["alone"] == ((("alone", 1, 0, (2,)), None) if rank == 2 else None)
        assert seen["after"] == ([1, 2] if rank in (1, 2) else None)
        assert seen["split in one"] == (("dp_outer", 1, 0, (rank,)), ("dp_inner", 2, rank // 2, columns))
        assert seen["split in all"] == (("dp_tp_outer", 4, rank, (0, 1, 2, 3)), ("dp_tp_inner", 1, 0, (rank,)))
        assert seen["refused"] == (["mine", "odd"] if rank < 2 else [])
        assert seen["repr"] == "Mesh(dp=2, tp=2, ep=2, etp=2)"


def impossible() -> list[str]:
    made: list[Any] = []
    new_group = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return new_group(*args, **kwargs)

    dist.new_group = counted
    messages = []
    for sizes in (
        {"dp": 3},
        {"dp": 2, "tp": 2, "pp": 2},
        {},
        {"dp": 4, "ep": 3},
        {"tp": 4, "ep": 2},
        {"tp": 4, "etp": 2},
        {"dp": 0},
        {"dp": -4},
        {"dp": 2.0, "tp": 2},
        {"dp": True, "tp": 4},
        {"dp": 4, "ep": 0},
        {"dp": 4, "etp": 0},
    ):
        with pytest.raises(ValueError) as caught:
            core.Mesh(**sizes)  # type: ignore[arg-type]
        messages.append(str(caught.value))
    assert made == []
    dist.new_group = new_group
    return messages


def test_impossible_sizes_name_axes_and_numbers_before_any_group() -> None:
    every_rank = testing.run(4, impossible)
    assert every_rank == [every_rank[0]] * 4
    assert every_rank[0] == [
        "dp=3 needs 3 ranks, but the world has 4",
        "pp=2 x dp=2 x tp=2 needs 8 ranks, but the world has 4",
        "every axis of size 1 needs 1 ranks, but the world has 4",
        "ep=3 x etp=1 does not divide dp=4 x cp=1 x tp=1 = 4 ranks",
        "ep=2 x etp=4 does not divide dp=1 x cp=1 x tp=4 = 4 ranks",
        "etp=2 must be 1 or equal to tp=4",
        "axis dp must have a whole size of at least 1, not 0",
        "axis dp must have a whole size of at least 1, not -4",
        "axis dp must have a whole size of at least 1, not 2.0",
        "axis dp must have a whole size of at least 1, not True",
        "axis ep must have a whole size of at least 1, not 0",
        "axis etp must have a whole size of at least 1, not 0",
    ]


def with_other_libraries() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = core.Mesh(device_mesh=theirs, ep=2, etp=1)
    seen["from theirs"] = [facts(getattr(mesh, name))[1:] for name in ("pp", "dp", "tp", "ep")]
    seen["same groups"] = mesh.dp.group is theirs.get_group("dp") and mesh.tp.group is theirs.get_group("tp")
    seen["sums"] = [core.all_reduce(torch.tensor([dist.get_rank()]), axis).item() for axis in (mesh.dp, mesh.tp)]

    ours = core.Mesh(dp=2, tp=2)
    seen["ours"] = ours.device_mesh.mesh_dim_names, ours.device_mesh.mesh.tolist()
    seen["ours again"] = ours.device_mesh is ours.device_mesh
    assert ours.device_mesh.get_group("tp") is ours.tp.group
    seen["line"] = core.Mesh(cp=4).device_mesh.mesh.tolist()
    with pytest.raises(ValueError, match="one dimension, not 2"):
        core.as_axis(theirs)
    seen["sliced"] = facts(core.as_axis(theirs["tp"]))

    group = [dist.new_group([3, 0]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
    seen["plain"] = facts(core.as_axis(group, "own"))
    seen["default name"] = core.as_axis(group).name
    assert core.as_axis(mesh.dp) is mesh.dp
    not_mine = dist.new_group([0])
    if dist.get_rank() > 0:
        with pytest.raises(ValueError, match="of this rank"):
            core.as_axis(not_mine)

    for names, other, message in (
        (("tp", "dp"), {}, "in this order"),
        (("x", "y"), {}, "dimension names"),
        (None, {}, "dimension names"),
        (("dp", "tp"), {"dp": 2}, r"sizes of \['dp'\] either by name or by device_mesh"),
    ):
        wrong = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(ValueError, match=message):
            core.Mesh(device_mesh=wrong, **other)
    return seen


def test_meshes_and_groups_of_other_libraries() -> None:
    for rank, seen in enumerate(testing.run(4, with_other_libraries)):
        rows, columns = [(0, 1), (2, 3)][rank // 2], [(0, 2), (1, 3)][rank % 2]
        assert seen["from theirs"] == [
            (1, 0, (rank,)),
            (2, rank // 2, columns),
            (2, rank % 2, rows),
            (2, rank % 2, rows),
        ]
        assert seen["same groups"]
        assert seen["sums"] == [sum(columns), sum(rows)]
        assert seen["ours"] == (("dp", "tp"), [[0, 1], [2, 3]])
        assert seen["ours again"]
        assert seen["line"] == [0, 1, 2, 3]
        assert seen["sliced"] == ("tp", 2, rank % 2, rows)
        pair = (0, 3) if rank in (0, 3) else (1, 2)
        assert seen["plain"] == ("own", 2, pair.index(rank), pair)
        assert seen["default name"] == "dp"


def as_dtensor() -> tuple[list[Any], bool]:
    from torch.distributed.tensor import Shard, distribute_tensor  # slow to import, needed here only

    whole = torch.arange(8.0).view(4, 2)
    placed = distribute_tensor(whole, core.Mesh(dp=2).device_mesh, [Shard(0)])
    return placed.to_local().tolist(), torch.equal(placed.full_tensor(), whole)


def test_torch_works_on_our_device_mesh() -> None:
    assert testing.run(2, as_dtensor) == [([[0.0, 1.0], [2.0, 3.0]], True), ([[4.0, 5.0], [6.0, 7.0]], True)]


def one_rank_always_communicating() -> dict[str, Any]:
    mesh = core.Mesh(always_communicate=True)
    quiet = core.Mesh()
    with core.ledger() as book:
        results = [
            core.all_reduce(torch.ones(2), mesh.dp).tolist(),
            core.all_gather(torch.ones(2), mesh.tp).tolist(),
            core.reduce_scatter(torch.ones(2), mesh.ep).tolist(),
            core.all_to_all(torch.ones(2), mesh.dp).tolist(),
            core.broadcast(torch.ones(2), mesh.dp).tolist(),
            core.all_reduce(torch.ones(2, dtype=torch.bfloat16), mesh.dp).tolist(),
        ]
        core.barrier(mesh.dp)
    outer, inner = mesh.dp.split(1)
    flat = mesh.flatten("dp", "tp")
    return {
        "results": results,
        "ops": sorted({op for op, _ in book.totals()}),
        "bytes": sum(total.bytes for op, total in book.totals().items() if not op[0].endswith("sizes")),
        "communicate": [axis.communicates for axis in (mesh.pp, outer, inner, flat, quiet.dp)],
        "groups": [axis.group is not None for axis in (mesh.pp, outer, inner, flat, quiet.dp)],
    }


def test_one_rank_may_be_forced_to_communicate() -> None:
    (seen,) = testing.run(1, one_rank_always_communicating)
    assert seen["results"] == [[1.0, 1.0]] * 6
    assert seen["ops"] == [
        "all_gather",
        "all_gather_sizes",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "reduce_scatter",
    ]
    assert seen["bytes"] == 0
    assert seen["communicate"] == [True, True, True, True, False]
    assert seen["groups"] == [True, True, True, True, False]


def timeouts() -> list[timedelta]:
    mesh = core.Mesh(dp=2)
    tp = core.Mesh(tp=2).subset([0, 1], "pair")
    assert tp is not None
    inner = mesh.dp.split(1)[1]
    groups = [dist.group.WORLD, mesh.dp.group, tp.group, inner.group]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None]


def test_groups_of_the_mesh_have_the_time_out_of_launch() -> None:
    # torch's new_group would take 30 minutes
    for seen in testing.run(2, timeouts, timeout_s=77.0):
        assert seen == [timedelta(seconds=77)] * 4


def test_without_a_process_group_every_axis_has_one_rank() -> None:
    assert not dist.is_initialized()
    mesh = core.Mesh()
    for name in ALL:
        assert facts(getattr(mesh, name)) == (name, 1, 0, (0,))
        assert getattr(mesh, name).group is None
    assert facts(mesh.flatten("dp", "cp"))[1:] == (1, 0, (0,))
    assert mesh.subset([0], "me") is not None
    assert [facts(axis)[1:] for axis in mesh.dp.split(1)] == [(1, 0, (0,))] * 2
    assert repr(mesh) == "Mesh(one rank)"
    with pytest.raises(ValueError, match="dp=2 needs 2 ranks, but the world has 1"):
        core.Mesh(dp=2)
    with pytest.raises(ValueError, match="one rank has no DeviceMesh"):
        _ = mesh.device_mesh
    with pytest.raises(ValueError, match="not 'dp'"):
        core.as_axis("dp")  # type: ignore[arg-type]
