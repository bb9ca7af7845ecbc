"""What every candidate of ``compare`` is built from, and the inner loop that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanopar_core import Axis
from nanopar_sft import workload

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Setup:
    """The same on every rank but for the axis' rank.

    Attributes:
        model: as ``workload.build_model`` understands it.
        axis: all ranks.
        device: this rank's.
        microbatches: parts of each rank's batch.
        fused: whether AdamW is.
    """

    model: str
    axis: Axis
    device: torch.device
    microbatches: int
    fused: bool

    def make_model(self) -> nn.Module:
        """A model with its initial weights, on the device, in training mode."""
        return workload.build_model(self.model).to(self.device)

    def parts(self, batch_BS: Tensor) -> tuple[Tensor, ...]:
        """This rank's micro-batches ``[B / ranks / microbatches, S]`` of the batch of all ranks."""
        return self.whole_parts(batch_BS.chunk(self.axis.size)[self.axis.rank])

    def whole_parts(self, batch_BS: Tensor) -> tuple[Tensor, ...]:
        """Micro-batches ``[B / microbatches, S]``, the same on all ranks."""
        parts: tuple[Tensor, ...] = batch_BS.to(self.device).chunk(self.microbatches)
        return parts


def train_on_parts(
    model: nn.Module,
    parts: tuple[Tensor, ...],
    hold_back: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = workload.loss_of,
) -> Tensor:
    """Forward and backward of the micro-batches; returns their mean loss.

    ``hold_back()`` encloses all but the last, for libraries that then need not communicate.
    """
    total = torch.zeros((), device=parts[0].device)
    for number, ids in enumerate(parts, start=1):
        with hold_back() if number < len(parts) else nullcontext():
            loss = loss_of(model, ids) / len(parts)
            loss.backward()
        total += loss.detach()
    return total
