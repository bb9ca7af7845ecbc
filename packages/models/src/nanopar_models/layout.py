"""What every layer needs to know about a batch besides its hidden states, worked out once per forward pass.

    position_ids, attention_mask, sample_ids  --token_layout-->  TokenLayout (rotary tables, mask, real tokens)

``attention_mask`` is ``[B, past + S]``: 0 is padding, any other number names the document that the token belongs to
(1 everywhere in an ordinary batch); tokens attend within their document only. Decisions are made on the host from it,
so a mask left on the CPU costs a CUDA run no synchronisation, one on the GPU costs one per forward pass, and no mask at
all (no padding) is cheapest.

    attention_mask of a row   what attention does         what the experts see
    1 1 1 1                   causal kernel, no mask      all tokens
    1 1 0 0  right padding    causal kernel, no mask      real tokens (padding comes after them, none sees it)
    0 0 1 1  left padding     masked kernel               real tokens
    1 1 2 2  two documents    masked kernel               all tokens

Shapes: B batch, S sequence, K keys (cached ones included), T real tokens, C head_dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanopar_models.config import PhiMoEConfig
from nanopar_models.rope import rotary_tables

MakeMask = Callable[[Tensor | None, int, int, int | None, torch.device], Any]


class TokenLayout(NamedTuple):
    """See the module's docstring. All tensors are on the hidden states' device.

    ``rotary``: cosine and sine tables, ``[B or 1, S, 1, C]``. ``mask``: what the attention cores take, as their
    ``make_mask`` gives it; ours is bool, ``[B or 1, 1, S, K]``, True where a query sees a key, None for causal.
    ``real``: places of the real tokens in the flattened batch, ``[T]``; None means all. ``positions`` and
    ``sample_ids``, ``[B, S]``, name the tokens for the router's noise; the latter may be missing.
    """

    rotary: tuple[Tensor, Tensor]
    mask: Any
    real: Tensor | None
    positions: Tensor
    sample_ids: Tensor | None


def token_layout(
    config: PhiMoEConfig,
    make_mask: MakeMask,
    hidden_BSD: Tensor,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    sample_ids: Tensor | None = None,
    past: int = 0,
) -> TokenLayout:
    """The layout of ``hidden_BSD`` (only its shape, dtype and device matter), which follows ``past`` cached tokens.

    Its length is that of ``position_ids`` where they are given: a strategy may have divided ``hidden_BSD`` along S.

    ``make_mask`` (documents, length, past, window, device) is that of the attention cores; `attention_mask` is ours.

    ``position_ids`` (``[B, S]`` or ``[1, S]``) default to 0, 1, ... after the cached ones, padding or not.
    ``sample_ids`` is ``[B]`` or ``[B, S]``.
    """
    batch, length, _ = hidden_BSD.shape
    device = hidden_BSD.device
    if position_ids is None:
        position_ids = torch.arange(past, past + length, device=device)[None]
    elif position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch):
        raise ValueError(f"position_ids must be [{batch}, {length}] or [1, {length}], got {list(position_ids.shape)}")
    length = position_ids.shape[1]
    documents = _host_documents(attention_mask, batch, past + length)
    if sample_ids is not None:
        sample_ids = sample_ids.reshape(batch, -1).expand(batch, length).to(device)
    position_ids = position_ids.to(device)
    return TokenLayout(
        rotary=rotary_tables(config, position_ids, hidden_BSD.dtype),
        mask=make_mask(documents, length, past, config.sliding_window, device),
        real=_real_tokens(documents, length, device),
        positions=position_ids.expand(batch, length),
        sample_ids=sample_ids,
    )


def _host_documents(attention_mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """The mask as int64 on the CPU."""
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch, keys):
        raise ValueError(f"attention_mask must be [{batch}, {keys}], got {list(attention_mask.shape)}")
    return attention_mask.to("cpu", torch.int64)


def attention_mask(
    documents: Tensor | None, length: int, past: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Who sees whom: same document, not later, within the window. Padding sees padding, so no row is empty.

    bool ``[B or 1, 1, S, K]``, or None where it is causal attention anyway. ``documents``: ``[B, K]``, on the CPU.
    """
    keys = past + length
    if documents is not None and documents.amax() <= 1 and bool((documents[:, 1:] <= documents[:, :-1]).all()):
        documents = None  # padding only at the end, which no real token sees anyway
    if window is not None and keys <= window:
        window = None
    if documents is None and window is None and (past == 0 or length == 1):
        return None
    query_S1 = torch.arange(past, keys, device=device)[:, None]
    key_K = torch.arange(keys, device=device)
    mask = (query_S1 >= key_K)[None, None]
    if window is not None:
        mask = mask & (query_S1 - key_K < window)
    if documents is not None:
        documents = documents.to(device, non_blocking=True)
        mask = mask & (documents[:, None, past:, None] == documents[:, None, None, :])
    return mask


def _real_tokens(documents: Tensor | None, length: int, device: torch.device) -> Tensor | None:
    if documents is None:
        return None
    real = documents[:, -length:] != 0
    return None if bool(real.all()) else real.flatten().nonzero().squeeze(1).to(device, non_blocking=True)
