"""torch's private names that this package needs, in one place; a test fails when torch changes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def current_backward() -> int:
    """Number of the backward pass running in this thread (a nested one under reentrant checkpointing), or -1."""
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called when the running backward pass has computed all its gradients."""
    Variable._execution_engine.queue_callback(callback)
