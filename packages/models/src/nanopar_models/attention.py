"""Grouped-query attention with rotary positions.

    x_BSD -> q, k, v projections -> rotary turn of q, k -> [cache] -> core(q, k, v, mask) -> output projection

The core is a sub-module, the seam where ring attention or another kernel goes in. Ours calls torch's scaled dot product
attention and never falls back to its slow path without a warning.

Shapes: B batch, S queries, K keys, H query heads, G key/value heads, C head_dim, D hidden size.
"""

import warnings
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from nanopar_models.cache import KVCache
from nanopar_models.config import PhiMoEConfig
from nanopar_models.layout import MakeMask, TokenLayout, attention_mask
from nanopar_models.rope import rotate
from nanopar_models.torch_private import sdpa_backend

# On the CPU torch's bf16 kernel is the faster one forward, but its backward pass pays a fixed price per block of
# queries; for sequences up to this many tokens fp32 is faster in sum.
_SHORT = 128


class AttentionCore(nn.Module):
    """``core(q [B, H, S, C], k [B, G, K, C], v [B, G, K, C], mask) -> [B, H, S, C]``.

    ``mask`` is bool ``[B or 1, 1, S, K]``, True where a query sees a key. None: causal if S == K, and the single newest
    query sees every key if S == 1.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax(q k^T / sqrt(C)) v over the keys each query sees."""
        causal, dtype = mask is None, q.dtype
        if q.shape[2] == 1:  # a branch, so that a compiler with unknown lengths gets a bool
            causal = False
        if q.is_cpu and dtype is torch.bfloat16 and q.shape[2] <= _SHORT and torch.is_grad_enabled():
            q, k, v = q.float(), k.float(), v.float()
        if not torch.compiler.is_compiling() and not q.is_meta:
            k, v, backend = fit_heads(q, k, v, mask, causal)
            if backend == SDPBackend.MATH:
                warnings.warn(
                    f"no fast attention kernel serves {q.dtype} on {q.device.type} with head_dim {q.shape[3]}"
                    f"{'' if mask is None else ' and a mask'}: torch's slow path, which holds all scores, is used",
                    stacklevel=2,
                )
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        ).to(dtype)


def fit_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor, SDPBackend]:
    """``k`` and ``v``, their heads repeated where only that lets a fast kernel serve, and the kernel that will."""
    backend = sdpa_backend(q, k, v, mask, causal)
    if backend == SDPBackend.MATH and q.shape[1] != k.shape[1]:
        wide_k, wide_v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        wide_backend = sdpa_backend(q, wide_k, wide_v, mask, causal)
        if wide_backend != SDPBackend.MATH:
            return wide_k, wide_v, wide_backend
    return k, v, backend


class Attention(nn.Module):
    """The attention block of one layer; the number of local heads follows from the projections' sizes."""

    def __init__(self, config: PhiMoEConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        heads, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, heads, bias=bias)
        self.k_proj = nn.Linear(hidden, groups, bias=bias)
        self.v_proj = nn.Linear(hidden, groups, bias=bias)
        self.o_proj = nn.Linear(heads, hidden, bias=bias)
        self.core: nn.Module = AttentionCore()

    def forward(self, x_BSD: Tensor, layout: TokenLayout, cache: KVCache | None = None) -> Tensor:
        """Attention of ``x_BSD`` over itself and the cached tokens, ``[B, S, D]``."""
        heads = (-1, self.head_dim)  # however many of them this rank has
        q = rotate(self.q_proj(x_BSD).unflatten(2, heads), layout.rotary).transpose(1, 2)
        k = rotate(self.k_proj(x_BSD).unflatten(2, heads), layout.rotary).transpose(1, 2)
        v = self.v_proj(x_BSD).unflatten(2, heads).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        out: Tensor = self.core(q, k, v, layout.mask)
        y: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return y

    @property
    def make_mask(self) -> MakeMask:
        """The core's own ``make_mask``, or ours where a replacement takes the same masks."""
        return cast(MakeMask, getattr(self.core, "make_mask", attention_mask))

    def backend(self, length: int, *, masked: bool = False) -> str:
        """The kernel that serves sequences of ``length`` tokens, e.g. ``FLASH_ATTENTION`` (``MATH``: the slow path)."""
        q, k = (
            projection.weight.new_empty(1, projection.out_features // self.head_dim, length, self.head_dim)
            for projection in (self.q_proj, self.k_proj)
        )
        q.requires_grad_(torch.is_grad_enabled())
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device) if masked else None
        return fit_heads(q, k, k, mask, mask is None)[2].name
