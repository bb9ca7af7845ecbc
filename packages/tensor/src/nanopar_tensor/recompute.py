"""Recomputation that sends nothing again: what the ranks summed in the first pass is kept for the second.

    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_sums)

    first pass    y = sum over ranks of x W^T       y is kept, the rest of the block's activations is not
    backward      the block again, y taken from what was kept: neither the product nor the sum is done again

(Selective recomputation, Korthikanti et al. 2022, section 5, with the reduced outputs as what is kept.) It costs one
tensor of the hidden states' size per row-parallel layer, 1/N of it under sequence parallelism. There the second pass
gathers a column layer's input, which then need not be gathered in backward; the input of a mixture of experts is kept
whole. So a step has as many collectives as without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class _Kept:
    """The sums of one checkpointed call, in order."""

    sums: list[tuple[Tensor, int]] = field(default_factory=list)  # with the version at that time
    next_one: int | None = None  # None: the first pass


_KEPT: ContextVar[_Kept | None] = ContextVar("kept sums", default=None)


def keep_sums() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``."""
    kept = _Kept()
    return _Pass(kept, is_first=True), _Pass(kept, is_first=False)


def is_recomputed() -> bool:
    """Whether this is a pass, the first or the second, of a call under ``keep_sums``."""
    return _KEPT.get() is not None


def sum_once(compute: Callable[[], Tensor]) -> Tensor:
    """``compute()``, or what it returned in the first pass; within an autograd function's forward.

    Raises:
        RuntimeError: the model changed that tensor in place meanwhile.
    """
    kept = _KEPT.get()
    if kept is None:
        return compute()
    if kept.next_one is None:
        total = compute()
        if total.is_inference():  # there will be no second pass
            return total
        kept.sums.append((total.detach(), total._version))  # detached: what autograd is given becomes part of its graph
        return total
    total, version = kept.sums[kept.next_one]
    kept.next_one += 1
    if total._version != version:
        raise RuntimeError(
            f"a summed output of shape {list(total.shape)} was changed in place after the first pass of a recomputed "
            "block, which needs it again: use y = y + x in place of y += x, or checkpoint without keep_sums"
        )
    return total.detach()


class _Pass(AbstractContextManager[None]):
    """One pass of a checkpointed call; entered again in every backward pass over a graph that is retained."""

    def __init__(self, kept: _Kept, *, is_first: bool) -> None:
        self._kept, self._is_first = kept, is_first
        self._tokens: list[Token[_Kept | None]] = []

    def __enter__(self) -> None:
        self._kept.next_one = None if self._is_first else 0
        self._tokens.append(_KEPT.set(self._kept))

    def __exit__(self, *_error: object) -> None:
        _KEPT.reset(self._tokens.pop())
