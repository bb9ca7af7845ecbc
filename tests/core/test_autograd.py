"""Every autograd pair against its mathematical definition.

The definition is written in one process with plain torch, in float64: all ranks' inputs -> all ranks' outputs -> one
loss. Differentiating it gives what each rank must get. What the ranks hold decides how it is written:

    same     one tensor that every rank holds whole: one leaf, and its gradient is expected on every rank
    split    a part that only this rank has: one leaf per rank
    partial  a summand of the true tensor: one leaf per rank
    output   *same*: the loss is one, and every rank computes it; otherwise the loss is the sum of the ranks' shares
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nanopar_core as core
from nanopar_core import testing

Pair = Callable[..., Tensor]
both_sizes = pytest.mark.parametrize("world_size", [2, 4])


@dataclass(frozen=True)
class Case:
    """One pair: its definition on all ranks' inputs, and what inputs and outputs are."""

    pair: Pair
    input_is: str  # same, split, partial
    output_is: str  # same, split, or "own": whole on every rank, but each uses it in its own way
    define: Callable[[Sequence[Tensor], int, Sequence[int]], list[Tensor]]  # inputs of all ranks, dim, sizes -> outputs
    forward_op: str | None
    backward_op: str | None


def total(inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(inputs)).sum(0)


CASES = {
    # same -> used by each rank in its own way
    "identity_fwd_all_reduce_bwd": Case(
        core.identity_fwd_all_reduce_bwd,
        "same",
        "own",
        lambda xs, _dim, _sizes: list(xs),
        None,
        "all_reduce",
    ),
    # partial -> same
    "all_reduce_fwd_identity_bwd": Case(
        core.all_reduce_fwd_identity_bwd,
        "partial",
        "same",
        lambda xs, _dim, _sizes: [total(xs)] * len(xs),
        "all_reduce",
        None,
    ),
    # partial -> used by each rank in its own way
    "all_reduce_fwd_all_reduce_bwd": Case(
        core.all_reduce_fwd_all_reduce_bwd,
        "partial",
        "own",
        lambda xs, _dim, _sizes: [total(xs)] * len(xs),
        "all_reduce",
        "all_reduce",
    ),
    # same -> split
    "split_fwd_all_gather_bwd": Case(
        core.split_fwd_all_gather_bwd,
        "same",
        "split",
        lambda xs, dim, sizes: [x.split(list(sizes), dim)[rank] for rank, x in enumerate(xs)],
        None,
        "all_gather",
    ),
    # split -> same
    "all_gather_fwd_split_bwd": Case(
        core.all_gather_fwd_split_bwd,
        "split",
        "same",
        lambda xs, dim, _sizes: [torch.cat(list(xs), dim)] * len(xs),
        "all_gather",
        None,
    ),
    # split -> used by each rank in its own way
    "all_gather_fwd_reduce_scatter_bwd": Case(
        core.all_gather_fwd_reduce_scatter_bwd,
        "split",
        "own",
        lambda xs, dim, _sizes: [torch.cat(list(xs), dim)] * len(xs),
        "all_gather",
        "reduce_scatter",
    ),
    # partial -> split
    "reduce_scatter_fwd_all_gather_bwd": Case(
        core.reduce_scatter_fwd_all_gather_bwd,
        "partial",
        "split",
        lambda xs, dim, sizes: list(total(xs).split(list(sizes), dim)),
        "reduce_scatter",
        "all_gather",
    ),
}


