"""Context parallelism by gathering keys and values (Llama 3, arXiv 2407.21783, section 3.3.2).

    k, v of this rank --all_gather--> [2, B, G, S, C] on every rank      forward: one call of (N-1) |k, v|
                                                                          backward: one reduce_scatter
    q's first chunk   against the keys up to its end
    q's second chunk  against the keys up to its end                      together as much on every rank

The simplest method, for any mask; with few key and value heads (GQA) it sends little. It holds the keys and values of
the whole sequence of one layer at a time.

Shapes: B batch, H query heads, G key and value heads, S positions, C head dim, N ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from nanopar_core import Axis
from nanopar_core.autograd import all_gather_fwd_reduce_scatter_bwd
from nanopar_tensor.zigzag import in_order, my_positions

if TYPE_CHECKING:
    from nanopar_tensor.context import ContextMask


def attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: ContextMask | None, scale: float | None, label: str
) -> Tensor:
    """``[B, H, S/N, C]``; see ``ContextAttention``."""
    both = torch.stack([k, v])
    whole = all_gather_fwd_reduce_scatter_bwd(both, axis, 3, sizes=[k.shape[2]] * axis.size, label=label)
    keys, values = in_order(whole, axis.size, 3).unbind()
    positions = my_positions(keys.shape[2], axis).to(q.device)
    chunk, outputs = q.shape[2] // 2, []
    numbers = axis.rank, 2 * axis.size - 1 - axis.rank
    for number, queries, at in zip(numbers, q.chunk(2, 2), positions.chunk(2), strict=True):
        end = (number + 1) * chunk
        before = torch.arange(end, device=q.device)
        seen = causal_lower_right(chunk, end) if mask is None else mask.visible(at, before)
        attended = F.scaled_dot_product_attention(
            queries,
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=seen,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(attended)
    return torch.cat(outputs, 2)
