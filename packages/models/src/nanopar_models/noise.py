"""Where the random numbers of the stochastic router come from.

The router never calls a generator itself; it asks a noise object, and says for which layer and which tokens:

    MoE block -- TokenKeys(layer, sample_ids, positions) --> noise --> jitter_TD, exponential_TE, uniform_T1

- `CounterNoise` (default) computes each number from (seed, layer, draw, sample id, position, column) with a hash, so a
  token gets the same numbers however the batch is cut over ranks, micro-batches or sequence chunks.
- `GeneratorNoise` takes them from torch's default generator in the order in which transformers 5.24 does, which lets a
  test compare the two models in training mode under one seed.

Shapes: T tokens, D hidden size, E experts.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class TokenKeys(NamedTuple):
    """Which tokens ask for noise: the layer's index, and each token's sample id and position (int64 ``[T]``).

    Samples need ids that differ within a batch and between the steps of a run: the same id draws the same numbers.
    """

    layer: int
    sample_ids: Tensor
    positions: Tensor


class RouterNoise(Protocol):
    """What the stochastic MoE block asks for. ``stage`` is 0 for the first expert of a token and 1 for the second."""

    def jitter(self, x_TD: Tensor, eps: float, keys: TokenKeys) -> Tensor:
        """``x_TD`` times factors drawn uniformly from [1 - eps, 1 + eps)."""

    def exponential(self, scores_TE: Tensor, stage: int, keys: TokenKeys) -> Tensor:
        """Draws of the unit exponential distribution, like ``scores_TE``."""

    def uniform(self, scores_TE: Tensor, stage: int, keys: TokenKeys) -> Tensor:
        """One draw per token from [0, 1), ``[T, 1]``."""


class CounterNoise:
    """Noise as a pure function of ``seed`` and the token (SplitMix64, Steele et al. 2014, as a counter-based hash)."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def jitter(self, x_TD: Tensor, eps: float, keys: TokenKeys) -> Tensor:
        """See `RouterNoise.jitter`."""
        uniform = self._uniform(0, keys, x_TD.shape[1])
        return x_TD * uniform.mul_(2 * eps).add_(1 - eps).to(x_TD.dtype)

    def exponential(self, scores_TE: Tensor, stage: int, keys: TokenKeys) -> Tensor:
        """See `RouterNoise.exponential`."""
        # Half a step above zero: the logarithm stays finite.
        uniform = self._uniform(1 + 2 * stage, keys, scores_TE.shape[1]).add_(2.0**-25)
        return uniform.log_().neg_().to(scores_TE.dtype)

    def uniform(self, scores_TE: Tensor, stage: int, keys: TokenKeys) -> Tensor:
        """See `RouterNoise.uniform`."""
        return self._uniform(2 + 2 * stage, keys, 1).to(scores_TE.dtype)

    def _uniform(self, draw: int, keys: TokenKeys, columns: int) -> Tensor:
        """fp32 numbers in [0, 1), ``[T, columns]``, in steps of 2**-24."""
        stream = _mix_int(_mix_int(self.seed) ^ (keys.layer * 8 + draw))
        token = _mix(_mix(keys.sample_ids + stream) + keys.positions)
        column = torch.arange(columns, device=token.device) * _GOLDEN
        return _shift_right(_mix(token[:, None] + column), 40).float().mul_(2.0**-24)


class GeneratorNoise:
    """Noise from torch's default generator, draw by draw as transformers 5.24's Phimoe consumes it.

    The peculiarities are part of the order: the input is jittered twice (the original code does it once), and the
    second stage's uniform numbers are drawn twice, the first draw being thrown away.
    """

    def jitter(self, x_TD: Tensor, eps: float, keys: TokenKeys) -> Tensor:  # noqa: ARG002 - the order is the key
        """See `RouterNoise.jitter`."""
        for _ in range(2):
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1.0 - eps, 1.0 + eps)
        return x_TD

    def exponential(self, scores_TE: Tensor, stage: int, keys: TokenKeys) -> Tensor:  # noqa: ARG002
        """See `RouterNoise.exponential`."""
        return torch.empty_like(scores_TE).exponential_()

    def uniform(self, scores_TE: Tensor, stage: int, keys: TokenKeys) -> Tensor:  # noqa: ARG002
        """See `RouterNoise.uniform`."""
        drawn = torch.rand_like(scores_TE[:, :1])
        return drawn.uniform_() if stage == 1 else drawn


# SplitMix64's constants, as signed 64-bit integers: torch's integer arithmetic wraps around.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch's ``>>`` copies the sign bit, which the mask removes."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on each int64 of ``x`` plus the golden-ratio increment."""
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    """`_mix` of one Python integer, as a signed 64-bit one."""
    mask = (1 << 64) - 1
    x = (x + _GOLDEN) & mask
    x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & mask
    x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x
