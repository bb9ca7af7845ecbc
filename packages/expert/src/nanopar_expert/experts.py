"""Experts: gated MLPs of one size, their weights stacked, applied to rows that are sorted by expert.

    x [T, D] -> rows by expert [T*k, D] -> [gate | up] = rows W13^T -> silu(gate) * up * weight -> W2^T -> sum per token

One product for all experts where torch's ``grouped_mm`` takes the operands, else one for each.

Shapes: T tokens, k experts per token, E experts, D hidden size, I width of one expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanopar_expert.permute import counts_of, gather_pairs, gather_tokens, sort_by_expert, sum_tokens


class Experts(nn.Module):
    """``experts(hidden_states [T, D], top_k_index [T, k], top_k_weights [T, k]) -> [T, D]``, Hugging Face's signature.

    ``gate_up_proj`` is ``[E, 2I, D]``, its first I rows the gate's; ``down_proj`` is ``[E, D, I]``. An index that is
    not one of E experts' stands for none. An expert without tokens gets a zero gradient, never None.

    Args:
        num_experts, hidden_size, width: E, D and I.
        activation: of the gate.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, width: int, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)

    @classmethod
    def from_dense(
        cls, gate: Tensor, up: Tensor, down: Tensor, num_experts: int, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> Experts:
        """Experts that all begin as one trained MLP ("Sparse Upcycling", Komatsuzaki et al. 2022).

        With routing weights that sum to 1 (``TopKRouter`` normalizes) the mixture computes what the MLP did.

        Args:
            gate, up: ``[I, D]``, the MLP's weights.
            down: ``[D, I]``.
        """
        experts = cls(num_experts, down.shape[0], down.shape[1], activation).to(down.device, down.dtype)
        with torch.no_grad():
            experts.gate_up_proj.copy_(torch.cat([gate, up]))
            experts.down_proj.copy_(down)
        return experts

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Per token the weighted sum of its experts' outputs.

        ``meanwhile`` is called before the products; under expert parallelism, while tokens travel.
        """
        if meanwhile is not None:
            meanwhile()
        dtype, compute = hidden_states.dtype, _compute_dtype(hidden_states, self.gate_up_proj)
        order = sort_by_expert(top_k_index, self.gate_up_proj.shape[0])
        rows = gather_tokens(hidden_states.to(compute), order)
        # Rows of no expert are at the end: the last one computes them, with weight 0.
        is_none = torch.arange(rows.shape[0], device=rows.device) >= order.ends[-1]
        weights = gather_pairs(top_k_weights.to(compute), order).masked_fill(is_none[:, None], 0.0)
        ends = torch.cat([order.ends[:-1], order.ends.new_full((1,), rows.shape[0])])
        gate, up = grouped_linear(rows, self.gate_up_proj.to(compute), ends).chunk(2, 1)
        scaled = self.activation(gate) * up * weights
        return sum_tokens(grouped_linear(scaled, self.down_proj.to(compute), ends), order).to(dtype)

    def extra_repr(self) -> str:
        """Sizes."""
        experts, hidden, width = self.down_proj.shape
        return f"{experts} experts, hidden_size={hidden}, width={width}"


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows ``[P, D]``, sorted by expert, each times its expert's weight ``[E, O, D]`` transposed: ``[P, O]``."""
    if _grouped_mm_takes(rows, weights) and rows.shape[0]:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = rows.split(counts_of(ends).tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


def _grouped_mm_takes(rows: Tensor, weights: Tensor) -> bool:
    """torch 2.13: strides in multiples of 16 bytes, also of outputs; on CUDA bf16 and compute capability 8 only."""
    if rows.is_cuda and (rows.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (8, 0)):
        return False
    if rows.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    return all(size * rows.dtype.itemsize % 16 == 0 for size in weights.shape[1:])


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """That of the products: the weights', or autocast's, of which grouped_mm knows nothing."""
    kind = x.device.type
    if weight.dtype is not torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype
