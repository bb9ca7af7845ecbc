"""The experts: E small gated MLPs, stored stacked, applied to tokens sorted by expert.

    x_TD -> rows by expert -> [gate | up] = rows W13^T -> silu(gate) * up * routing weight -> W2^T -> sum per token

Shapes: T tokens, k = 2 experts per token, D hidden size, I width of one expert, E experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nanopar_models.config import PhiMoEConfig
from nanopar_models.grouped import gather_pairs, gather_rows, grouped_linear, sort_by_expert, sum_rows


class Experts(nn.Module):
    """``experts(hidden_states [T, D], top_k_index [T, k], top_k_weights [T, k]) -> [T, D]``, Hugging Face's signature.

    ``gate_up_proj`` is ``[E, 2I, D]`` (rows 0..I-1 go through SiLU), ``down_proj`` is ``[E, D, I]``. An expert without
    tokens gets a zero gradient, never None.
    """

    def __init__(self, config: PhiMoEConfig) -> None:
        super().__init__()
        experts, hidden, width = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Per token the weighted sum of its experts' outputs."""
        kind, dtype, compute = hidden_states.device.type, hidden_states.dtype, self.gate_up_proj.dtype
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            compute = torch.get_autocast_dtype(kind)  # grouped_mm knows nothing of autocast
        order = sort_by_expert(top_k_index, self.gate_up_proj.shape[0])
        rows = gather_rows(hidden_states.to(compute), order)
        gate_up = grouped_linear(rows, self.gate_up_proj.to(compute), order.ends)
        weight = gather_pairs(top_k_weights.to(compute), order)
        act = gated_activation(gate_up, weight)
        return sum_rows(grouped_linear(act, self.down_proj.to(compute), order.ends), order).to(dtype)


def gated_activation(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * weight for ``[gate | up]`` ``[N, 2I]`` and ``weight`` ``[N, 1]`` -> ``[N, I]``."""
    if torch.compiler.is_compiling():  # a compiler fuses the formula and decides itself what to keep
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up * weight
    return _GatedActivation.apply(gate_up, weight)  # type: ignore[no-any-return, no-untyped-call]


class _GatedActivation(torch.autograd.Function):
    """`gated_activation` with its gradient written by hand.

    The routing weight comes in here rather than after the down projection: the same sum, over D/I times fewer numbers.
    Only the inputs are kept for the backward pass; autograd would keep two more tensors of the output's size.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        """a = silu(gate) * up * weight."""
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """dgrad of gate: g w up silu'(gate); of up: g w silu(gate); of weight: sum over I of g silu(gate) up."""
        gate_up, weight = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        silu, weighted = F.silu(gate), grad * weight
        torch.mul(weighted, silu, out=grad_up)
        grad_weight = silu.mul_(up).mul_(grad).sum(-1, keepdim=True)
        torch.ops.aten.silu_backward.grad_input(weighted.mul_(up), gate, grad_input=grad_gate)
        return grad_gate_up, grad_weight