def random(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shapes(dim: int, sizes: Sequence[int], split: bool) -> list[tuple[int, ...]]:
    """Shape of each rank's tensor: 3 x 2 with the divided dim put in, whole or in parts."""
    lengths = list(sizes) if split else [sum(sizes)] * len(sizes)
    base = [3, 2]
    at = dim % 3
    return [(*base[:at], length, *base[at:]) for length in lengths]


def expected_gradients(
    case: Case, dim: int, sizes: Sequence[int], leaves: list[Tensor], weights: list[Tensor], n: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs, gradients, and gradients of the squared gradients, by rank, from plain torch in one process."""
    inputs = leaves * n if case.input_is == "same" else leaves
    outputs = case.define(inputs, dim, sizes)
    if case.output_is == "same":
        # one loss, computed by all ranks alike; each rank's own term in x belongs to that rank
        loss = (weights[0] * outputs[0].pow(3)).sum() + outputs[0].sin().sum()
        loss = loss + sum(0.1 * x.pow(2).sum() for x in leaves)
    else:
        loss = sum(
            ((w * out.pow(3)).sum() + out.sin().sum() for w, out in zip(weights, outputs, strict=True)),
            torch.zeros((), dtype=torch.float64),
        ) + sum(0.1 * x.pow(2).sum() for x in leaves)
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), leaves)  # type: ignore[arg-type]
    by_rank = [list(part) * n if case.input_is == "same" else list(part) for part in (gradients, second)]
    return [out.detach() for out in outputs], [g.detach() for g in by_rank[0]], by_rank[1]


def check_pairs() -> int:
    n, rank = dist.get_world_size(), dist.get_rank()
    axis = core.Mesh(tp=n).tp
    divisions = {
        "even": [2] * n,
        "default": list(core.split_sizes(2 * n + 1, n)),
        "uneven": [rank_ + 1 for rank_ in range(n)],
        "with empty parts": [0] * (n - 1) + [3],
    }
    checked = 0
    for name, case in CASES.items():
        for dim in (0, 1, -1):
            for division, sizes in divisions.items():
                leaf_shapes = shapes(dim, sizes, split=case.input_is == "split")
                leaf_shapes = leaf_shapes[:1] if case.input_is == "same" else leaf_shapes
                leaves = [random(shape, 10 + i).requires_grad_() for i, shape in enumerate(leaf_shapes)]
                out_shapes = shapes(dim, sizes, split=case.output_is == "split")
                same = case.output_is == "same"
                weights = [random(shape, 20 + (0 if same else i)) for i, shape in enumerate(out_shapes)]
                outputs, gradients, second = expected_gradients(case, dim, sizes, leaves, weights, n)

                x = leaves[0 if case.input_is == "same" else rank].detach().clone().requires_grad_()
                arguments: dict[str, Any] = {}
                if "all_reduce" not in name:
                    arguments["dim"] = dim
                    if division not in ("even", "default"):
                        arguments["sizes"] = sizes
                with core.ledger() as forward:
                    output = case.pair(x, axis, label="pair", **arguments)
                torch.testing.assert_close(output, outputs[rank], rtol=1e-14, atol=1e-14)
                loss = (weights[rank] * output.pow(3)).sum() + output.sin().sum()
                # a term of x beside the collective: counted once where x is the same everywhere
                own_term = 0.1 * x.pow(2).sum()
                with core.ledger() as backward:
                    (gradient,) = torch.autograd.grad(loss + own_term, x, create_graph=True)
                torch.testing.assert_close(gradient, gradients[rank], rtol=1e-12, atol=1e-12)
                (twice,) = torch.autograd.grad(gradient.pow(2).sum(), x)
                torch.testing.assert_close(twice, second[rank], rtol=1e-11, atol=1e-11)
                ops = [r.op for r in forward.records if r.label == "pair"], [r.op for r in backward.records]
                assert ops == tuple([op] if op else [] for op in (case.forward_op, case.backward_op)), (name, ops)
                assert {r.label for r in backward.records} <= {"pair"}
                checked += 1
    return checked


@both_sizes
def test_pairs_against_their_definition(world_size: int) -> None:
    assert testing.run(world_size, check_pairs) == [len(CASES) * 3 * 4] * world_size


def check_all_to_all() -> None:
    """Split -> split along another division: rows keep their owner's gradient."""
    n, rank = dist.get_world_size(), dist.get_rank()
    axis = core.Mesh(ep=n, dp=n).ep
    tables = [
        [[2] * n for _ in range(n)],
        [[(source + 2 * peer) % 3 for peer in range(n)] for source in range(n)],
        [[3 if peer == n - 1 else 0 for peer in range(n)] for _ in range(n)],  # the others get nothing
    ]
    for at, table in enumerate(tables):
        leaves = [random((sum(row), 3), 30 + source).requires_grad_() for source, row in enumerate(table)]
        outputs = [
            torch.cat([leaf.split(row)[peer] for leaf, row in zip(leaves, table, strict=True)]) for peer in range(n)
        ]
        weights = [random(output.shape, 40 + peer) for peer, output in enumerate(outputs)]
        loss = sum((w * out.pow(3)).sum() + out.sin().sum() for w, out in zip(weights, outputs, strict=True))
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)  # type: ignore[arg-type]
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), leaves)  # type: ignore[arg-type]
        send, receive = table[rank], [row[rank] for row in table]
        ways: list[dict[str, Any]] = [{"send_sizes": send, "receive_sizes": receive}, {"send_sizes": send}]
        if at == 0:
            ways += [{}, {"receive_sizes": receive}]
        for arguments in ways:
            x = leaves[rank].detach().clone().requires_grad_()
            output = core.all_to_all_fwd_all_to_all_bwd(x, axis, **arguments)
            assert torch.equal(output, outputs[rank])
            mine = (weights[rank] * output.pow(3)).sum() + output.sin().sum()
            (gradient,) = torch.autograd.grad(mine, x, create_graph=True)
            torch.testing.assert_close(gradient, gradients[rank], rtol=1e-13, atol=1e-13)
            (twice,) = torch.autograd.grad(gradient.pow(2).sum(), x)
            torch.testing.assert_close(twice, second[rank], rtol=1e-12, atol=1e-12)


@both_sizes
def test_all_to_all_against_its_definition(world_size: int) -> None:
    testing.run(world_size, check_all_to_all)


def plain_mlp(n: int) -> list[torch.Tensor]:
    """x, up, down, gain for n ranks."""
    tokens, hidden, inner = 2 * n + 1, 3, 4 * n
    sizes = [(tokens, hidden), (hidden, inner), (inner, hidden)]
    return [*(random(size, 50 + i) for i, size in enumerate(sizes)), random((hidden,), 60)]


