"""Context parallelism by exchanging heads for positions ("DeepSpeed Ulysses", Jacobs et al., arXiv 2309.14509, sec. 3).

    q, k, v   all heads, S/N positions --all_to_all--> H/N heads, all S positions
    attention of these heads, as in one process, by any kernel
    output    H/N heads, S positions   --all_to_all--> all heads, S/N positions

Two calls forward and two backward, which send (N-1)/N of q, k and v, and of the output. Query heads must be a multiple
of N; key and value heads are repeated where N does not divide them.

Shapes: B batch, H query heads, G key and value heads, S positions, C head dim, N ranks.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from nanopar_core import Axis
from nanopar_core.autograd import all_to_all_fwd_all_to_all_bwd
from nanopar_tensor.zigzag import by_rank, in_order

if TYPE_CHECKING:
    from nanopar_tensor.context import ContextMask


def attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: ContextMask | None, scale: float | None, label: str
) -> Tensor:
    """``[B, H, S/N, C]``; see ``ContextAttention``."""
    heads, groups, ranks = q.shape[1], k.shape[1], axis.size
    if heads % ranks:
        raise ValueError(
            f"ulysses divides query heads: {ranks} ranks of axis {axis.name} do not divide {heads} heads (those of one "
            'tensor-parallel rank); use "all_gather" or "ring"'
        )
    copies = lcm(groups, ranks) // groups
    k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
    groups *= copies
    # [N, (H + 2G)/N, B, S/N, C]: the heads of one rank after the other
    by_heads = [x.transpose(0, 1).unflatten(0, (ranks, -1)) for x in (q, k, v)]
    sent = torch.cat(by_heads, 1).flatten(0, 1)
    received = _exchange(sent, axis, label)
    # [(H + 2G)/N, B, S, C] in order, then [B, ., S, C]
    whole = torch.cat(received.chunk(ranks), -2) if ranks > 1 else received
    whole = in_order(whole, ranks, 2).transpose(0, 1)
    queries, keys, values = whole.split([heads // ranks, groups // ranks, groups // ranks], 1)
    places = torch.arange(queries.shape[2], device=q.device)
    output = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if mask is None else mask.visible(places, places),
        is_causal=mask is None,
        scale=scale,
        enable_gqa=heads != groups,
    )
    # [N, H/N, B, S/N, C]: the positions of one rank after the other
    positions = by_rank(output, ranks, 2).transpose(0, 1)
    back = torch.cat(positions.chunk(ranks, 2)) if ranks > 1 else positions
    return _exchange(back, axis, label).transpose(0, 1)


def _exchange(x: Tensor, axis: Axis, label: str) -> Tensor:
    sizes = [x.shape[0] // axis.size] * axis.size
    return all_to_all_fwd_all_to_all_bwd(x.contiguous(), axis, send_sizes=sizes, receive_sizes=sizes, label=label)
