"""torch's private names that this package needs, in one place; a test fails when torch changes them."""

from __future__ import annotations

import torch
from torch import nn


def in_backward() -> bool:
    """Whether a backward pass is running in this thread: a forward that runs now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def hooks_on(module: nn.Module) -> bool:
    """Whether someone watches the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
