"""Stochastic rounding of fp32 to bf16: weights without masters that still move (Gupta et al. 2015, section 3).

A step of AdamW with lr 1e-3 changes a weight of 1.0 by 0.001, but next to 1.0 the bf16 numbers lie 0.004 apart: rounded
to the nearest one, the weight never moves. Rounded at random, it moves every fourth time, and its mean is right:

    fp32  sign exponent mantissa [ 7 bits | 16 bits ]      a bf16 number is the upper half of an fp32 number
                                        [ 16 random bits ]  a sum above 16 bits carries, with chance (lower half)/2**16
    bf16  sign exponent mantissa [ 7 bits ]                 the lower half is dropped

The random bits are a function of (seed, number of the update, bucket, position in the bucket). So copies of a weight on
several ranks stay equal bit for bit, and the number of ranks among which a bucket is divided changes nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanopar_zero.buckets import Bucket

CHUNK, CHUNK_ON_CPU = 2**24, 2**17  # elements that are rounded at a time; on a CPU the random bits stay in the cache
_LOWER_HALF = 0xFFFF


class Rounding:
    """The optimizer's weights of one model: bf16 in the buckets, fp32 only while the optimizer updates them.

    Args:
        seed: of the random bits.
        buckets: all that are trained, in an order that is the same on all ranks.
    """

    def __init__(self, seed: int, buckets: Sequence[Bucket]) -> None:
        self.updates = 0  # so far, skipped ones aside
        self._seed = seed
        self._streams: dict[Bucket, tuple[object, ...]] = {}
        counts: Counter[tuple[str, ...]] = Counter()
        for bucket in buckets:  # counted by axes, since copies of a tied weight may lie in unlike buckets of other axes
            axes = tuple(axis.name for axis in bucket.reduction.axes)
            self._streams[bucket] = (*axes, counts[axes])
            counts[axes] += 1

    def absent(self, masters: Tensor) -> Tensor:
        """What stands for the fp32 copy between updates: NaN of its shape, without memory."""
        return masters.new_full((), float("nan"), dtype=torch.float32).expand(masters.shape)

    def widen(self, flat: nn.Parameter, masters: Tensor) -> None:
        """An update begins: ``flat`` becomes the fp32 copy."""
        flat.data = masters.float()

    def narrow(self, flat: nn.Parameter, masters: Tensor, bucket: Bucket, start: int) -> None:
        """The update has been made: round it into the masters, which begin at element ``start`` of the bucket."""
        key = key_of(self._seed, self.updates, *self._streams[bucket])
        round_stochastically(flat.data, masters, key=key, start=start)
        flat.data = self.absent(masters)


def round_stochastically(exact: Tensor, out: Tensor, *, key: int, start: int) -> None:
    """Round ``exact`` (fp32, overwritten) into ``out`` (bf16), both flat; a bf16 number stays what it is.

    Args:
        key: 32 bits that say which update of which bucket this is; another key, other random bits.
        start: the position of the first element in its bucket.
    """
    for values in exact.split(CHUNK_ON_CPU if exact.device.type == "cpu" else CHUNK):
        noise = random_bits(start, values.numel(), key, values.device)
        noise.masked_fill_(values.isnan(), 0)  # a carry out of a NaN would make a number of it
        values.view(torch.int32).add_(noise).bitwise_and_(~_LOWER_HALF)
        start += values.numel()
    out.copy_(exact)


def random_bits(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """16 random bits, as int32 from 0 to 65535, for each of the positions ``start`` to ``start + count``.

    Multiplication and folding of the upper bits into the lower ones, twice, so that neighbouring positions have nothing
    in common. Keys should be hashes themselves.
    """
    bits = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(start % 2**32))
    bits.mul_(0x2C1B3C6D).bitwise_xor_(bits >> 15)
    bits.add_(_signed(key)).mul_(0x297A2D39).bitwise_xor_(bits >> 15)
    return bits.mul_(0x1B873593).bitwise_right_shift_(16).bitwise_and_(_LOWER_HALF)


def key_of(*parts: object) -> int:
    """32 bits out of anything that prints the same on all ranks."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
