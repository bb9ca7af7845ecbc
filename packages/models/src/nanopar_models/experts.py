"""The experts: E small gated MLPs, stored stacked, applied to tokens sorted by expert.

    x_TD -> rows by expert -> [gate | up] = rows W13^T -> silu(gate) * up * routing weight -> W2^T -> sum per token

Shapes: T tokens, k = 2 experts per token, D hidden size, I width of one expert, E experts.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanopar_models.config import PhiMoEConfig
from nanopar_models.grouped import gather_rows, grouped_linear, sort_by_expert, sum_rows


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
        kind, dtype = hidden_states.device.type, hidden_states.dtype
        # grouped_mm knows nothing of autocast, so the cast that a linear layer would get is made here.
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.gate_up_proj.dtype
        order = sort_by_expert(top_k_index, self.gate_up_proj.shape[0])
        rows = gather_rows(hidden_states.to(compute), order)
        gate, up = grouped_linear(rows, self.gate_up_proj.to(compute), order.ends_E).chunk(2, -1)
        # Weighting here rather than after the down projection is the same sum over D/I times fewer numbers.
        weight = top_k_weights.reshape(-1)[order.order].to(compute)
        act = F.silu(gate) * up * weight[:, None]
        return sum_rows(grouped_linear(act, self.down_proj.to(compute), order.ends_E), order).to(dtype)
