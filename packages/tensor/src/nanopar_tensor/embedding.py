"""A vocabulary-parallel embedding: each rank has some rows of the table ("Megatron-LM", Shoeybi 2019, section 3).

    ids [..]  --rows of this rank, zero for the ids of others-->  [.., D]  --one all_reduce-->  the same on all ranks

Shapes: V vocabulary, D hidden size, N ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanopar_core import Axis
from nanopar_core.autograd import all_reduce_fwd_identity_bwd


class VocabParallelEmbedding(nn.Module):
    """``embedding(ids [..]) -> [.., D]``, the same on all ranks; backward sends nothing.

    An id outside of the vocabulary is torch's own error, on the first or the last rank.

    Args:
        weight: this rank's rows ``[V/N, D]``.
        first: the id of the first of them.
        padding_idx: the id whose row gets no gradient, or None.
        axis: of the ranks that have the other rows.
        label: of the collective.
    """

    def __init__(self, weight: nn.Parameter, first: int, padding_idx: int | None, axis: Axis, label: str) -> None:
        super().__init__()
        self.weight = weight
        self.first, self.padding_idx, self.axis, self.label = first, padding_idx, axis, label

    def forward(self, ids: Tensor) -> Tensor:
        """One row per id."""
        local, count = ids - self.first, self.weight.shape[0]
        is_here = torch.ones_like(ids, dtype=torch.bool)
        if self.axis.rank > 0:
            is_here &= local >= 0
        if self.axis.rank < self.axis.size - 1:
            is_here &= local < count
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        rows = F.embedding(
            local.where(is_here, 0), self.weight, padding if padding is not None and 0 <= padding < count else None
        )
        return all_reduce_fwd_identity_bwd(rows.where(is_here[..., None], 0.0), self.axis, label=self.label)

    def extra_repr(self) -> str:
        """Which rows are here."""
        return f"rows {self.first} to {self.first + self.weight.shape[0] - 1}, {self.weight.shape[1]} columns"
