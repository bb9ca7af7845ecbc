"""Data and expert parallelism, in all stages of zero, train Phi-MoE as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compose.test_zero_and_tensor import STEPS, adamw, build, reference, rows

import nanopar_core as core
import nanopar_expert as expert
import nanopar_tensor as tensor
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run
from nanopar_models.loss import next_token_labels


def on_this_rank(sizes: dict[str, int], stage: int, micro_batches: int, how: str) -> dict[str, Any]:
    mesh = core.Mesh(**sizes)
    model = build()
    plan = {name: style for name, style in model.tp_plan.items() if ".experts" not in name}
    specs = tensor.parallelize(model, plan, mesh.tp)
    specs |= expert.parallelize(
        model,
        None,
        mesh.ep,
        data_axis=mesh.edp,
        tensor_axis=mesh.etp,
        token_axis=mesh.tp if mesh.etp.size == 1 else None,
        chunks=2 if "chunks" in how else 1,
    )
    if "recompute" in how:
        model.set_recompute(True, core.keep_communicated)
    optimizer = zero.shard(
        model,
        adamw,
        axis=mesh.dp,
        replicate=mesh.dp_replicate if mesh.dp_replicate.size > 1 else None,
        stage=stage,
        specs=specs,
        reduce="sum",
        bucket_bytes=20_000,
    )
    everyone = mesh.flatten("dp_replicate", "dp")
    losses, norms = [], []
    for step in range(STEPS):
        ids, mask = rows(step)
        labels = next_token_labels(ids, mask)
        counted = (labels != -100).sum()
        mine = [x.chunk(everyone.size)[everyone.rank] for x in (ids, mask, labels)]
        total = torch.zeros((), dtype=torch.float64)
        for part in zip(*(x.chunk(micro_batches) for x in mine), strict=True):
            logits = model(part[0], attention_mask=part[1]).logits
            loss = model.loss(logits, part[2], counted)
            loss.backward()
            total += loss.detach()
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(core.all_reduce(total, everyone).item())
    optimizer.wait()
    with zero.gathered(model):
        parts = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"loss": losses, "norm": norms, "weights": tensor.merge_state_dict(parts, specs)}


LAYOUTS: list[tuple[dict[str, int], int, int, str]] = [
    *[({"dp": 2, "ep": 2}, stage, 1, "") for stage in range(4)],
    *[({"dp": 4, "ep": 2}, stage, 1, "recompute") for stage in (1, 3)],
    ({"dp": 2, "ep": 2}, 2, 2, "recompute chunks"),
    ({"dp_replicate": 2, "dp": 2, "ep": 2}, 1, 1, ""),
    ({"dp": 2, "tp": 2, "ep": 2}, 3, 1, ""),
    ({"dp": 2, "tp": 2, "ep": 4, "etp": 1}, 2, 1, "recompute"),
]


@pytest.mark.parametrize(("sizes", "stage", "micro_batches", "how"), LAYOUTS)
def test_layouts_train_as_one_process(sizes: dict[str, int], stage: int, micro_batches: int, how: str) -> None:
    ranks = sizes["dp"] * sizes.get("tp", 1) * sizes.get("dp_replicate", 1)
    axes = {name: size for name, size in sizes.items() if name not in ("ep", "etp")}
    assert_parity(reference(), run(ranks, on_this_rank, sizes, stage, micro_batches, how), axes=axes)
