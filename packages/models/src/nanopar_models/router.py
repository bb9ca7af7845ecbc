"""Sparsemixer routing: which two experts a token visits, and with which weights.

    scores = x W^T                        one score per expert, in the weights' dtype
    stage 1:  survivors = experts within 2 eps of the best score;  p = softmax over the survivors
              choose the best (or, with noise, sample among the survivors);  weight = p[chosen]
    stage 2:  the same without the expert chosen in stage 1

(GRIN, arXiv 2409.12136, section 3; eps is ``router_jitter_noise``.) A token's best expert usually has no rival within
2 %, so its softmax has one term and both weights are 1: they sum to 2, not to 1, and the router gets no gradient from
that token. Only near-ties train it.

Shapes: T tokens, D hidden size, E experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nanopar_models.config import PhiMoEConfig
from nanopar_models.noise import RouterNoise, TokenKeys

# The stochastic form's chance to keep the full weight of an expert that was not the best, and the factors with and
# without it: Heun's third-order rule in the reference's rounding.
_KEEP_ABOVE, _BASE, _BONUS = 0.75, 0.3333, 0.6667


class SparseMixerRouter(nn.Linear):
    """``router(x_TD) -> logits [T, E], weights [T, 2], indices [T, 2]``; no bias. The seam for other routers.

    Given ``noise`` and the tokens' ``keys``, it samples the experts (the reference's training form); without, it takes
    the best ones (the reference's evaluation form).
    """

    def __init__(self, config: PhiMoEConfig) -> None:
        super().__init__(config.hidden_size, config.num_local_experts, bias=False)
        self.eps = config.router_jitter_noise

    def forward(  # type: ignore[override]
        self, x_TD: Tensor, noise: RouterNoise | None = None, keys: TokenKeys | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores before routing, weights and indices of the two experts."""
        logits_TE = F.linear(x_TD, self.weight)
        weights_T2, indices_T2 = sparsemixer(logits_TE, self.eps, noise, keys)
        return logits_TE, weights_T2, indices_T2


def sparsemixer(
    scores_TE: Tensor, eps: float, noise: RouterNoise | None = None, keys: TokenKeys | None = None
) -> tuple[Tensor, Tensor]:
    """Weights ``[T, 2]`` (differentiable in the scores) and expert indices ``[T, 2]``; see the module's docstring."""
    with torch.no_grad():
        first = _choose(scores_TE, scores_TE, eps, 0, noise, keys)
        others_TE = scores_TE.scatter(1, first.expert, -torch.inf)
        second = _choose(scores_TE, others_TE, eps, 1, noise, keys)
        p_T2E = torch.stack((first.survivors, second.survivors), 1).softmax(2)
        index_T2 = torch.cat((first.expert, second.expert), 1)
        factor_T2 = None
        if first.factor is not None and second.factor is not None:
            factor_T2 = torch.cat((first.factor, second.factor), 1)
    return _MixWeight.apply(scores_TE, p_T2E, index_T2, factor_T2), index_T2  # type: ignore[no-untyped-call]


class _Choice(NamedTuple):
    """One stage's outcome.

    ``survivors``: scores with -inf for experts out of the race, ``[T, E]``; ``expert``: the chosen one, ``[T, 1]``;
    ``factor``: its weight's factor, ``[T, 1]`` or None for 1.
    """

    survivors: Tensor
    expert: Tensor
    factor: Tensor | None


def _choose(
    scores_TE: Tensor, allowed_TE: Tensor, eps: float, stage: int, noise: RouterNoise | None, keys: TokenKeys | None
) -> _Choice:
    """The choice among ``allowed_TE``, the scores with -inf for experts already taken."""
    best_T1, best_index_T1 = allowed_TE.max(1, keepdim=True)
    # Relative to the larger of |score| and best; where the best is negative this divides by |score|.
    gap_TE = (best_T1 - scores_TE) / torch.maximum(scores_TE.abs(), best_T1)
    survivors_TE = allowed_TE.masked_fill(gap_TE > 2 * eps, -torch.inf)
    if noise is None or keys is None:
        return _Choice(survivors_TE, best_index_T1, None)
    # The Gumbel trick: argmax(score - log(exponential)) samples from softmax(score).
    index_T1 = (survivors_TE - noise.exponential(scores_TE, stage, keys).log()).max(1, keepdim=True)[1]
    keep_T1 = (index_T1 == best_index_T1) | (noise.uniform(scores_TE, stage, keys) > _KEEP_ABOVE)
    # Not add with alpha: torch.compile with sizes as symbols makes the bonus 0 there.
    return _Choice(survivors_TE, index_T1, torch.where(keep_T1, _BASE + _BONUS, _BASE).to(scores_TE.dtype))


class _MixWeight(torch.autograd.Function):
    """Both stages' weights ``[T, 2]`` from their softmax over survivors ``[T, 2, E]``.

    Forward: p[chosen] * factor. dgrad: sum over the stages of grad * p[chosen] * (onehot(chosen) - p), the derivative
    of the softmax; the factor stays out of it, which is what makes the stochastic form's estimate a third-order one.
    """

    @staticmethod
    def forward(ctx: Any, _scores_TE: Tensor, p_T2E: Tensor, index_T2: Tensor, factor_T2: Tensor | None) -> Tensor:
        """p[chosen] * factor; the scores are an argument only for their gradient."""
        weights_T2 = p_T2E.gather(2, index_T2[:, :, None]).squeeze(2)
        ctx.save_for_backward(p_T2E, index_T2, weights_T2)
        return weights_T2 if factor_T2 is None else weights_T2 * factor_T2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T2: Tensor) -> tuple[Tensor, None, None, None]:
        """grad * p[chosen] * (onehot(chosen) - p), summed over the stages."""
        p_T2E, index_T2, weights_T2 = ctx.saved_tensors
        grad_T21 = (grad_T2 * weights_T2)[:, :, None]
        grad_T2E = (p_T2E * -grad_T21).scatter_add_(2, index_T2[:, :, None], grad_T21)
        return grad_T2E.sum(1), None, None, None
