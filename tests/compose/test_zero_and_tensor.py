"""Data, tensor, sequence and context parallelism together train Phi-MoE as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanopar_core as core
import nanopar_models as models
import nanopar_tensor as tensor
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run, train_plainly
from nanopar_models.loss import next_token_labels

STEPS, ROWS, LENGTH, VOCABULARY = 4, 4, 11, 61


def build() -> models.PhiMoE:
    shape = models.PhiMoEConfig.preset("nano", vocab_size=VOCABULARY, num_hidden_layers=2)
    return models.PhiMoE(shape, seed=3).double().train()


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and their mask; the rows have different lengths, so the ranks count different numbers of tokens."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([LENGTH, 4, 9, 7])
    return ids, (torch.arange(LENGTH) < lengths[:, None]).long()


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def plain_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels=ids, attention_mask=mask).loss
    return loss


def reference() -> dict[str, Any]:
    result = train_plainly(build(), [[rows(step)] for step in range(STEPS)], plain_loss, adamw, max_norm=0.5)
    return {name: result[name] for name in ("loss", "norm", "weights")}


def on_this_rank(sizes: dict[str, int], stage: int, sequence: bool, method: str, micro_batches: int) -> dict[str, Any]:
    mesh = core.Mesh(**sizes)
    model = build()
    specs = tensor.parallelize(model, None, mesh.tp, sequence=sequence, context_axis=mesh.cp, context_method=method)
    data = mesh.flatten("dp", "cp")
    optimizer = zero.shard(model, adamw, axis=data, stage=stage, specs=specs, reduce="sum", bucket_bytes=20_000)
    losses, norms = [], []
    for step in range(STEPS):
        ids, mask = rows(step)
        labels = next_token_labels(ids, mask)
        counted = (labels != -100).sum()
        mine = [x.chunk(mesh.dp.size)[mesh.dp.rank] for x in (ids, mask, labels)]
        mine = [tensor.split_sequence(x, mesh.cp, padding=fill) for x, fill in zip(mine, (0, 0, -100), strict=True)]
        total = torch.zeros((), dtype=torch.float64)
        for part in zip(*(x.chunk(micro_batches) for x in mine), strict=True):
            logits = model(part[0], attention_mask=part[1]).logits
            loss = model.loss(logits, part[2], counted)
            loss.backward()
            total += loss.detach()
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(core.all_reduce(total, data).item())
    optimizer.wait()
    with zero.gathered(model):
        parts = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"loss": losses, "norm": norms, "weights": tensor.merge_state_dict(parts, specs)}


LAYOUTS: list[tuple[dict[str, int], int, bool, str, int]] = [
    *[({"dp": 2, "tp": 2}, stage, True, "all_gather", 1) for stage in range(4)],
    ({"dp": 2, "tp": 2}, 2, False, "all_gather", 2),
    ({"cp": 2, "tp": 2}, 3, True, "ring", 1),
    ({"dp": 2, "cp": 2}, 1, False, "ulysses", 2),
    ({"tp": 4}, 0, True, "all_gather", 1),
]


@pytest.mark.parametrize(("sizes", "stage", "sequence", "method", "micro_batches"), LAYOUTS)
def test_layouts_train_as_one_process(
    sizes: dict[str, int], stage: int, sequence: bool, method: str, micro_batches: int
) -> None:
    assert_parity(reference(), run(4, on_this_rank, sizes, stage, sequence, method, micro_batches), axes=sizes)
