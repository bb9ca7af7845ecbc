"""``PrecisionPolicy``: which dtype computes, which one travels, and in which one the optimizer's weights are kept.

param_dtype  stochastic_rounding  weights that the optimizer updates     bytes per parameter with Adam, stage 0
bfloat16     no                   fp32 masters, on this rank's part      2 + 4 + 4 (gradient) + 8 (moments) = 18
bfloat16     yes                  the bf16 weights; fp32 during step     2     + 4            + 8           = 14
float16      -                    fp32 masters, and a loss scale         18
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanopar_zero.loss_scale import LossScale


@dataclass(frozen=True)
class PrecisionPolicy:
    """Mixed precision in the sense of Micikevicius et al. 2018 (section 3.1): low-precision compute, master weights.

    Attributes:
        param_dtype: dtype of the model's parameters in forward and backward, for instance ``torch.bfloat16``. The
            values that the optimizer updates stay in the dtype that the parameters had before, at least fp32 (the
            masters).
        reduce_dtype: dtype in which gradients are accumulated over micro-batches and summed over ranks; None means
            fp32, or the parameters' dtype from before where that is wider.
        loss_scale: how the loss is scaled, for ``optimizer.scale(loss).backward()``; None means ``LossScale()`` with
            fp16 parameters and no scaling with others.
        stochastic_rounding: keep no masters: the optimizer's weights are bf16 too, an fp32 copy exists during ``step``
            and is rounded up or down at random, with the chances that make the mean right (``nanopar_zero.rounding``).
        rounding_seed: another seed, other chances.

    Raises:
        ValueError: a dtype that is not floating-point, ``reduce_dtype=torch.float16`` with a loss scale, stochastic
            rounding to another dtype than bf16.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    loss_scale: LossScale | None = None
    stochastic_rounding: bool = False
    rounding_seed: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point torch.dtype, not {dtype!r}")
        if self.loss_scale is None and self.param_dtype == torch.float16:
            object.__setattr__(self, "loss_scale", LossScale())
        if self.loss_scale is not None and self.reduce_dtype == torch.float16:
            raise ValueError(
                "reduce_dtype must not be torch.float16 with a loss scale: once divided by it gradients would vanish "
                "again; torch.float32 (the default) and torch.bfloat16 hold them"
            )
        if self.stochastic_rounding and self.param_dtype != torch.bfloat16:
            raise ValueError(f"stochastic_rounding needs param_dtype=torch.bfloat16, not {self.param_dtype}")

    def dtypes(self, before: torch.dtype) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of parameters that were ``before``: dtype of the parameters, of the masters, of the reduced gradients."""
        wide = torch.promote_types(before, torch.float32)
        masters = self.param_dtype if self.stochastic_rounding else wide
        return self.param_dtype, masters, self.reduce_dtype or wide
