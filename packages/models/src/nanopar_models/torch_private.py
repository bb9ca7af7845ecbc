"""torch's private names that this package needs, in one place; a test fails when torch changes them."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


def sdpa_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> SDPBackend:
    """The kernel family that torch picks for this call of scaled dot product attention."""
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=None, enable_gqa=q.shape[1] != k.shape[1])
    return SDPBackend(choice)
