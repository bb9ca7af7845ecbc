"""Initial values, one independent stream per parameter.

    (seed, "model.layers.3.mlp.router.weight")  --hash-->  generator  --normal-->  fp32 values on the CPU

A rank that holds part of a parameter draws the whole of this one parameter and keeps its part: initial values are the
same in every layout, on every device and in every order.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from nanopar_models.config import PhiMoEConfig


def initial_value(name: str, shape: Sequence[int], config: PhiMoEConfig, seed: int) -> Tensor:
    """The initial value of the parameter called ``name`` (unsharded ``shape``), fp32 on the CPU.

    Biases are zero, norm weights one, all else normal with standard deviation ``config.initializer_range``.
    """
    if name.endswith(".bias"):
        return torch.zeros(tuple(shape))
    if name.endswith("norm.weight"):
        return torch.ones(tuple(shape))
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(tuple(shape)).normal_(0.0, config.initializer_range, generator=generator)
