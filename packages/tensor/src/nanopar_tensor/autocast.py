"""What autocast asks of autograd functions: they have to cast their inputs themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """That of products on ``x``'s device; None without autocast."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def cast_for_autocast(x: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that casts as torch does for its products on ``x``'s device: float64 stays."""
    dtype = autocast_dtype(x)
    return lambda tensor: tensor if dtype is None or tensor.dtype is torch.float64 else tensor.to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products have the dtype of their inputs."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)
