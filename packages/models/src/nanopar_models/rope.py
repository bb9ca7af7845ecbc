"""Rotary positions (RoPE, arXiv 2104.09864) in the half-split layout, with LongRoPE scaling.

A head's vector is read as two halves (a, b); the pair (a_i, b_i) is turned by the angle position * frequency_i:

    [a, b]  ->  [a, b] * cos + [-b, a] * sin  =  [a, b] * cos + halves swapped of ([a, b] * [sin, -sin])

Tables are computed in fp32 and then cast to the activations' dtype, in exactly the order of the reference: writing
position / theta**x for position * (1 / theta**x) already shows in the logits. Nothing is kept in buffers, so that a
model built on the meta device needs nothing recomputed.

Shapes: B batch, S sequence, H heads, C head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanopar_models.config import PhiMoEConfig


def rotary_tables(config: PhiMoEConfig, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables [cos, cos] and [sin, -sin], each ``[B, S, 1, C]`` in ``dtype``, for ``position_ids_BS`` (``[B or 1, S]``).

    With LongRoPE (arXiv 2402.13753) the batch counts as long when its largest position reaches the original length;
    then ``long_mscale`` scales the tables. transformers 5.24 keeps ``short_factor`` there, and so does this function
    unless ``config.original_longrope`` asks for the original code's ``long_factor``. No host sync.
    """
    device = position_ids_BS.device
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    scaled = config.rope_theta**exponent
    mscale: Tensor | None = None
    if config.rope_scaling is not None:
        long = config.rope_scaling
        is_long = position_ids_BS.max() + 1 > long.original_max_position_embeddings
        factor = torch.tensor(long.short_factor, dtype=torch.float32, device=device)
        if config.original_longrope:
            factor = torch.where(is_long, torch.tensor(long.long_factor, dtype=torch.float32, device=device), factor)
        scaled = factor * scaled
        mscale = torch.where(is_long, long.long_mscale, long.short_mscale).float()
    angles = position_ids_BS[..., None].float() * (1.0 / scaled)
    cos, sin = angles.cos(), angles.sin()
    if mscale is not None:
        cos, sin = cos * mscale, sin * mscale
    return torch.cat((cos, cos), -1).to(dtype)[:, :, None], torch.cat((sin, -sin), -1).to(dtype)[:, :, None]


def rotate(x_BSHC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """``x_BSHC`` (queries or keys, ``[B, S, H, C]``) turned by its positions; tables from `rotary_tables`."""
    return _Rotate.apply(x_BSHC, *tables)  # type: ignore[no-any-return, no-untyped-call]


class _Rotate(torch.autograd.Function):
    """Forward: the turn by the tables' angles. dgrad: the turn by the opposite angles. The tables get no gradient.

    Written by hand because autograd's slices would fill and add full-size zero tensors in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[a, b] * cos + [-b, a] * sin``."""
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """``[a, b] * cos + [b, -a] * sin``."""
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).add_((x * sin).roll(x.shape[-1] // 2, -1))
