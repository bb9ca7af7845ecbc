"""``PrecisionPolicy``: which dtype computes and which one travels; the optimizer works on masters."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrecisionPolicy:
    """Mixed precision in the sense of Micikevicius et al. 2018 (section 3.1): low-precision compute, master weights.

    Attributes:
        param_dtype: dtype of the model's parameters in forward and backward, for instance ``torch.bfloat16``. The
            values that the optimizer updates stay in the dtype that the parameters had before (the masters).
        reduce_dtype: dtype in which gradients are accumulated over micro-batches and summed over ranks; None means the
            masters' dtype.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point torch.dtype, not {dtype!r}")
