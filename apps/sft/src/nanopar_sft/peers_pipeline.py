"""The pipeline-parallel peers of ``compare``: torch.distributed.pipelining's runtime and schedules.

    torch-pp-gpipe, torch-pp-1f1b, torch-pp-interleaved, torch-pp-zb    on the very stages that nanopar-pipeline runs

The one file of the product that touches it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import nanopar_core as core
import nanopar_pipeline as pipeline
from nanopar_models.loss import next_token_labels
from nanopar_sft import workload
from nanopar_sft.setup import Setup, Step

KINDS = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zb": ("ScheduleInterleavedZeroBubble", 2),
}


class _Positional(nn.Module):
    """A stage as torch calls it: one tensor in, one out."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        output = self.stage([x], {}) if self.stage.number else self.stage([], {"input_ids": x})
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


def torch_pipeline(setup: Setup, *, name: str) -> Step:
    """One of its schedules, every sequence a micro-batch."""
    from torch.distributed import pipelining

    kind, chunks = KINDS[name]
    axis = core.Mesh(pp=setup.axis.size).pp
    modules, _ = pipeline.split(setup.make_model(), None, axis, chunks=chunks)
    count = axis.size * chunks
    stages = [
        pipelining.PipelineStage(_Positional(module), axis.rank + number * axis.size, count, setup.device)
        for number, module in enumerate(modules)
    ]
    optimizer = workload.adamw([p for module in modules for p in module.parameters()], setup.fused)
    runs: dict[int, Any] = {}

    def step(batch: Tensor) -> Tensor:
        ids = batch.to(setup.device)
        rows = ids.shape[0]
        if rows not in runs:
            options = {"n_microbatches": rows, "loss_fn": workload.share_of_loss(rows), "scale_grads": False}
            runs[rows] = getattr(pipelining, kind)(stages if chunks > 1 else stages[0], **options)
        losses: list[Tensor] = []
        inputs = [ids] if axis.rank == 0 else []
        last = {"target": next_token_labels(ids), "losses": losses} if axis.rank == axis.size - 1 else {}
        runs[rows].step(*inputs, **last)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=setup.device)
        return core.all_reduce(loss, axis)

    return step
