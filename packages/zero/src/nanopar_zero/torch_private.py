"""torch's private names that this package needs, in one place; a test fails when torch changes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

COMPILED = "_orig_mod."  # what torch.compile puts before the names of a module's parameters


def current_backward() -> int:
    """Number of the backward pass running in this thread (a nested one under reentrant checkpointing), or -1."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return current_backward() != -1


def will_accumulate(parameter: nn.Parameter) -> bool:
    """Whether the running pass writes ``parameter.grad`` if it reaches it: not so in ``torch.autograd.grad``."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # autograd.grad with respect to this very parameter
        return False


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called when the running backward pass has computed all its gradients."""
    Variable._execution_engine.queue_callback(callback)


# Decorator of what torch.compile must leave alone; torch.compiler.disable would import the compiler at once.
not_compiled = _disable_dynamo


def divide_each(places: list[Tensor], tensors: list[Tensor], divisor: int) -> None:
    """Write many tensors, divided, into their places, each of its own dtype.

    On a CPU in one pass over memory, where copying and then dividing takes two; elsewhere with few kernels for all.
    """
    if divisor == 1:
        torch._foreach_copy_(places, tensors)
    elif places[0].device.type == "cpu" and places[0].dtype == tensors[0].dtype:
        for place, tensor in zip(places, tensors, strict=True):
            torch.div(tensor, divisor, out=place)
    else:
        torch._foreach_copy_(places, tensors)
        torch._foreach_div_(places, divisor)
