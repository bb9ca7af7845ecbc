"""What all ranks hold whole beside the buckets, equal on all: frozen parameters of stages 0 to 2, and buffers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from nanopar_core import Axis, broadcast


def copy_from_first(tensor: Tensor, axes: Iterable[Axis], *, label: str) -> None:
    """Overwrite a tensor, contiguous or not, with that of the first rank of all ``axes``; called on all their ranks."""
    whole = tensor.contiguous()
    for axis in axes:
        broadcast(whole, axis, label=label)
    if whole is not tensor:
        tensor.copy_(whole)
