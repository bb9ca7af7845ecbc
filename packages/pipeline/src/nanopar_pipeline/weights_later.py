"""Backward in two parts: linear layers give the gradient of their input now, and that of their weight later.

    with later.recording(stage, micro-batch):          forward: every F.linear with a trained weight is ours
        y = module(x)
    torch.autograd.backward(...)                       I: dx = dy W, and (x, dy) are put aside
    later.run(stage, micro-batch)                      W: dW = dy^T x, handed to autograd at the leaf, so that hooks run

("Zero Bubble Pipeline Parallelism", Qi et al., arXiv 2401.10241, section 2.) Everything else, biases and norms too, has
its gradients in I: the parts are what they are for the layers that cost most. Under autocast nothing is put aside, and
there are no second derivatives of such a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nanopar_pipeline.torch_private import will_accumulate

Key = tuple[int, int]


class WeightsLater:
    """What is put aside, by stage and micro-batch."""

    def __init__(self) -> None:
        self._aside: dict[Key, list[tuple[Tensor, Tensor, Tensor]]] = {}

    @contextmanager
    def recording(self, stage: int, microbatch: int) -> Iterator[None]:
        """Linear layers that run forward (or are recomputed) here put their products aside in backward."""
        with _Linears(self._aside.setdefault((stage, microbatch), [])):
            yield

    def run(self, stage: int, microbatch: int) -> None:
        """Compute and accumulate the gradients of the weights."""
        gradients: dict[Tensor, Tensor] = {}
        aside = self._aside.pop((stage, microbatch), [])
        with torch.no_grad():
            while aside:
                weight, x, grad = aside.pop()
                rows, of_rows = x.flatten(0, -2), grad.flatten(0, -2)
                if weight in gradients:
                    gradients[weight].addmm_(of_rows.T, rows)
                else:
                    gradients[weight] = of_rows.T @ rows
        if gradients:
            torch.autograd.backward(list(gradients), list(gradients.values()))

    def forget(self) -> None:
        """After an exception."""
        self._aside.clear()


class _Linears(TorchFunctionMode):
    """Takes the place of ``F.linear`` for trained weights."""

    def __init__(self, aside: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self._aside = aside

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As torch calls it for every function."""
        if func is torch.autograd.backward or func is Tensor.backward:
            # Recomputation within, as of a reentrant checkpoint, must see our linear layers as forward did.
            with self:
                return _backward_by_edges(*args, **(kwargs or {}))
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            if weight.is_leaf and weight.requires_grad and x.dim() > 1 and not torch.is_autocast_enabled(x.device.type):
                # The weight goes in as no tensor: autograd would run its hooks in I, with no gradient.
                anchor = torch.empty(0, device=x.device, requires_grad=True)
                return _Linear.apply(anchor, x, weight.detach(), bias, (weight,), self._aside)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _backward_by_edges(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **renamed: Any,
) -> None:
    """``torch.autograd.backward``, told by edges: with tensors it would call the mode again."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = renamed.get("gradient", grad_tensors)
    grads = [given] if given is None or isinstance(given, Tensor) else list(given)
    grads += [None] * (len(roots) - len(grads))
    wanted = [inputs] if isinstance(inputs, Tensor) else inputs
    leaves = None if wanted is None else [get_gradient_edge(leaf) for leaf in wanted]
    torch.autograd.backward(
        [get_gradient_edge(root) for root in roots],
        [torch.ones_like(root) if grad is None else grad for root, grad in zip(roots, grads, strict=True)],
        retain_graph=retain_graph,
        create_graph=create_graph,
        inputs=leaves,
    )


def _arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: A002
    return input, weight, bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, leaf: tuple[Tensor], aside: list[Any]
    ) -> Tensor:
        """``F.linear``."""
        ctx.save_for_backward(x, weight)
        ctx.anchor, ctx.leaf, ctx.aside = anchor, leaf, aside
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """dx and db; the weight's later."""
        x, weight = ctx.saved_tensors
        if will_accumulate(ctx.anchor):
            ctx.aside.append((ctx.leaf[0], x, grad))
        of_x = grad @ weight if ctx.needs_input_grad[1] else None
        return None, of_x, None, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None, None, None
