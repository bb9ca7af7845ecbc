"""torch's private names that this package needs, in one place; a test fails when torch changes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def will_accumulate(leaf: Tensor) -> bool:
    """Whether the running backward pass reaches ``leaf``: not so in ``torch.autograd.grad`` of something else."""
    return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
