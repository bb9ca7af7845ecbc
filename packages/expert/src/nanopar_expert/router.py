"""Routers: which k experts a token visits, and with which weights. In fp32, and the same in every layout.

    logits = x W^T                         [T, E], fp32 (float64 for float64 tokens)
    scores = softmax(logits) or sigmoid    [T, E]
    choice = the k best of scores + bias   the bias is for the choice alone; of equal ones the first
    weights = scores[choice]               divided by their sum if normalized, times scale

With groups a token chooses among the experts of its best groups only; a group is as good as its two best experts
together ("DeepSeek-V3", arXiv 2412.19437, section 2.1.2).

Shapes: T tokens, D hidden size, E experts, k experts per token, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TopKRouter(nn.Module):
    """``router(x [.., D]) -> logits [T, E], weights [T, k], indices [T, k]``.

    Args:
        hidden_size, num_experts, top_k: D, E and k.
        scores: "softmax" or "sigmoid".
        normalize: weights of a token sum to ``scale``.
        scale: times which weights are given out.
        groups, top_groups: choose among the experts of so many of the groups; experts lie group by group.
        bias: have a buffer ``bias`` ``[E]`` that is added for the choice; ``BiasBalancer`` moves it.

    Raises:
        ValueError: numbers that do not fit.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f'scores must be "softmax" or "sigmoid", not {scores!r}')
        if num_experts % groups or not 1 <= top_groups <= groups:
            raise ValueError(f"{groups} groups, of which {top_groups} are chosen, do not fit {num_experts} experts")
        if not 1 <= top_k <= num_experts // groups * top_groups:
            raise ValueError(f"top_k={top_k}: {num_experts // groups * top_groups} experts can be chosen")
        self.top_k, self.scores, self.normalize, self.scale = top_k, scores, normalize, scale
        self.groups, self.top_groups = groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32) if bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, the weights in the tokens' dtype, and the experts' numbers."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.flatten(0, -2).to(wide), self.weight.to(wide))
        scores = scores_of(logits, self.scores)
        with torch.no_grad():
            indices = self._choose(scores.detach())
        weights = scores.gather(1, indices)
        if self.normalize:
            weights = weights / weights.sum(1, keepdim=True)
        return logits, (weights * self.scale).to(x.dtype), indices

    def _choose(self, scores: Tensor) -> Tensor:
        wanted = scores if self.bias is None else scores + self.bias
        if self.top_groups < self.groups:
            by_group = wanted.unflatten(1, (self.groups, -1))
            best = _first_best(by_group, min(2, by_group.shape[2]))
            chosen = _first_best(by_group.gather(2, best).sum(2), self.top_groups)
            is_open = torch.zeros_like(wanted[:, : self.groups], dtype=torch.bool).scatter_(1, chosen, True)
            wanted = by_group.masked_fill(~is_open[:, :, None], -torch.inf).flatten(1)
        return _first_best(wanted, self.top_k)

    def extra_repr(self) -> str:
        """What was chosen."""
        return f"{self.weight.shape[0]} experts, top_k={self.top_k}, scores={self.scores}"


def scores_of(logits: Tensor, kind: str) -> Tensor:
    """``[T, E]``."""
    return logits.softmax(1) if kind == "softmax" else logits.sigmoid()


def _first_best(values: Tensor, count: int) -> Tensor:
    """Places of the largest along the last dim, the first of equal ones: the same on every device."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
