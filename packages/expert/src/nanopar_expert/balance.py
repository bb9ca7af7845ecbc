"""Keeping experts evenly used: balancing losses, the router's z-loss, and a bias that needs no loss.

    per        counts of choices are taken over          ("Switch Transformer", Fedus et al. 2021, section 2.2, and:)
    sequence   each sequence                              DeepSeek-V3, arXiv 2412.19437, section 2.1.2
    batch      this call's tokens                         as above
    global     this call's tokens on all ranks of axis    "Demons in the Detail", Qiu et al., arXiv 2501.11873

For a group of n tokens, E/k * sum over experts of (share of the choices) * (mean score): 1 when balanced. Every group
counts by its share n / tokens of the step, so that a coefficient means the same in every layout; "sequence" gives the
same gradient however sequences are put into micro-batches and on ranks, the other two do not.

The losses reach the routers' gradient through the weights that they give out (``_Attach``), so nothing has to be
carried to the end of the model, nor through the stages of a pipeline.

Shapes: T tokens of a call, E experts, k experts per token, G groups, L routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanopar_core import Axis, all_reduce
from nanopar_core.recompute import once
from nanopar_expert.router import scores_of
from nanopar_expert.torch_private import in_backward

PER = ("sequence", "batch", "global")


class BalancingLoss:
    """Adds the gradient of these losses to that of routers; one object for all layers.

    Args:
        routers: by name, modules ``router(x) -> logits [T, E], weights [T, k], indices [T, k]``; of those with an
            attribute ``scores`` scores are taken as it says, of others by softmax.
        coefficient: of the balancing loss.
        z_coefficient: of the mean of logsumexp(logits)^2 ("ST-MoE", Zoph et al. 2022, equation 5).
        per: over what choices are counted.
        axis: of the ranks over which they are counted too: for "global" the data-parallel ones, for "sequence" the
            context-parallel ones that each have a part of every sequence.

    Raises:
        ValueError: another ``per``, "global" without an axis, or "batch" with one.

    Example:
        >>> import torch, nanopar_expert as expert
        >>> moe = expert.MoE(expert.TopKRouter(8, 4, top_k=2), expert.Experts(4, 8, 16))
        >>> balance = expert.BalancingLoss(expert.routers_of(moe), 0.01, per="sequence")
        >>> balance.begin_step(tokens=6, sequence_length=3)
        >>> moe(torch.ones(2, 3, 8)).sum().backward()
    """

    def __init__(
        self,
        routers: Mapping[str, nn.Module],
        coefficient: float,
        *,
        z_coefficient: float = 0.0,
        per: str = "sequence",
        axis: Axis | None = None,
    ) -> None:
        if per not in PER:
            raise ValueError(f"per must be one of {', '.join(PER)}, not {per!r}")
        if (per == "global") != (axis is not None) and per != "sequence":
            raise ValueError(f'per="{per}" {"needs an axis to count over" if axis is None else "counts over no axis"}')
        self.coefficient, self.z_coefficient, self.per, self.axis = coefficient, z_coefficient, per, axis
        self._tokens: Tensor | int | None = None
        self._sequences: Tensor | int | None = None
        self._count: int | None = None
        self._scale: Tensor | float = 1.0
        self._value: Tensor | None = None
        for router in routers.values():
            router.register_forward_hook(self._attach)

    def begin_step(
        self,
        *,
        tokens: Tensor | int,
        sequence_length: int | None = None,
        sequences: Tensor | None = None,
        sequence_count: int | None = None,
        scale: Tensor | float = 1.0,
    ) -> None:
        """Say what the forward passes of a step work on.

        Args:
            tokens: of the step's whole batch, all ranks and micro-batches, as the main loss is divided by.
            sequence_length: positions of a sequence on this rank, the same for all; or
            sequences: ``[T]``, which sequence of the call a token belongs to, numbered from 0. Give the tokens that the
                routers see: with padding left out, as Phi-MoE does.
            sequence_count: how many sequences there are, the same on all ranks of ``axis``; without it the largest
                number is looked up, which on CUDA is a host sync for each router.
            scale: what the main loss is multiplied by before backward, as under fp16.
        """
        self._tokens, self._scale = tokens, scale
        if self.axis is not None and self.per == "sequence" and sequences is not None and sequence_count is None:
            raise ValueError("sequences on ranks that share them need sequence_count, the same on all ranks")
        self._sequences = sequence_length if sequences is None else sequences
        self._count = sequence_count
        self._value = None

    @property
    def value(self) -> Tensor | None:
        """This rank's share of all losses since ``begin_step``, coefficients included; None before a forward pass."""
        return self._value

    def _attach(self, router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, indices = output
        if not router.training:
            return output
        if self._tokens is None:
            raise RuntimeError("call begin_step before the forward passes of a step")
        # As it was in the first pass, if this is the second one.
        tokens, scale, sequences, count = once(lambda: (self._tokens, self._scale, self._sequences, self._count))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        groups = self._groups(wide.shape[0], wide.device, sequences, count)
        loss = self.coefficient * self._balancing(wide, indices, getattr(router, "scores", "softmax"), *groups)
        if self.z_coefficient:
            loss = loss + self.z_coefficient * wide.logsumexp(1).square().sum()
        assert tokens is not None
        loss = loss / tokens
        if not in_backward():
            self._value = loss.detach() if self._value is None else self._value + loss.detach()
        if not torch.is_grad_enabled():
            return output
        return logits, _Attach.apply(weights, loss, scale), indices  # type: ignore[no-untyped-call]

    def _balancing(self, logits: Tensor, indices: Tensor, kind: str, groups: Tensor, count: int) -> Tensor:
        """Sum over groups of n times their loss."""
        scores = scores_of(logits, kind)
        if kind != "softmax":
            scores = scores / scores.sum(1, keepdim=True)
        experts = scores.shape[1]
        by_group = scores.new_zeros(count, experts).index_add(0, groups, scores)
        with torch.no_grad():
            hits = _hits(indices, experts).to(scores.dtype)
            chosen = torch.zeros_like(by_group).index_add_(0, groups, hits)
            if self.axis is not None:
                axis, mine = self.axis, chosen
                chosen = once(lambda: all_reduce(mine, axis, label="choices"))
            # sum over experts of choices = k n
            factor = experts * indices.shape[1] / chosen.sum(1).clamp(min=1) / indices.shape[1]
        return (factor[:, None] * chosen * by_group).sum()

    def _groups(
        self, tokens: int, device: torch.device, sequences: Tensor | int | None, count: int | None
    ) -> tuple[Tensor, int]:
        """Each token's group, and how many groups there are."""
        if self.per != "sequence":
            return torch.zeros(tokens, dtype=torch.int64, device=device), 1
        if isinstance(sequences, Tensor):
            if sequences.shape != (tokens,):
                raise ValueError(f"sequences must be [{tokens}], a number for each token, not {list(sequences.shape)}")
            if count is None:
                count = int(sequences.max()) + 1 if tokens else 1
            return sequences.to(device), count
        if not sequences or tokens % sequences:
            raise ValueError(
                f"a router has {tokens} tokens, which are not sequences of {sequences}: give begin_step "
                "sequence_length, or sequences where they differ"
            )
        count = tokens // sequences
        return torch.arange(count, device=device).repeat_interleave(sequences), max(1, count)


def _hits(indices: Tensor, experts: int) -> Tensor:
    """int64 ``[T, E]``: how often a token chose each expert; what is no expert's index counts nowhere."""
    inside = indices.where((indices >= 0) & (indices < experts), experts)
    hits = torch.zeros(indices.shape[0], experts + 1, dtype=torch.int64, device=indices.device)
    return hits.scatter_add_(1, inside.long(), torch.ones_like(inside, dtype=torch.int64))[:, :experts]


class _Attach(torch.autograd.Function):
    """Forward: the weights. Backward: their gradient, and ``scale`` for the loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        if isinstance(ctx.scale, Tensor):
            return grad, ctx.scale.to(device, dtype), None
        return grad, torch.full((), ctx.scale, dtype=dtype, device=device), None


class ExpertLoad:
    """Counts how many tokens chose each expert, in training; no host sync.

    Args:
        routers: by name, ``router(x) -> logits, weights, indices``.
    """

    def __init__(self, routers: Mapping[str, nn.Module]) -> None:
        self.routers = dict(routers)
        self._counts: dict[str, Tensor] = {}
        for name, router in self.routers.items():
            router.register_forward_hook(_Count(self._counts, name))

    def counts(self, *axes: Axis) -> dict[str, Tensor]:
        """Since ``clear``, by router, int64 ``[E]``; summed over the ranks of ``axes``, one collective for each."""
        names = [name for name in self.routers if name in self._counts]
        if not names:
            return {}
        stacked = torch.cat([self._counts[name] for name in names])
        for axis in axes:
            stacked = all_reduce(stacked, axis, label="expert load")
        return dict(zip(names, stacked.split([self._counts[name].shape[0] for name in names]), strict=True))

    def clear(self) -> None:
        """Begin anew."""
        self._counts.clear()


class _Count:
    """Forward hook of a router."""

    def __init__(self, counts: dict[str, Tensor], name: str) -> None:
        self._counts, self._name = counts, name

    def __call__(self, router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, indices = output
        if router.training and not in_backward():
            counted = _hits(indices.detach(), logits.shape[1]).sum(0)
            before = self._counts.get(self._name)
            self._counts[self._name] = counted if before is None else before + counted


class BiasBalancer:
    """Balance without a loss: after each step the bias of an expert that was chosen too often goes down, else up.

    ("Auxiliary-Loss-Free Load Balancing", Wang et al., arXiv 2408.15664.) The bias is a buffer of the router, and is
    saved with the model.

    Args:
        routers: by name, with a buffer ``bias`` ``[E]``, such as ``TopKRouter(..., bias=True)``.
        axes: of the ranks whose tokens count.
        rate: by how much a bias moves in a step.

    Raises:
        ValueError: a router without such a buffer.
    """

    def __init__(self, routers: Mapping[str, nn.Module], *axes: Axis, rate: float = 1e-3) -> None:
        for name, router in routers.items():
            if not isinstance(getattr(router, "bias", None), Tensor) or isinstance(router.bias, nn.Parameter):
                raise ValueError(f"{name} has no buffer bias to move: make it TopKRouter(..., bias=True)")
            assert isinstance(router.bias, Tensor)
            if router.bias.dtype.itemsize < 4:
                raise ValueError(
                    f"the bias of {name} is {router.bias.dtype}, in which small steps are lost: "
                    "router.bias = router.bias.float() after casting the model"
                )
        self.load, self.axes, self.rate = ExpertLoad(routers), axes, rate

    @torch.no_grad()
    def step(self) -> None:
        """Once per optimizer step, on all ranks; not where the step was skipped: ``load.clear()`` then."""
        for name, counts in self.load.counts(*self.axes).items():
            bias = self.load.routers[name].bias
            assert isinstance(bias, Tensor)
            wide = counts.to(torch.float64)
            bias.add_((wide.mean() - wide).sign().to(bias.dtype), alpha=self.rate)
        self.load.clear()
