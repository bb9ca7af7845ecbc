"""The next-token loss and the router's balancing loss.

    logits  position 0   1   2   3          position i predicts label i+1; the last position predicts nothing
    labels           a   b   c   d          counted: label i+1 is not -100, and neither i nor i+1 is padding
                     '-> b   c   d  (none)

Shapes: B batch, S sequence, V vocabulary, N = B*S.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORE = -100
# Logits turned to fp32 at a time: on the CPU a chunk that stays in the cache is fastest; a GPU wants larger ones.
_CPU_CHUNK_BYTES, _CHUNK_BYTES = 4 * 2**20, 256 * 2**20


def next_token_labels(labels_BS: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """For each position the label it must predict, -100 where it predicts nothing, ``[B, S]``.

    A position whose own token or whose next token is padding (``attention_mask`` 0) predicts nothing. The number of
    counted tokens of a batch is the number of entries other than -100, which is what ``num_items_in_batch`` sums up.
    """
    if attention_mask is None:
        return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)
    padding_BS = attention_mask.to(labels_BS.device, non_blocking=True) == 0
    shifted = F.pad(labels_BS.masked_fill(padding_BS, IGNORE)[:, 1:], (0, 1), value=IGNORE)
    return shifted.masked_fill(padding_BS, IGNORE)


class NextTokenLoss(nn.Module):
    """``loss(logits [B, S, V], labels [B, S], num_items_in_batch=None) -> scalar``; the seam for other losses.

    ``labels`` are already the next tokens (`next_token_labels`), -100 where nothing is counted. With
    ``num_items_in_batch`` (the counted tokens of the whole step, all ranks and micro-batches together) the result is
    sum / num_items_in_batch, this call's share of the step's loss; without it, the mean over this call's counted
    tokens. No counted token: 0. Computed in fp32, or in float64 for float64 logits.
    """

    def forward(self, logits_BSV: Tensor, labels_BS: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss, a scalar."""
        losses_N = cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
        items = (labels_BS != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(items, Tensor):
            return losses_N.sum() / items.to(losses_N.device, non_blocking=True).clamp(min=1)
        return losses_N.sum() / max(items, 1)


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Cross-entropy per row, ``[N]`` in fp32 (float64 for float64 logits), 0 where the label is -100.

    Besides the logits themselves only a chunk of rows ever exists in fp32, and only one number per row is kept for
    backward, which writes its gradient in the logits' dtype.
    """
    return _CrossEntropy.apply(logits_NV, labels_N)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """Forward: logsumexp(row) - row[label]. dgrad: grad * (softmax(row) - onehot(label)), rows recomputed by chunks."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """logsumexp(row) - row[label]."""
        index_N1 = labels_N.masked_fill(labels_N == IGNORE, 0)[:, None]
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        losses, log_sums = [], []
        for logits, index in zip(_chunks(logits_NV), _chunks(index_N1, like=logits_NV), strict=True):
            chosen = logits.gather(1, index).to(wide)
            loss = -logits.log_softmax(1, dtype=wide).gather(1, index)
            losses.append(loss)
            log_sums.append(loss + chosen)
        ctx.save_for_backward(logits_NV, labels_N, torch.cat(log_sums))
        return torch.cat(losses).squeeze(1).masked_fill(labels_N == IGNORE, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        """grad * (softmax(row) - onehot(label))."""
        logits_NV, labels_N, log_sums_N1 = ctx.saved_tensors
        grad_N1 = grad_N.masked_fill(labels_N == IGNORE, 0.0)[:, None]
        index_N1 = labels_N.masked_fill(labels_N == IGNORE, 0)[:, None]
        grad_NV = torch.empty_like(logits_NV)
        pieces = (_chunks(t, like=logits_NV) for t in (logits_NV, log_sums_N1, grad_N1, index_N1, grad_NV))
        for logits, log_sum, grad, index, out in zip(*pieces, strict=True):
            p = (logits.to(log_sum.dtype) - log_sum).exp_().mul_(grad)
            out.copy_(p.scatter_add_(1, index, -grad))
        return grad_NV, None


def _chunks(rows: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """``rows`` cut so that chunks of ``like`` (default: ``rows``) stay below the chunk size in fp32."""
    like = rows if like is None else like
    size = _CPU_CHUNK_BYTES if like.is_cpu else _CHUNK_BYTES
    chunks: tuple[Tensor, ...] = rows.split(max(1, size // (4 * like.shape[1])))
    return chunks


def load_balancing_loss(router_logits: Sequence[Tensor]) -> Tensor:
    """The reference's auxiliary loss, over all layers' real tokens together (arXiv 2101.03961, equations 4 to 6).

    ``router_logits``: one ``[T, E]`` per layer. E * sum over experts of (share of top-2 choices) * (mean probability):
    2 when balanced, since the shares sum to 2. Choices are those of the plain top 2, not of sparsemixer.
    """
    experts = router_logits[0].shape[1]
    device = router_logits[0].device
    chosen_E = torch.zeros(experts, dtype=torch.float32, device=device)
    probability_E = torch.zeros(experts, dtype=torch.float32, device=device)
    rows = 0
    for logits_TE in router_logits:
        p_TE = logits_TE.softmax(1)
        index = p_TE.detach().topk(2, 1)[1].flatten()
        chosen_E = chosen_E.index_add(0, index, torch.ones_like(index, dtype=torch.float32))
        probability_E = probability_E + p_TE.sum(0, dtype=torch.promote_types(p_TE.dtype, torch.float32))
        rows += logits_TE.shape[0]
    rows = max(rows, 1)
    return (chosen_E / rows * (probability_E / rows)).sum() * experts
