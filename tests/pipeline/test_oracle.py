"""torch.distributed.pipelining as an oracle: its schedules give the same loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanopar_core as core
import nanopar_pipeline as pipeline
from nanopar_core.testing import assert_parity, run
from nanopar_pipeline import schedules

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

ROWS, WIDTH, MICROBATCHES = 8, 6, 4
THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


class Part(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH).double(), nn.LayerNorm(WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x)).tanh()  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=random) for _ in range(2))
    return x, y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def result(schedule: pipeline.Schedule, parts: list[Part], losses: Tensor | float) -> dict[str, Any]:
    numbers = schedule.stages_of(torch.distributed.get_rank())
    gradients = {
        f"{n}.{name}": p.grad for n, part in zip(numbers, parts, strict=True) for name, p in part.named_parameters()
    }
    lists: list[Any] = [None] * schedule.ranks
    torch.distributed.all_gather_object(lists, gradients)
    return {"loss": [float(losses)], "gradients": {name: g for one in lists for name, g in one.items()}}


def ours(name: str, ranks: int, chunks: int) -> dict[str, Any]:
    axis = core.Mesh(pp=ranks).pp
    schedule = schedules.NAMED[name](ranks, chunks, MICROBATCHES)
    parts = [Part(number) for number in schedule.stages_of(axis.rank)]
    loss = pipeline.Runner(parts, schedule, axis, loss_fn).step(*batch())
    return result(schedule, parts, loss)


def theirs(name: str, ranks: int, chunks: int) -> dict[str, Any]:
    from torch.distributed import pipelining

    schedule = schedules.NAMED[name](ranks, chunks, MICROBATCHES)
    numbers = schedule.stages_of(torch.distributed.get_rank())
    parts = [Part(number) for number in numbers]
    stages = [
        pipelining.PipelineStage(part, number, schedule.stages, torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    kind = getattr(pipelining, THEIRS[name], None) or getattr(pipelining.schedules, THEIRS[name])
    single = THEIRS[name] in ("ScheduleGPipe", "Schedule1F1B")
    options = {"n_microbatches": MICROBATCHES, "loss_fn": loss_fn, "scale_grads": False}
    run_of_theirs = kind(stages[0] if single else stages, **options)
    x, y = batch()
    losses: list[Tensor] = []
    given = [x] if 0 in numbers else []
    last = {"target": y, "losses": losses} if schedule.stages - 1 in numbers else {}
    run_of_theirs.step(*given, **last)
    total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return result(schedule, parts, total)


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipe_v", 2)]
)
def test_torchs_schedules_give_the_same(name: str, chunks: int) -> None:
    reference = run(2, theirs, name, 2, chunks)[0]
    assert_parity(reference, run(2, ours, name, 2, chunks), axes={"pp": 2})
