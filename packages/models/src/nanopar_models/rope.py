"""Rotary positions (RoPE, arXiv 2104.09864) in the half-split layout, with LongRoPE scaling.

A head's vector is read as two halves (a, b); the pair (a_i, b_i) is turned by the angle position * frequency_i:

    [a, b]  ->  [a, b] * cos + [-b, a] * sin

Tables are computed in fp32 and then cast to the activations' dtype, in exactly the order of the reference: writing
position / theta**x for position * (1 / theta**x) already costs 3e-6 in the logits. Nothing is kept in buffers, so that a
model built on the meta device needs nothing recomputed.

Shapes: B batch, S sequence, H heads, C head_dim.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from nanopar_models.config import PhiMoEConfig


def rotary_tables(config: PhiMoEConfig, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, each ``[B, S, 1, C]`` in ``dtype``, for ``position_ids_BS`` (``[B, S]`` or ``[1, S]``).

    With LongRoPE (arXiv 2402.13753) the batch counts as long when its largest position reaches the original length;
    then ``long_mscale`` scales the tables. transformers 5.24 keeps ``short_factor`` there, and so does this function
    unless ``config.original_longrope`` asks for the original code's ``long_factor``. No host sync.
    """
    device, half = position_ids_BS.device, config.head_dim // 2
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
    shape = (*position_ids_BS.shape, 1, 2 * half)
    return torch.cat((cos, cos), -1).to(dtype).view(shape), torch.cat((sin, sin), -1).to(dtype).view(shape)


def rotate(x_BSHC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """``x_BSHC`` (queries or keys, ``[B, S, H, C]``) turned by its positions; tables from `rotary_tables`."""
    rotated: Tensor = _Rotate.apply(x_BSHC, *tables)
    return rotated


class _Rotate(torch.autograd.Function):
    """Forward: x * cos + half_swap(x) * sin. dgrad: the same turn backwards (sin negated); tables get no gradient.

    Written by hand because autograd's slices would fill and add full-size zero tensors in the backward pass.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, backwards=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return _turn(grad, cos, sin, backwards=True), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool) -> Tensor:
    a, b = x.chunk(2, -1)
    swapped = torch.cat((b, -a) if backwards else (-b, a), -1)
    return (x * cos).add_(swapped.mul_(sin))
