"""What expert parallelism sends: calls and bytes, by the closed form for the routing that there was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.expert.test_parity import build, loss_of, recompute, tokens
from torch import Tensor

import nanopar_core as core
import nanopar_expert as expert
from nanopar_core.testing import run

FLOAT64 = 8


def cost(name: str, size: int, chunks: int = 1, how: str = "", dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Calls, bytes, and the (token, expert) pairs that leave this rank and come to it."""
    mesh, model = core.Mesh(dp=size, ep=size), build(name).to(dtype)
    chosen: list[Tensor] = []
    for router in expert.routers_of(model).values():
        router.register_forward_hook(lambda _m, _x, output: chosen.append(output[2].detach()))
    experts = next(p.shape[0] for n, p in model.named_parameters() if n.endswith("down_proj"))
    expert.parallelize(model, None, mesh.ep, chunks=chunks)
    if how == "recompute":
        recompute(model, core.keep_communicated)
    ids = tokens(0)[mesh.dp.rank :: size]
    with core.ledger() as book:
        loss_of(model, ids).backward()
    layers = len(expert.dispatchers_of(model))
    ranks = [indices // (experts // size) for indices in chosen[:layers]]
    going = torch.stack([torch.bincount(one.flatten(), minlength=size) for one in ranks])
    coming = core.all_to_all(going.T.contiguous(), mesh.ep, send_sizes=[1] * size, receive_sizes=[1] * size).T
    counts = [r.bytes for r in book.records if r.label.endswith("counts")]
    others = torch.arange(size) != mesh.dp.rank
    return {
        "counts": (len(counts), sum(counts)),
        "rows": [r.bytes for r in book.records if r.op == "all_to_all" and not r.label.endswith("counts")],
        "other": [r.op for r in book.records if r.op != "all_to_all"],
        "going": going[:, others].sum(1).tolist(),
        "coming": coming[:, others].sum(1).tolist(),
        "experts": experts,
        "layers": layers,
    }


@pytest.mark.parametrize(("name", "size", "width"), [("phi-moe", 2, 128), ("own", 4, 9)])
def test_four_all_to_alls_of_tokens_a_layer(name: str, size: int, width: int) -> None:
    if name == "phi-moe":
        pytest.importorskip("nanopar_models")
    for found in run(size, cost, name, size):
        layers, experts = found["layers"], found["experts"]
        assert found["counts"] == (layers, layers * FLOAT64 * experts * (size - 1) // size)
        assert found["other"] == []
        # forward: rows with their weights, then outputs back; backward, last layer first: gradients of these
        forward, backward = [], []
        for going, coming in zip(found["going"], found["coming"], strict=True):
            forward += [going * (width + 1) * FLOAT64, coming * width * FLOAT64]
            backward = [going * width * FLOAT64, coming * (width + 1) * FLOAT64, *backward]
        assert found["rows"] == forward + backward


def test_weights_in_fp32_beside_tokens_in_bf16_take_two_columns() -> None:
    sent = run(2, packed_rows)
    for found in sent:
        assert found == {"columns": 6, "weights": True, "bytes": True}


def packed_rows() -> dict[str, Any]:
    mesh = core.Mesh(dp=2, ep=2)
    model = torch.nn.ModuleDict({"experts": Recorder()})
    expert.parallelize(model, {"experts.scale": "grouped_gemm", "experts": "ep_dispatch_experts"}, mesh.ep)
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    weights = torch.tensor([[1 / 3], [1e-30], [1 + 2**-20]])  # none of which bf16 can hold
    with core.ledger() as book:
        model["experts"](x, torch.tensor([[0], [1], [0]]), weights)
    rows = [record for record in book.records if not record.label.endswith("counts")]
    recorder: Any = model["experts"]
    expected = weights[[0, 2, 0, 2]] if mesh.dp.rank == 0 else weights[[1, 1]]
    return {
        "columns": rows[0].shape[1],
        "weights": torch.equal(recorder.weights, expected),
        "bytes": rows[0].bytes == 6 * 2 * (1 if mesh.dp.rank == 0 else 2),
    }


class Recorder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2, 1))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        self.weights = weights
        return x * weights.to(x.dtype) * (1 + 0 * indices)


@pytest.mark.parametrize("chunks", [1, 3])
def test_recomputation_neither_routes_nor_sends_again(chunks: int) -> None:
    plain = run(2, cost, "own", 2, chunks)
    again = run(2, cost, "own", 2, chunks, "recompute")
    for one, two in zip(plain, again, strict=True):
        assert len(one["rows"]) == 4 * chunks * one["layers"]
        assert one == two
