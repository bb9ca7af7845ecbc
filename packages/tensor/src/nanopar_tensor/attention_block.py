"""Attention of some queries to some keys, with the log-sum-exp that lets partial results be merged, and its gradient.

    attend            out = softmax(q k^T scale) v, total = log of the sum of exp(q k^T scale) over these keys
    attend_backward   gradients for these keys of the attention to *all* keys, of which out and total are given

("FlashAttention", Dao et al. 2022, algorithms 1 and 4.) torch's flash kernels where there is no mask, else products.

Shapes: B batch, H query heads, G key and value heads, Q queries, K keys, C head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanopar_tensor.torch_private import flash, flash_backward, has_flash


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """``out`` ``[B, H, Q, C]`` and ``total`` ``[B, H, Q]``, in at least fp32.

    Args:
        causal: query i sees keys 0 to i; as many queries as keys.
        mask: bool ``[B or 1, 1, Q, K]``, True where a query sees a key; a query may see none (0 and -inf).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = _repeated(q, k, v)
    if mask is None and has_flash(q):
        out, total = flash(q, k, v, causal, scale)
        return out.to(wide), total.to(wide)
    scores = _scores(q.to(wide), k.to(wide), causal, mask, scale)
    total = scores.logsumexp(-1)
    return _weights(scores, total) @ v.to(wide), total


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``, in the dtype of the kernel; ``out`` and ``total`` are those of all keys."""
    groups = k.shape[1]
    k, v = _repeated(q, k, v)
    if mask is None and has_flash(q):
        of_q, of_k, of_v = flash_backward(grad, q, k, v, out, total, causal, scale)
    else:
        wide = total.dtype
        grad, q, k, v, out = (x.to(wide) for x in (grad, q, k, v, out))
        weights = _weights(_scores(q, k, causal, mask, scale), total)
        of_v = weights.transpose(-1, -2) @ grad
        of_scores = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        of_q, of_k = of_scores @ k, of_scores.transpose(-1, -2) @ q
    if groups != k.shape[1]:
        of_k, of_v = (x.unflatten(1, (groups, -1)).sum(2) for x in (of_k, of_v))
    return of_q, of_k, of_v


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    copies = q.shape[1] // k.shape[1]
    return (k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)) if copies > 1 else (k, v)


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _weights(scores: Tensor, total: Tensor) -> Tensor:
    """exp(scores - total), 0 for a query that sees nothing."""
    return (scores - total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp()