def chain(sequence: bool) -> dict[str, Any]:
    """A Megatron MLP, column then row parallel, or its sequence-parallel form; what ranks divide is put together."""
    n, rank = dist.get_world_size(), dist.get_rank()
    axis = core.Mesh(tp=n).tp
    x, up, down, gain = plain_mlp(n)
    width, rows = slice(rank * 4, rank * 4 + 4), list(core.split_sizes(len(x), n))
    own = {"x": x.split(rows)[rank] if sequence else x, "up": up[:, width], "down": down[width], "gain": gain}
    own = {name: value.clone().requires_grad_() for name, value in own.items()}
    h = own["x"] * own["gain"]
    if sequence:
        h = core.all_gather_fwd_reduce_scatter_bwd(h, axis, sizes=rows)
        y = core.reduce_scatter_fwd_all_gather_bwd((h @ own["up"]).tanh() @ own["down"], axis, sizes=rows)
    else:
        h = core.identity_fwd_all_reduce_bwd(h, axis)
        y = core.all_reduce_fwd_identity_bwd((h @ own["up"]).tanh() @ own["down"], axis)
    (y * own["gain"]).pow(2).sum().backward()
    gradients = {name: value.grad for name, value in own.items() if value.grad is not None}
    gradients["up"] = core.all_gather(gradients["up"].t().contiguous(), axis).t()
    gradients["down"] = core.all_gather(gradients["down"], axis)
    y = y.detach()
    if sequence:
        gradients["x"], y = (core.all_gather(part, axis, sizes=rows) for part in (gradients["x"], y))
        # the gain is replicated, its gradient a partial sum (`grad_sum`)
        gradients["gain"] = core.all_reduce(gradients["gain"], axis)
    return {"outputs": y, "gradients": gradients}


@both_sizes
@pytest.mark.parametrize("sequence", [False, True])
def test_a_tensor_parallel_mlp_equals_the_plain_one(world_size: int, sequence: bool) -> None:
    names = ("x", "up", "down", "gain")
    plain = {name: value.requires_grad_() for name, value in zip(names, plain_mlp(world_size), strict=True)}
    out = ((plain["x"] * plain["gain"]) @ plain["up"]).tanh() @ plain["down"]
    (out * plain["gain"]).pow(2).sum().backward()
    expected = {"outputs": out, "gradients": {name: value.grad for name, value in plain.items()}}
    results = testing.run(world_size, chain, sequence)
    testing.assert_parity(expected, results, axes={"tp": world_size}, rtol=1e-12)


def odd_inputs() -> None:
    axis = core.Mesh(tp=2).tp
    # a gradient without memory of its own (expanded), as sum() produces it
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    core.identity_fwd_all_reduce_bwd(x, axis).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0, dtype=torch.float64))  # type: ignore[arg-type]
    # an input that is not contiguous, a gradient that is not
    y = torch.arange(12.0).view(3, 4).t().requires_grad_()
    out = core.all_gather_fwd_reduce_scatter_bwd(y, axis, dim=1)
    assert torch.equal(out, torch.cat([y, y], 1))
    out.t().pow(2).sum().backward()
    assert torch.equal(y.grad, 4 * y)  # type: ignore[arg-type]
    # an input without a gradient
    assert not core.all_reduce_fwd_identity_bwd(torch.ones(2), axis).requires_grad
    z = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"sizes \[3, 2\] must divide 4 among 2 ranks \(tp\)"):
        core.split_fwd_all_gather_bwd(z, axis, sizes=[3, 2])
    with pytest.raises(ValueError, match=r"sizes \[2, 1, 1\] must divide 4 among 2 ranks"):
        core.reduce_scatter_fwd_all_gather_bwd(z, axis, sizes=[2, 1, 1])


def test_odd_inputs() -> None:
    testing.run(2, odd_inputs)


def lockstep_gradcheck() -> bool:
    """All ranks move the same element at the same time, which is right for this pair alone: it treats ranks alike."""
    axis = core.Mesh(tp=dist.get_world_size()).tp
    x = random((3, 2), 1).requires_grad_()
    return torch.autograd.gradcheck(lambda x: core.all_reduce_fwd_all_reduce_bwd(x.sin(), axis), (x,))


@both_sizes
def test_gradcheck_over_ranks(world_size: int) -> None:
    assert all(testing.run(world_size, lockstep_gradcheck))


@pytest.mark.parametrize("pair", [*(case.pair for case in CASES.values()), core.all_to_all_fwd_all_to_all_bwd])
def test_gradcheck_on_one_rank(pair: Pair) -> None:
    axis = core.Mesh().tp
    x = random((3, 2), 1).requires_grad_()
    assert torch.equal(pair(x, axis), x)
    assert torch.autograd.gradcheck(lambda x: pair(x, axis).sin(), (x,))
    assert torch.autograd.gradgradcheck(lambda x: pair(x, axis).sin(), (x,))
