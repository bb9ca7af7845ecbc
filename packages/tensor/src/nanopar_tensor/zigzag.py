"""Which positions of a sequence a context-parallel rank has: two chunks out of 2 N, so that causal work is balanced.

    in order     | 0 | 1 | 2 | 3 |        N = 2
    by rank      | 0   3 | 1   2 |

(Zhu, "zigzag" ring attention, 2024; the same division as in Megatron-LM and in Llama 3, section 3.3.2.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanopar_core import Axis


def padded_length(length: int, ranks: int) -> int:
    """The next multiple of the number of chunks."""
    return -(-length // (2 * ranks)) * 2 * ranks


def positions_of(rank: int, ranks: int, length: int) -> Tensor:
    """The positions ``[length / N]`` of one rank; ``length`` is a multiple of 2 N."""
    chunk = length // (2 * ranks)
    first, second = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def my_positions(length: int, axis: Axis) -> Tensor:
    """Those of this rank."""
    return positions_of(axis.rank, axis.size, length)


def in_order(by_rank: Tensor, ranks: int, dim: int) -> Tensor:
    """Positions in order, out of the ranks' chunks one after the other; a copy unless there is one rank."""
    chunks = by_rank.chunk(2 * ranks, dim)
    return torch.cat([chunks[_place(number, ranks)] for number in range(2 * ranks)], dim) if ranks > 1 else by_rank


def by_rank(ordered: Tensor, ranks: int, dim: int) -> Tensor:
    """The inverse of ``in_order``."""
    chunks = ordered.chunk(2 * ranks, dim)
    if ranks == 1:
        return ordered
    return torch.cat([chunks[number] for rank in range(ranks) for number in (rank, 2 * ranks - 1 - rank)], dim)


def _place(number: int, ranks: int) -> int:
    """Where chunk ``number`` lies among the chunks by rank."""
    return 2 * number if number < ranks else 2 * (2 * ranks - 1 - number) + 1
