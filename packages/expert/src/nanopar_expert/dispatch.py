"""All-to-all dispatch: tokens travel to the ranks that have their experts, and the results back.

    rank's tokens x [T, D], indices [T, k], weights [T, k]
      |  rows of tokens in the order of experts, each with its weight                 [P, D + 1]
      |  all_to_all, dispatch                  backward: the gradients come back, summed per token
      v
    rows of all ranks' tokens for this rank's experts [R, D], their experts [R, 1], their weights [R, 1]
      |  experts(rows, experts, weights): the module itself, which has E/N experts now
      v
    weighted outputs [R, D]
      |  all_to_all, combine                   backward: the output's gradient goes to the experts
      v
    y [T, D]: for each token the sum of its rows

So a layer and step has four all-to-alls of tokens, two in each direction, and one of counts (``route.py``). A rank that
sends or receives no row takes part in all of them, and its experts' gradients are zeros.

Each all-to-all is begun in one autograd node and ended in another, and what runs between overlaps with it: the products
of other chunks, shared experts. In backward the same nodes run in opposite order, and begin and end the gradients' way:

    forward     _Send      begins     _Receive  ends        _Return  begins     _Combine  ends
    backward    _Send      ends       _Receive  begins      _Return  ends       _Combine  begins

What travels is kept in a ``_Call``; between the nodes autograd sees empty tensors, tickets.

("Outrageously Large Neural Networks", Shazeer et al. 2017, section 3.1; "Tutel", Hwang et al. 2022, for the chunks.)

Shapes: T tokens, k experts per token, D hidden size, P rows sent, R rows received, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nanopar_core import (
    Axis,
    Pending,
    all_gather_fwd_split_bwd,
    all_reduce,
    all_to_all,
    split_fwd_all_gather_bwd,
    split_sizes,
)
from nanopar_core.recompute import is_second_pass, once
from nanopar_expert.permute import sum_rows
from nanopar_expert.route import Capacity, Chunk, Route
from nanopar_expert.torch_private import in_backward


class Dispatcher:
    """Hooks of an experts module ``experts(hidden [T, D], indices [T, k], weights [T, k]) -> [T, D]``.

    Args:
        num_experts: of all ranks together.
        axis: of the ranks that each have some of them.
        tensor_axis: of ranks that have a part of the width of each of these experts; their outputs are summed.
        token_axis: of ranks that are called with the same tokens, of which each dispatches its share.
        chunks: in how many parts tokens are sent, computed and sent back, one overlapping with the others.
        capacity: None: every token reaches its experts.
        label: of the collectives.

    Attributes:
        dropped: int64 ``[E]``: pairs of this rank that were left out for want of capacity, by the expert that they
            chose, in training, since it was set to None; None where there were no such calls.
    """

    def __init__(
        self,
        num_experts: int,
        axis: Axis,
        *,
        tensor_axis: Axis | None = None,
        token_axis: Axis | None = None,
        chunks: int = 1,
        capacity: Capacity | None = None,
        label: str = "experts",
    ) -> None:
        self.num_experts, self.axis = num_experts, axis
        self.tensor_axis, self.token_axis = tensor_axis, token_axis
        self.chunks, self.capacity, self.label = chunks, capacity, label
        self.dropped: Tensor | None = None
        self._running: _Running | None = None

    def attach(self, experts: nn.Module) -> None:
        """Have ``experts``, which has this rank's weights already, called with the rows of all ranks' tokens."""
        experts.register_forward_pre_hook(self.before, with_kwargs=True)
        experts.register_forward_hook(self.after)
        experts.register_forward_hook(self.forget, always_call=True)

    def forget(self, *_call: object) -> None:
        """Let go of a call that did not come to its end: after an error, or where recomputation stops early."""
        self._running = None

    # ------------------------------------------------------------------------------------------------------ the hooks

    def before(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Send the tokens, compute all chunks but the last, and have the experts called with that."""
        x, indices, weights, meanwhile = _arguments(*args, **kwargs)
        tokens = most = x.shape[0]
        if self.token_axis is not None:
            x, weights = (split_fwd_all_gather_bwd(part, self.token_axis, label=self.label) for part in (x, weights))
            shares = split_sizes(tokens, self.token_axis.size)
            indices, most = indices.split(shares)[self.token_axis.rank], max(shares)
        route = Route(
            indices.detach(),
            self.num_experts,
            self.axis,
            chunks=self.chunks,
            capacity=self.capacity,
            most_tokens=most,
            label=self.label,
        )
        self._count(experts, route)
        call = _Call(route, self.axis, self.tensor_axis, self.label)
        tickets: tuple[Tensor, ...] = _Send.apply(x, weights, call)  # type: ignore[no-untyped-call]
        if meanwhile is not None:
            meanwhile()
        running = _Running(call, tokens)
        for number in range(self.chunks - 1):
            rows, scales = _Receive.apply(tickets[number], call, number)  # type: ignore[no-untyped-call]
            chunk = call.chunks[number]
            running.back(experts, experts.forward(rows, chunk.experts, scales), rows, scales)
        rows, scales = _Receive.apply(tickets[-1], call, self.chunks - 1)  # type: ignore[no-untyped-call]
        running.last = rows, scales
        self._running = running
        return (rows, call.chunks[-1].experts, scales), {}

    def after(self, experts: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Send the outputs back."""
        running, self._running = self._running, None
        assert running is not None
        running.back(experts, output, *running.last)
        y: Tensor = _Combine.apply(running.call, *running.tickets)  # type: ignore[no-untyped-call]
        if self.token_axis is not None:
            sizes = split_sizes(running.tokens, self.token_axis.size)
            y = all_gather_fwd_split_bwd(y, self.token_axis, sizes=sizes, label=self.label)
        return y

    def _count(self, experts: nn.Module, route: Route) -> None:
        if route.dropped is not None and experts.training and not in_backward():
            self.dropped = route.dropped if self.dropped is None else self.dropped + route.dropped


def _arguments(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Callable[[], None] | None]:
    if hidden_states.dim() != 2 or top_k_index.shape != top_k_weights.shape or len(top_k_index) != len(hidden_states):
        raise ValueError(
            "experts are called with tokens [T, D], indices [T, k] and weights [T, k], not "
            f"{list(hidden_states.shape)}, {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
        )
    return hidden_states, top_k_index, top_k_weights, meanwhile


class _Running:
    """A call of the experts between the two hooks."""

    def __init__(self, call: _Call, tokens: int) -> None:
        self.call, self.tokens = call, tokens
        self.tickets: list[Tensor] = []
        self.last: tuple[Tensor, Tensor]

    def back(self, experts: nn.Module, output: Tensor, rows: Tensor, scales: Tensor) -> None:
        """Begin the way back of a chunk's output."""
        if not rows.shape[0]:  # the graph must be the same as on ranks with tokens
            output = _NoRows.apply(output, rows, scales, *experts.parameters())  # type: ignore[no-untyped-call]
        self.tickets.append(_Return.apply(output, self.call, len(self.tickets)))  # type: ignore[no-untyped-call]


class _Call:
    """One call of an experts module: its route, and what is on its way, by chunk."""

    def __init__(self, route: Route, axis: Axis, tensor_axis: Axis | None, label: str) -> None:
        self.route, self.chunks = route, route.chunks
        self.axis, self.tensor_axis, self.label = axis, tensor_axis, label
        self.width, self.dtype = 0, torch.float32  # of tokens and of weights
        self.to_experts: list[Pending[Tensor]] = []
        self.from_experts: list[Pending[Tensor]] = []

    def start(self, number: int, rows: Tensor, *, back: bool) -> Pending[Tensor]:
        """Rows ``[P, .]`` to the experts, or rows ``[R, .]`` back, where one row of zeros is added to them."""
        chunk = self.chunks[number]
        send, receive = (chunk.receive, chunk.send) if back else (chunk.send, chunk.receive)
        count = sum(receive)
        into = rows.new_empty(count + back, *rows.shape[1:])
        if back:
            into[count:].zero_()
        coming = all_to_all(
            rows, self.axis, send_sizes=send, receive_sizes=receive, out=into[:count], label=self.label, async_op=True
        )
        return Pending(into, coming.works, coming.buffers)


class _Send(torch.autograd.Function):
    """Forward: begin the tokens' way. Backward: their gradients are there, summed per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, call: _Call) -> tuple[Tensor, ...]:
        ctx.call, call.width, call.dtype = call, x.shape[1], weights.dtype
        packed, first = [], 0
        for chunk in [] if is_second_pass() else call.chunks:
            count = chunk.places.shape[0]
            packed.append(_packed(x[first : first + count], weights[first : first + count], chunk))
            first += count
        call.route.finish()
        for number, rows in enumerate(packed):
            call.to_experts.append(call.start(number, rows[: sum(call.chunks[number].send)], back=False))
        return tuple(x.new_empty(0) for _ in call.chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_tickets: Tensor) -> tuple[Tensor | None, ...]:
        call, of_x, of_weights = ctx.call, [], []
        pending, call.to_experts = call.to_experts, []
        for chunk, coming in zip(call.chunks, pending, strict=True):
            rows = coming.wait()
            of_x.append(sum_rows(rows, chunk.places)[:, : call.width])
            scales = rows[:, call.width :].index_select(0, chunk.places.flatten())
            of_weights.append(_from_columns(scales, call.dtype).view(chunk.places.shape))
        x, weights = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (of_x, of_weights))
        if call.tensor_axis is not None:
            x, weights = _summed(x, weights, call.tensor_axis, call.label)
        return x, weights, None


class _Receive(torch.autograd.Function):
    """Forward: the rows of a chunk are there. Backward: begin their gradients' way back."""

    @staticmethod
    def forward(ctx: Any, _ticket: Tensor, call: _Call, number: int) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.number = call, number
        rows = once(lambda: call.to_experts[number].wait())
        if number == len(call.chunks) - 1:
            call.to_experts = []
        return rows[:, : call.width], _from_columns(rows[:, call.width :], call.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_scales: Tensor) -> tuple[Tensor, None, None]:
        call = ctx.call
        if not call.to_experts:
            call.to_experts = [None] * len(call.chunks)
        call.to_experts[ctx.number] = call.start(ctx.number, _joined(of_rows, of_scales), back=True)
        return of_rows.new_empty(0), None, None


class _Return(torch.autograd.Function):
    """Forward: begin the way back of a chunk's outputs. Backward: the gradients of the outputs are there."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, call: _Call, number: int) -> Tensor:
        ctx.call, ctx.number = call, number
        if not is_second_pass():
            call.from_experts.append(call.start(number, output, back=True))
        return output.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _ticket: Tensor) -> tuple[Tensor, None, None]:
        pending = ctx.call.from_experts[ctx.number]
        ctx.call.from_experts[ctx.number] = None  # the call lives as long as the loss
        return pending.wait(), None, None


class _Combine(torch.autograd.Function):
    """Forward: the outputs are there, summed per token. Backward: begin their gradients' way."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_tickets: Tensor) -> Tensor:
        ctx.call = call

        def combined() -> Tensor:
            pending, call.from_experts = call.from_experts, []
            parts = [sum_rows(one.wait(), chunk.places) for one, chunk in zip(pending, call.chunks, strict=True)]
            y = torch.cat(parts) if len(parts) > 1 else parts[0]
            return y if call.tensor_axis is None else all_reduce(y, call.tensor_axis, out=y, label=call.label)

        return once(combined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, first = ctx.call, 0
        call.from_experts = []
        for number, chunk in enumerate(call.chunks):
            count = chunk.places.shape[0]
            rows = grad.new_empty(chunk.tokens.shape[0], grad.shape[1])
            _gather(grad[first : first + count], chunk, rows)
            call.from_experts.append(call.start(number, rows, back=False))
            first += count
        return None, *(grad.new_empty(0) for _ in call.chunks)


class _NoRows(torch.autograd.Function):
    """Forward: an output without rows. Backward: zeros for the rows, their weights and all experts."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            torch.zeros_like(one) if needed else None
            for one, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        )
        return grad, *zeros


# ------------------------------------------------------------------------------------- weights as columns of the rows


def _columns(rows: torch.dtype, weights: torch.dtype) -> tuple[torch.dtype, int]:
    """In which dtype weights travel beside rows, and how many columns they take; no bit of them is lost."""
    if weights == rows or weights.itemsize < rows.itemsize:
        return rows, 1
    return weights, weights.itemsize // rows.itemsize


def _packed(x: Tensor, weights: Tensor, chunk: Chunk) -> Tensor:
    """``[P, D + 1]`` (or more columns): the chunk's tokens ``[T, D]`` by row, with their weights ``[T, k]``."""
    travels_in, columns = _columns(x.dtype, weights.dtype)
    width, count = x.shape[1], chunk.tokens.shape[0]
    rows = x.new_empty(count, width + columns)
    scales = weights.new_empty(count, 1)
    _gather(x, chunk, rows[:, :width])
    _gather(weights.reshape(-1, 1), chunk, scales, chunk.pairs)
    rows[:, width:] = scales.to(travels_in).view(x.dtype)
    return rows


def _joined(rows: Tensor, scales: Tensor) -> Tensor:
    """Rows ``[R, D]`` and their weights ``[R, 1]`` in one tensor."""
    travels_in, _ = _columns(rows.dtype, scales.dtype)
    return torch.cat([rows, scales.to(travels_in).contiguous().view(rows.dtype)], 1)


def _gather(x: Tensor, chunk: Chunk, out: Tensor, sources: Tensor | None = None) -> None:
    """Rows of ``x`` in the order of experts; zeros where a row pads."""
    if chunk.is_padding is None:
        torch.index_select(x, 0, chunk.tokens if sources is None else sources, out=out)
    elif not x.shape[0]:
        out.zero_()
    else:
        out.copy_(x.index_select(0, chunk.tokens if sources is None else sources))
        out.masked_fill_(chunk.is_padding[:, None], 0)


def _from_columns(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights ``[P, 1]``."""
    travelled_in, _ = _columns(columns.dtype, dtype)
    if travelled_in == columns.dtype:
        return columns.to(dtype)
    return columns.contiguous().view(travelled_in)


def _summed(x: Tensor, weights: Tensor, axis: Axis, label: str) -> tuple[Tensor, Tensor]:
    """Both gradients summed over the ranks, in one message."""
    wide = torch.promote_types(x.dtype, weights.dtype)
    both = torch.cat([x.to(wide), weights.to(wide)], 1)
    both = all_reduce(both, axis, out=both, label=label)
    return both[:, : x.shape[1]].to(x.dtype), both[:, x.shape[1] :].to(weights.dtype)
