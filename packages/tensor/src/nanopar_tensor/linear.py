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

Layers beside each other with inputs of one width belong to one ``ColumnGroup``. The first that is called computes the
outputs of all, in one autograd node, and the others hand theirs out when they are called with the same tensor.

Under sequence parallelism (``sequence.py``) x and y are this rank's positions: x is gathered before the products, dx
reduce-scattered, y reduce-scattered, dy gathered. The code is the same: a ``Boundary`` says which.

Shapes: D input features, H output features, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nanopar_core import Pending
from nanopar_core.autograd import all_gather_fwd_split_bwd
from nanopar_core.grid import split_sizes
from nanopar_core.recompute import is_recomputed, once
from nanopar_tensor.autocast import autocast_dtype, cast_for_autocast
from nanopar_tensor.sequence import Boundary, DividedSequence, WholeSequence

R = TypeVar("R")


class ColumnGroup:
    """Column-parallel layers of one block that read the same input.

    A layer that reads another input than the one before it is right too, but the products of the others are then done
    in vain; what nobody asked for is forgotten when the block returns.

    Args:
        boundary: what happens to the input, and to its gradient.
        label: of the collectives.
        keeps_whole: keep the gathered input for backward instead of gathering it again.
        enters: the block's entry gathers its input already, and remembers of what.
    """

    def __init__(
        self, boundary: Boundary, label: str, *, keeps_whole: bool, enters: DividedSequence | None = None
    ) -> None:
        self.boundary, self.label = boundary, label
        self.keeps_whole, self.enters = keeps_whole, enters
        self.members: list[ColumnLinear] = []
        self._made: _Made | None = None
        self._outputs: dict[int, Tensor] = {}

    def output_of(self, member: ColumnLinear, x: Tensor) -> Tensor:
        """The member's output for ``x``; computes those of all members where it is not there yet."""
        read = [x, *(p for one in self.members for p in (one.weight, one.bias) if p is not None)]
        if any(tensor.is_inference() for tensor in read):  # without versions: nobody would see that it was changed
            return self._outputs_of([member], x)[0]
        now, number = _Made.now(read), self.members.index(member)
        if number not in self._outputs or self._made is None or not self._made.equals(now):
            self._made, self._outputs = now, dict(enumerate(self._outputs_of(self.members, x)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self.forget()
        return output

    def forget(self) -> None:
        """Let go of outputs that no member asked for."""
        self._made, self._outputs = None, {}

    def _outputs_of(self, members: list[ColumnLinear], x: Tensor) -> tuple[Tensor, ...]:
        boundary, part, whole = self.boundary, x, None
        if self.enters is not None:
            gathered_from = self.enters.part_of(x)
            if gathered_from is None:  # the block made something of its input first
                boundary = WholeSequence(boundary.axis)
            else:
                part, whole = gathered_from, x.detach()
        cast = cast_for_autocast(x)
        weights = [cast(one.weight) for one in members]
        biases = [None if one.bias is None else cast(one.bias) for one in members]
        return _ColumnLinears.apply(  # type: ignore[no-any-return, no-untyped-call]
            cast(part), None if whole is None else cast(whole), boundary, self, *weights, *biases
        )


class _Made(NamedTuple):
    """All that outputs depend on, at one moment."""

    tensors: list[Tensor]
    states: list[tuple[int, bool]]  # version, requires_grad
    mode: tuple[bool, torch.dtype | None]  # of gradients and of autocast

    @classmethod
    def now(cls, tensors: list[Tensor]) -> _Made:
        states = [(tensor._version, tensor.requires_grad) for tensor in tensors]
        return cls(tensors, states, (torch.is_grad_enabled(), autocast_dtype(tensors[0])))

    def equals(self, other: _Made) -> bool:
        same = len(self.tensors) == len(other.tensors) and self.states == other.states and self.mode == other.mode
        return same and all(one is two for one, two in zip(self.tensors, other.tensors, strict=True))


def forget_outputs(block: nn.Module, *_call: object) -> None:
    """A forward hook of the module around column layers."""
    for child in block.children():
        if isinstance(child, ColumnLinear):
            child.group.forget()


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
        if x.dim() == 1:
            return self.forward(x[None])[0]
        y = self.group.output_of(self, x)
        if not self.gathers:
            return y
        axis = self.group.boundary.axis
        sizes = split_sizes(self.all_features, axis.size)
        return all_gather_fwd_split_bwd(y, axis, -1, sizes=sizes, label=self.group.label)

    def extra_repr(self) -> str:
        """As torch's own Linear shows itself."""
        return f"in_features={self.in_features}, out_features={self.out_features} of {self.all_features}"


class RowLinear(nn.Module):
    """A linear layer of which each rank has some input features.

    Args:
        weight: this rank's columns ``[H, D/N]``.
        bias: whole ``[H]``, or None; added once, to the sum.
        boundary: what each rank gets of the sum of the outputs.
        label: of the collectives.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, boundary: Boundary, label: str) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.boundary, self.label = boundary, label
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """``[.., D/N] -> [.., H]``: the same on all ranks, or this rank's positions."""
        if x.dim() == 1:
            return self.forward(x[None])[0]
        cast = cast_for_autocast(x)
        bias = None if self.bias is None else cast(self.bias)
        return _RowLinear.apply(cast(x), cast(self.weight), bias, self.boundary, self.label)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        """As torch's own Linear shows itself."""
        every = self.in_features * self.boundary.axis.size
        return f"in_features={self.in_features} of {every}, out_features={self.out_features}"


class _ColumnLinears(torch.autograd.Function):
    """Several ``F.linear`` of one input; its gradient is summed over ranks while those of the weights are computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor | None, boundary: Boundary, group: ColumnGroup, *parameters: Tensor | None
    ) -> Any:
        ctx.count = count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.boundary, ctx.label = boundary, group.label
        ctx.sizes = boundary.sizes_of_part(x) if whole is None else boundary.sizes_of_whole(whole)
        gathered = Pending([whole]) if whole is not None else boundary.gather(x, ctx.sizes, group.label)

        def outputs_of(part: Tensor) -> list[Tensor]:
            return [F.linear(part, w, b) for w, b in zip(weights, biases, strict=True)]  # type: ignore[arg-type]

        parts, outputs = _each_as_it_comes(gathered, boundary.axis.rank, outputs_of)
        ctx.is_whole = group.keeps_whole or is_recomputed()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_joined(parts) if ctx.is_whole else x, *weights)
        return tuple(_joined(list(of_parts)) for of_parts in zip(*outputs, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        boundary, count = ctx.boundary, ctx.count
        if all(grad is None for grad in grads):
            return None, None, None, None, *[None] * (2 * count)
        needs_w, needs_b = ctx.needs_input_grad[4 : 4 + count], ctx.needs_input_grad[4 + count :]
        gathered = Pending([x])
        if not ctx.is_whole and any(needs_w):  # meanwhile the gradient of the input is computed
            gathered = boundary.gather(x, ctx.sizes, ctx.label)
        summed = None
        if ctx.needs_input_grad[0]:
            pieces = [None if grad is None else grad.split(ctx.sizes, -2) for grad in grads]
            summed = boundary.sum(lambda number: _input_gradient(pieces, number, weights), ctx.sizes, ctx.label)
        rows = _joined(gathered.wait()).flatten(0, -2)
        flat = [None if grad is None else grad.flatten(0, -2) for grad in grads]
        of_weights = [g.T @ rows if g is not None and need else None for g, need in zip(flat, needs_w, strict=True)]
        of_biases = [g.sum(0) if g is not None and need else None for g, need in zip(flat, needs_b, strict=True)]
        return None if summed is None else summed.wait(), None, None, None, *of_weights, *of_biases


def _input_gradient(grads: list[tuple[Tensor, ...] | None], number: int, weights: list[Tensor]) -> Tensor:
    """This rank's summand, for one part of the positions."""
    share, shape = None, torch.Size()
    for pieces, weight in zip(grads, weights, strict=True):
        if pieces is not None:
            piece, shape = pieces[number].flatten(0, -2), pieces[number].shape
            share = piece @ weight if share is None else share.addmm_(piece, weight)
    assert share is not None
    return share.view(*shape[:-1], share.shape[-1])


class _RowLinear(torch.autograd.Function):
    """``F.linear`` on this rank's features, summed over ranks; the bias is added to the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, boundary: Boundary, label: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.boundary, ctx.label = boundary, label
        ctx.sizes = boundary.sizes_of_whole(x)
        pieces = x.split(ctx.sizes, -2)
        y = once(lambda: boundary.sum(lambda number: F.linear(pieces[number], weight), ctx.sizes, label).wait())
        if bias is None:
            return y
        return y + bias if is_recomputed() else y.add_(bias)  # what is kept stays as it is

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathered = ctx.boundary.gather(grad, ctx.sizes, ctx.label)
        parts, of_x = _each_as_it_comes(
            gathered, ctx.boundary.axis.rank, lambda part: part @ weight if needs_x else part
        )
        of_weight = None
        if needs_weight:
            for part, piece in zip(parts, x.split(ctx.sizes, -2), strict=True):
                more = part.flatten(0, -2).T, piece.flatten(0, -2)
                of_weight = more[0] @ more[1] if of_weight is None else of_weight.addmm_(*more)
        return (
            _joined(of_x) if needs_x else None,
            of_weight,
            grad.flatten(0, -2).sum(0) if needs_bias else None,
            None,
            None,
        )


def _each_as_it_comes(
    gathered: Pending[list[Tensor]], rank: int, compute: Callable[[Tensor], R]
) -> tuple[list[Tensor], list[R]]:
    """All parts and ``compute`` of each: first of this rank's own, while the others travel."""
    own = rank if len(gathered.result) > 1 else 0
    first = compute(gathered.result[own])
    parts = gathered.wait()
    return parts, [first if number == own else compute(part) for number, part in enumerate(parts)]


def _joined(parts: list[Tensor]) -> Tensor:
    """Along the positions."""
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]
