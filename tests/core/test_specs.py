"""ParamSpec's defaults, and the global norm of gradients that lie in pieces."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nanopar_core as core
from nanopar_core import testing


def test_every_parameter_is_replicated_by_default() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Embedding(4, 2))
    specs = core.default_specs(model)
    assert specs == dict.fromkeys(["0.weight", "0.bias", "1.weight"], core.ParamSpec())
    assert core.ParamSpec() == core.ParamSpec(shards=(), data_axis=None, grad_sum=())


def test_specs_are_values() -> None:
    axis = core.Mesh().tp
    spec = core.ParamSpec(shards=(core.Shard(axis, 0, sections=(2, 2)),), grad_sum=(axis,))
    assert spec == core.ParamSpec(shards=(core.Shard(axis, 0, (2, 2)),), grad_sum=(axis,))
    assert hash(spec)
    with pytest.raises(AttributeError):
        spec.grad_sum = ()  # type: ignore[misc]


def norms_on_two_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = core.Mesh(dp=2)
    dp = mesh.dp
    three_four = torch.tensor([[3.0, 0.0], [0.0, 4.0]])[rank]
    seen: dict[str, Any] = {}

    def norm(name: str, *pieces: tuple[Tensor, tuple[core.Axis, ...]]) -> None:
        with core.ledger() as book:
            value = core.global_norm(pieces)
        assert value.ndim == 0
        seen[name] = value.item(), str(value.dtype), [(r.op, r.label) for r in book.records]

    # one gradient (3, 0 | 0, 4), as one piece, as two pieces, with a rank that holds nothing
    norm("sharded", (three_four, (dp,)))
    norm("in two chunks", (three_four[:1], (dp,)), (three_four[1:], (dp,)))
    norm("one rank holds all", (torch.tensor([3.0, 4.0]) if rank == 0 else torch.empty(0), (dp,)))
    norm("zero", (torch.zeros(2), (dp,)))
    norm("replicated", (torch.tensor([3.0, 4.0]), ()))
    # 3-4-12-13: the shards (3, 0 | 0, 4) and a replicated 12, counted once
    norm("mixed", (three_four, (dp,)), (torch.tensor([12.0]), ()))
    norm("nothing")
    norm("float64", (three_four.double(), (dp,)), (torch.tensor([12.0]), ()))
    norm("bf16", (torch.full((1000,), 0.5).bfloat16(), (dp,)))  # 2000 x 0.25, summed in fp32
    norm("not finite", (torch.tensor([float("nan") if rank else 1.0]), (dp,)))
    return seen


def test_norm_on_two_ranks() -> None:
    one = [("all_reduce", "norm")]
    for seen in testing.run(2, norms_on_two_ranks):
        assert seen["sharded"] == (5.0, "torch.float32", one)
        assert seen["in two chunks"] == (5.0, "torch.float32", one)  # one reduction however many pieces
        assert seen["one rank holds all"] == (5.0, "torch.float32", one)
        assert seen["zero"] == (0.0, "torch.float32", one)
        assert seen["replicated"] == (5.0, "torch.float32", [])
        assert seen["mixed"] == (13.0, "torch.float32", one)
        assert seen["nothing"] == (0.0, "torch.float32", [])
        assert seen["float64"] == (13.0, "torch.float64", one)
        assert seen["bf16"][0] == pytest.approx(500**0.5, rel=1e-6)
        assert seen["bf16"][1] == "torch.float32"
        assert seen["not finite"][0] != seen["not finite"][0]


# A small model by hand: what a rank of 2 x 2 (dp x tp) holds of each gradient.
WHOLE = {
    "column": torch.arange(16.0, dtype=torch.float64).view(4, 4) - 7,  # sharded over tp (dim 0), then dp (dim 0)
    "norm": torch.tensor([1.5, -2.5], dtype=torch.float64),  # replicated
    "embedding": torch.arange(6.0, dtype=torch.float64) * 0.3,  # sharded over dp alone, unevenly: 5 and 1
    "expert": torch.arange(4.0, dtype=torch.float64) + 2,  # sharded over tp alone
}


def norm_on_four_ranks() -> tuple[float, float, list[str], bytes]:
    mesh = core.Mesh(dp=2, tp=2)
    dp, tp = mesh.dp, mesh.tp
    pieces = [
        (WHOLE["column"].chunk(2)[tp.rank].chunk(2)[dp.rank], (tp, dp)),
        (WHOLE["norm"], ()),
        (WHOLE["embedding"].split([5, 1])[dp.rank], (dp,)),
        (WHOLE["expert"].chunk(2)[tp.rank], (tp,)),
    ]
    with core.ledger() as book:
        norm = core.global_norm(pieces)
    # and over one axis made of both
    flat = mesh.flatten("dp", "tp")
    other = core.global_norm([(WHOLE["column"][flat.rank : flat.rank + 1], (flat,))])
    return norm.item(), other.item(), [record.axis for record in book.records], norm.numpy().tobytes()


def test_norm_over_two_axes() -> None:
    ranks = testing.run(4, norm_on_four_ranks)
    expected = torch.cat([tensor.flatten() for tensor in WHOLE.values()]).norm().item()
    for norm, other, axes, bits in ranks:
        assert norm == pytest.approx(expected, rel=1e-14)
        assert other == pytest.approx(WHOLE["column"].norm().item(), rel=1e-14)
        assert sorted(axes) == ["dp", "tp"]  # one all-reduce per axis
        assert bits == ranks[0][3]


# -------------------------------------------------------------------------------------------- several strategies' specs


def axis(name: str) -> core.Axis:
    return core.Axis(name, 2, 0, None, ((0, 1),), communicates=False)


def test_specs_of_several_strategies_are_merged() -> None:
    tp, ep, edp, pp = (axis(name) for name in ("tp", "ep", "edp", "pp"))
    merged = core.merge_specs(
        {"norm": core.ParamSpec(grad_sum=(tp,)), "up": core.ParamSpec((core.Shard(tp, 1),))},
        {"up": core.ParamSpec((core.Shard(ep, 0),), data_axis=edp)},
        {name: core.ParamSpec(stages=pp) for name in ("norm", "up", "head")},
    )
    assert merged["norm"] == core.ParamSpec(grad_sum=(tp,), stages=pp)
    assert merged["up"] == core.ParamSpec((core.Shard(tp, 1), core.Shard(ep, 0)), data_axis=edp, stages=pp)
    assert merged["head"] == core.ParamSpec(stages=pp)


def test_specs_that_contradict_each_other_are_refused() -> None:
    tp, ep = axis("tp"), axis("ep")
    one = {"w": core.ParamSpec((core.Shard(tp, 0),), data_axis=tp)}
    with pytest.raises(ValueError, match="w: two strategies divide it along dim 0"):
        core.merge_specs(one, {"w": core.ParamSpec((core.Shard(ep, 0),))})
    with pytest.raises(ValueError, match="w: two strategies name a data_axis, tp and ep"):
        core.merge_specs(one, {"w": core.ParamSpec(data_axis=ep)})


def norm_over_stages() -> float:
    """Each stage has other pieces, on other axes."""
    mesh = core.Mesh(pp=2, tp=2)
    own = [(torch.tensor([3.0]), ()), (torch.tensor([float(mesh.tp.rank)]), (mesh.tp,))]
    pieces = own if mesh.pp.rank == 0 else [(torch.tensor([4.0]), ())]
    return core.global_norm(pieces, stages=mesh.pp).item()


def test_a_norm_adds_up_over_stages_with_different_pieces() -> None:
    assert testing.run(4, norm_over_stages) == [pytest.approx(26.0**0.5)] * 4
