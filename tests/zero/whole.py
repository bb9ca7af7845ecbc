"""What lies in parts on the ranks, put together: the masters, and the reduced gradients in full precision."""

from __future__ import annotations

from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_zero.buckets import Bucket


def masters_of(model: nn.Module, optimizer: zero.ZeroOptimizer) -> dict[str, Tensor]:
    """What the optimizer updates, by trained parameter, in model order."""
    return _in_model_order(model, [(bucket, bucket.masters) for bucket in optimizer.reducer.buckets])


def reduced_of(model: nn.Module, optimizer: zero.ZeroOptimizer) -> dict[str, Tensor]:
    """The gradients after backward, by trained parameter, in model order."""
    pairs = [(bucket, bucket.reduced) for bucket in optimizer.reducer.buckets]
    return _in_model_order(model, [(bucket, reduced) for bucket, reduced in pairs if reduced is not None])


def _in_model_order(model: nn.Module, parts: list[tuple[Bucket, Tensor]]) -> dict[str, Tensor]:
    found: dict[int, Tensor] = {}
    for bucket, part in parts:
        whole = core.all_gather(part, bucket.reduction.data_axis) if bucket.reduction.divided else part
        for slot, member in zip(bucket.layout.slots, bucket.members, strict=True):
            found[id(member)] = whole[slot.start : slot.start + slot.numel].view(slot.item.shape).clone()
    return {name: found[id(p)] for name, p in model.named_parameters() if id(p) in found}
