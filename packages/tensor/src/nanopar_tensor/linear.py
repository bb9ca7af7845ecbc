"""Column- and row-parallel linear layers: one collective per block and direction ("Megatron-LM", Shoeybi 2019, sec. 3).

    x [.., D], the same on all ranks
     |
     +- q_proj --.   y = x W^T + b, W: this rank's rows           forward: nothing is sent
     +- k_proj --+-> [.., H/N] each                               backward: dx = dq Wq + dk Wk + dv Wv is this rank's
     +- v_proj --'                                                share, summed by ONE all_reduce, meanwhile dW = dy^T x
     |
    attention over this rank's heads
     |
     '- o_proj ----> y = sum over ranks of z W^T, then + b        forward: one all_reduce
                     W: this rank's columns                       backward: nothing is sent

Layers that read one input belong to one ``ColumnGroup``. The first that is called computes the outputs of all, in one
autograd node, and the others hand theirs out when they are called with the same tensor.

Shapes: D input features, H output features, N ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nanopar_core import Axis, all_reduce
from nanopar_core.autograd import all_gather_fwd_split_bwd
from nanopar_core.grid import split_sizes


class ColumnGroup:
    """Column-parallel layers of one block that read the same input."""

    def __init__(self, axis: Axis, label: str) -> None:
        self.axis, self.label = axis, label
        self.members: list[ColumnLinear] = []
        self._input: Tensor | None = None
        self._version = -1
        self._outputs: dict[int, Tensor] = {}

    def output_of(self, member: ColumnLinear, x: Tensor) -> Tensor:
        """The member's output for ``x``; computes those of all members where it is not there yet."""
        number = self.members.index(member)
        if self._input is not x or self._version != x._version or number not in self._outputs:
            weights = [one.weight for one in self.members]
            biases = [one.bias for one in self.members]
            outputs = _ColumnLinears.apply(x, self.axis, self.label, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
            self._input, self._version, self._outputs = x, x._version, dict(enumerate(outputs))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._input = None
        return output


class ColumnLinear(nn.Module):
    """A linear layer of which each rank has some output features.

    Args:
        weight: this rank's rows ``[H/N, D]``.
        bias: this rank's ``[H/N]``, or None.
        group: those that read the same input.
        gathers: give out all features, ``[.., H]``, of which all ranks make the same use.
        features: H, whole.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: ColumnGroup,
        *,
        features: int,
        gathers: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.gathers = group, gathers
        self.in_features, self.out_features, self.all_features = weight.shape[1], weight.shape[0], features
        group.members.append(self)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., D] -> [.., H/N]``, or ``[.., H]``."""
        y = self.group.output_of(self, x)
        if not self.gathers:
            return y
        sizes = split_sizes(self.all_features, self.group.axis.size)
        return all_gather_fwd_split_bwd(y, self.group.axis, -1, sizes=sizes, label=self.group.label)

    def extra_repr(self) -> str:
        """As torch's own Linear shows itself."""
        return f"in_features={self.in_features}, out_features={self.out_features} of {self.all_features}"


class RowLinear(nn.Module):
    """A linear layer of which each rank has some input features.

    Args:
        weight: this rank's columns ``[H, D/N]``.
        bias: whole ``[H]``, or None; added once, to the sum.
        axis: over which outputs are summed.
        label: of the collective.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: Axis, label: str) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.axis, self.label = axis, label
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """``[.., D/N] -> [.., H]``, the same on all ranks."""
        return _RowLinear.apply(x, self.weight, self.bias, self.axis, self.label)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        """As torch's own Linear shows itself."""
        return (
            f"in_features={self.in_features} of {self.in_features * self.axis.size}, out_features={self.out_features}"
        )


class _ColumnLinears(torch.autograd.Function):
    """Several ``F.linear`` of one input; its gradient is summed over ranks while those of the weights are computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str, count: int, *weights_and_biases: Tensor | None) -> Any:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.axis, ctx.label, ctx.count = axis, label, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.flatten(0, -2)
        flat = [None if grad is None else grad.flatten(0, -2) for grad in grads]
        pending = None
        if ctx.needs_input_grad[0]:
            share = torch.zeros_like(rows) if all(grad is None for grad in flat) else None
            for grad, weight in zip(flat, weights, strict=True):
                if grad is not None:
                    share = grad @ weight if share is None else share.addmm_(grad, weight)
            assert share is not None
            pending = all_reduce(share, ctx.axis, out=share, label=ctx.label, async_op=True)
        needs_w, needs_b = ctx.needs_input_grad[4 : 4 + ctx.count], ctx.needs_input_grad[4 + ctx.count :]
        of_weights = [g.T @ rows if g is not None and need else None for g, need in zip(flat, needs_w, strict=True)]
        of_biases = [g.sum(0) if g is not None and need else None for g, need in zip(flat, needs_b, strict=True)]
        of_x = None if pending is None else pending.wait().view_as(x)
        return of_x, None, None, None, *of_weights, *of_biases


class _RowLinear(torch.autograd.Function):
    """``F.linear`` on this rank's features, summed over ranks; the bias is added to the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, label: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        y = all_reduce(y, axis, out=y, label=label)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            grad @ weight if needs_x else None,
            rows.T @ x.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
            None,
        )
