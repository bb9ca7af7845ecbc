"""A mixture of experts to build into a model: router, experts, and experts that every token visits.

    x [.., D] --router--> weights, indices [T, k]
       |----- experts(x, indices, weights) ------- + --> y [.., D]
       '----- shared(x), while tokens travel ------'

Shapes: T tokens, D hidden size, k experts per token.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn


class MoE(nn.Module):
    """``moe(x [.., D]) -> [.., D]``.

    Args:
        router: ``router(x) -> logits, weights, indices``, such as ``TopKRouter``.
        experts: ``experts(x, indices, weights, meanwhile=None)``, such as ``Experts``.
        shared: a module whose output is added, or None.

    Example:
        >>> import torch, nanopar_expert as expert
        >>> moe = expert.MoE(expert.TopKRouter(8, 4, top_k=2), expert.Experts(4, 8, 16), shared=torch.nn.Linear(8, 8))
        >>> moe(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    ep_plan: ClassVar[dict[str, str]] = {
        "experts.gate_up_proj": "grouped_gemm",
        "experts.down_proj": "grouped_gemm",
        "experts": "ep_dispatch_experts",
    }

    def __init__(self, router: nn.Module, experts: nn.Module, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor) -> Tensor:
        """As ``x``."""
        rows = x.flatten(0, -2)
        _, weights, indices = self.router(rows)
        if self.shared is None:
            return self.experts(rows, indices, weights).view_as(x)  # type: ignore[no-any-return]
        meanwhile = _Meanwhile(self.shared, rows)
        y = self.experts(rows, indices, weights, meanwhile=meanwhile)
        return (y + meanwhile.output).view_as(x)  # type: ignore[no-any-return]


class _Meanwhile:
    """Calls the shared experts when it is called."""

    def __init__(self, shared: nn.Module, rows: Tensor) -> None:
        self._shared, self._rows = shared, rows
        self.output: Tensor

    def __call__(self) -> None:
        self.output = self._shared(self._rows)
