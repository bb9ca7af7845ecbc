"""One matrix multiply per expert over tokens sorted by expert, and the moves into and out of that order.

    x_TD --gather_rows--> rows sorted by expert [T*k, D] --grouped_linear(W_EOD)--> [T*k, O] ... --sum_rows--> [T, D]

    expert   0  0  0 | 1 | 2  2        ends = [3, 4, 6]: where each expert's rows end
    row      2  5  7 | 0 | 1  4        which token each row came from

The multiply is torch's ``grouped_mm`` where that kernel serves the operands, else a loop over the experts. Both moves
are written as autograd functions because each is the other's gradient: no scatter-add with atomics, so results are the
same in every run, and it is faster.

Shapes: T tokens, k experts per token, E experts, D and O the multiply's input and output sizes.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class ExpertOrder(NamedTuple):
    """How T x k (token, expert) pairs are sorted by expert; all index tensors.

    ``pairs``: sorted place -> pair, ``[T*k]``; ``tokens``: sorted place -> token, ``[T*k]``; ``places``: pair -> sorted
    place, ``[T, k]``; ``ends``: int32, the sorted place where each expert's rows end, ``[E]``.
    """

    pairs: Tensor
    tokens: Tensor
    places: Tensor
    ends: Tensor


def sort_by_expert(indices_Tk: Tensor, num_experts: int) -> ExpertOrder:
    """The stable order of the pairs by expert; no host sync, and the same on every run."""
    sorted_experts, pairs = torch.sort(indices_Tk.reshape(-1), stable=True)
    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(pairs.numel(), device=pairs.device))
    experts = torch.arange(num_experts, device=pairs.device)
    ends = torch.searchsorted(sorted_experts, experts, right=True, out_int32=True)
    return ExpertOrder(pairs, pairs // indices_Tk.shape[1], places.view(indices_Tk.shape), ends)


def gather_rows(x_TD: Tensor, order: ExpertOrder) -> Tensor:
    """The tokens' rows in expert order, ``[T*k, D]``."""
    return _GatherRows.apply(x_TD, order.tokens, order.places)  # type: ignore[no-any-return, no-untyped-call]


def gather_pairs(weights_Tk: Tensor, order: ExpertOrder) -> Tensor:
    """The pairs' values in expert order, ``[T*k, 1]``."""
    return _GatherRows.apply(weights_Tk.reshape(-1, 1), order.pairs, order.places.view(-1, 1))  # type: ignore[no-any-return, no-untyped-call]


def sum_rows(rows: Tensor, order: ExpertOrder) -> Tensor:
    """Per token the sum of its k rows, ``[T, D]``, from rows in expert order."""
    return _SumRows.apply(rows, order.tokens, order.places)  # type: ignore[no-any-return, no-untyped-call]


def _sum_places(rows: Tensor, places_Tk: Tensor) -> Tensor:
    # A bag is exactly this sum, in one pass and with fp32 accumulation, without a [T*k, D] copy.
    return F.embedding_bag(places_Tk, rows, mode="sum")


class _GatherRows(torch.autograd.Function):
    """Forward: x[tokens]. dgrad: sum of each token's k rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, tokens: Tensor, places_Tk: Tensor) -> Tensor:
        """x[tokens]."""
        ctx.save_for_backward(places_Tk)
        return x_TD.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sum of each token's k rows."""
        (places_Tk,) = ctx.saved_tensors
        return _sum_places(grad, places_Tk), None, None


class _SumRows(torch.autograd.Function):
    """Forward: sum of each token's k rows. dgrad: grad[tokens]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, places_Tk: Tensor) -> Tensor:
        """Sum of each token's k rows."""
        ctx.save_for_backward(tokens)
        return _sum_places(rows, places_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        """grad[tokens]."""
        (tokens,) = ctx.saved_tensors
        return grad_TD.index_select(0, tokens), None, None


def grouped_linear(rows: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows times its weight transposed: ``[N, D] -> [N, O]``; every expert's weight gets a gradient.

    Rows must be sorted by expert, all of them before ``ends_E[-1]``.
    """
    if grouped_mm_serves(rows, weight_EOD):
        return F.grouped_mm(rows, weight_EOD.transpose(1, 2), offs=ends_E)
    return cast(Tensor, grouped_linear_loop(rows, weight_EOD, ends_E))


def grouped_mm_serves(rows: Tensor, weight_EOD: Tensor) -> bool:
    """Whether torch's ``grouped_mm`` takes these operands, both ways (torch 2.13).

    It wants strides in multiples of 16 bytes, output's included, since that is the contiguous dim in backward. CUDA
    promises bf16 on compute capability 8.0 and later only; tensors without data take bf16 only.
    """
    dtype = weight_EOD.dtype
    if type(rows) is not Tensor:
        return False  # a shape-only tensor of FakeTensorMode
    if dtype is torch.bfloat16:
        if rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 0):
            return False
    elif dtype not in (torch.float32, torch.float16) or not rows.is_cpu or torch.compiler.is_compiling():
        return False
    return all(size * dtype.itemsize % 16 == 0 for size in weight_EOD.shape[1:])


@torch.library.custom_op("nanopar_models::grouped_linear_loop", mutates_args=())
def grouped_linear_loop(rows: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_linear` as a loop over the experts, for any dtype and size.

    Registered as one operator so that compilers and shape-only tensors need not look inside, where sizes are data.
    """
    out = rows.new_empty(rows.shape[0], weight_EOD.shape[1])
    for part, target, weight in zip(_split(rows, ends_E), _split(out, ends_E), weight_EOD.unbind(0), strict=True):
        torch.mm(part, weight.t(), out=target)
    return out


@grouped_linear_loop.register_fake
def _(rows: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:  # noqa: ARG001
    return rows.new_empty(rows.shape[0], weight_EOD.shape[1])


@torch.library.custom_op("nanopar_models::grouped_linear_loop_backward", mutates_args=())
def _grouped_linear_loop_backward(
    grad: Tensor, rows: Tensor, weight_EOD: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Forward: rows W^T. dgrad: grad W. wgrad: grad^T rows per expert, zero where an expert has no rows."""
    grad_rows, grad_weight_EOD = torch.empty_like(rows), torch.empty_like(weight_EOD)
    parts = (_split(tensor, ends_E) for tensor in (grad, rows, grad_rows))
    for part_grad, part, target, weight, grad_weight in zip(*parts, weight_EOD, grad_weight_EOD, strict=True):
        torch.mm(part_grad, weight, out=target)
        torch.mm(part_grad.t(), part, out=grad_weight)
    return grad_rows, grad_weight_EOD


@_grouped_linear_loop_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(rows), torch.empty_like(weight_EOD)


def _setup_loop(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward_loop(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight_EOD, ends_E = ctx.saved_tensors
    grad_rows, grad_weight_EOD = _grouped_linear_loop_backward(grad.contiguous(), rows, weight_EOD, ends_E)
    return grad_rows, grad_weight_EOD, None


grouped_linear_loop.register_autograd(_backward_loop, setup_context=_setup_loop)


def _split(rows: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    """Views of each expert's rows. The one place that needs the sizes on the host."""
    return rows.tensor_split(ends_E[:-1].to("cpu", torch.int64))
