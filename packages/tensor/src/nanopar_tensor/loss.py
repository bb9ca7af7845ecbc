"""Cross-entropy on logits whose vocabulary is divided: whole logits never exist ("Megatron-LM", 2019, section 3).

    logits [T, V/N] --logsumexp over this rank's part, the label's logit where it is here--> two numbers per row
                    --one all_gather of 2 T numbers--> log_sum = logsumexp of all parts; loss = log_sum - label's logit
    backward:  dlogits = (exp(logits - log_sum) - onehot of the label where it is here) * dloss      nothing is sent

Only a chunk of rows at a time exists in fp32.

Shapes: T tokens, V vocabulary, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nanopar_core import Axis, all_gather

CHUNK_BYTES = 4 * 2**20  # of logits in fp32: on a CPU such a chunk stays in the cache


def cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, *, sizes: Sequence[int] | None = None, ignore_index: int = -100
) -> Tensor:
    """One loss per token, ``[T]`` in fp32 (float64 for float64 logits), the same on all ranks; 0 where nothing counts.

    Args:
        logits: this rank's part ``[T, V/N]``, as a head of style ``colwise`` gives it.
        labels: ``[T]``, ids of the whole vocabulary, the same on all ranks.
        axis: over which the vocabulary is divided.
        sizes: entries of the vocabulary by rank; without them the ranks exchange their lengths first, which costs a
            small collective and, on CUDA, a host sync.
        ignore_index: the label of tokens that do not count.

    Raises:
        ValueError: shapes that do not fit.
        RuntimeError, IndexError: torch's own, for a label outside of the vocabulary, on the first or the last rank.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"logits must be [T, V/N] and labels [T], not {list(logits.shape)} and {list(labels.shape)}")
    if sizes is not None and (len(sizes) != axis.size or sizes[axis.rank] != logits.shape[1]):
        raise ValueError(f"sizes {list(sizes)} do not fit {logits.shape[1]} logits on rank {axis.rank} of {axis.size}")
    first = sum((sizes or exchange_sizes(logits, axis))[: axis.rank])
    return _CrossEntropy.apply(logits, labels, axis, first, ignore_index)  # type: ignore[no-any-return, no-untyped-call]


def exchange_sizes(logits: Tensor, axis: Axis) -> list[int]:
    """How many entries of the vocabulary each rank has."""
    mine = torch.tensor([logits.shape[1]], dtype=torch.int64, device=logits.device)
    return [int(n) for n in all_gather(mine, axis, sizes=[1] * axis.size, label="vocabulary").tolist()]


class VocabParallelLoss(nn.Module):
    """``loss(logits [B, S, V/N], labels [B, S], num_items_in_batch=None) -> scalar``, in place of a model's ``loss``.

    ``labels`` are the next tokens already, -100 where nothing is counted. With ``num_items_in_batch`` the sum divided
    by it, otherwise the mean over this call's counted tokens; 0 where there are none. Without ``sizes``, entries of the
    vocabulary by rank, the ranks exchange them in the first call.
    """

    def __init__(self, axis: Axis, sizes: Sequence[int] | None = None) -> None:
        super().__init__()
        self.axis, self.sizes = axis, sizes

    def forward(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss, a scalar, the same on all ranks."""
        rows = logits.flatten(0, -2)
        self.sizes = self.sizes or exchange_sizes(rows, self.axis)
        losses = cross_entropy(rows, labels.flatten(), self.axis, sizes=self.sizes)
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(items, Tensor):
            return losses.sum() / items.to(losses.device, non_blocking=True).clamp(min=1)
        return losses.sum() / max(items, 1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, first: int, ignore: int) -> Tensor:
        """The losses."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        local = labels - first
        is_here = labels != ignore
        if axis.rank > 0:  # on the first and the last rank a label outside of the vocabulary is an error of gather
            is_here &= local >= 0
        if axis.rank < axis.size - 1:
            is_here &= local < logits.shape[1]
        index = local.where(is_here, 0)[:, None]
        sums = torch.cat([chunk.to(wide).logsumexp(1) for chunk in _chunks(logits, logits)])
        chosen = logits.gather(1, index).squeeze(1).to(wide).where(is_here, 0.0)
        both = all_gather(torch.stack([sums, chosen])[None], axis, sizes=[1] * axis.size, label="cross-entropy")
        log_sum, of_label = both[:, 0].logsumexp(0), both[:, 1].sum(0)
        ctx.save_for_backward(logits, log_sum, index, is_here, labels != ignore)
        return (log_sum - of_label).where(labels != ignore, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """(softmax - onehot) * grad, chunk by chunk."""
        logits, log_sum, index, is_here, counts = ctx.saved_tensors
        grad = grad.where(counts, 0.0)
        result = torch.empty_like(logits)
        pieces = (_chunks(tensor, logits) for tensor in (logits, log_sum, grad, index, is_here, result))
        for part, total, scale, where, here, out in zip(*pieces, strict=True):
            p = (part.to(total.dtype) - total[:, None]).exp_()
            p.scatter_add_(1, where, -here[:, None].to(p.dtype))
            out.copy_(p.mul_(scale[:, None]))
        return result, None, None, None, None


def _chunks(tensor: Tensor, logits: Tensor) -> Iterator[Tensor]:
    """Pieces of rows of which the logits take ``CHUNK_BYTES``."""
    rows = max(1, CHUNK_BYTES // max(1, 4 * logits.shape[1]))
    return iter(tensor.split(rows))
