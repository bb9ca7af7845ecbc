"""Recomputation that sends nothing again: what came from other ranks in the first pass is kept for the second.

    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_communicated)

    first pass    y = sum over ranks of x W^T       y is kept, the rest of the block's activations is not
    backward      the block again, y taken from what was kept: neither the product nor the sum is done again

(Selective recomputation, "Reducing Activation Recomputation in Large Transformer Models", Korthikanti et al. 2022,
section 5, with what was communicated as what is kept.) Strategies wrap a call in ``once``. What that costs: tensor
parallelism keeps one tensor of the hidden states' size per row-parallel layer, 1/N of it under sequence parallelism,
where a column layer's input is then gathered in the second pass rather than in backward; expert parallelism keeps the
routing, the tokens that a rank received and the block's output; context parallelism the keys and values (or heads) that
it received, the ring the output. So a step has as many collectives as without.

Without it ranks may even lock up: autograd comes to the second pass of a block when it first needs something of it,
which depends on a rank's data (padding), and a rank that sends then may meet others in an earlier collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor

T = TypeVar("T")


@dataclass
class _Kept:
    """The results of one checkpointed call, in order."""

    results: list[tuple[Any, int]] = field(default_factory=list)  # with the version at that time
    next_one: int | None = None  # None: the first pass


_KEPT: ContextVar[_Kept | None] = ContextVar("kept results", default=None)


def keep_communicated() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``."""
    kept = _Kept()
    return _Pass(kept, is_first=True), _Pass(kept, is_first=False)


def is_recomputed() -> bool:
    """Whether this is a pass, the first or the second, of a call under ``keep_communicated``."""
    return _KEPT.get() is not None


def is_second_pass() -> bool:
    """Whether this pass is given what ``once`` has kept in the first."""
    kept = _KEPT.get()
    return kept is not None and kept.next_one is not None


def once(compute: Callable[[], T]) -> T:
    """``compute()``, or what it returned in the first pass; tensors within an autograd function's forward only.

    Raises:
        RuntimeError: the model changed that tensor in place meanwhile.
    """
    kept = _KEPT.get()
    if kept is None:
        return compute()
    if kept.next_one is None:
        result = compute()
        if not isinstance(result, Tensor):
            kept.results.append((result, 0))
        elif not result.is_inference():  # for which there is no second pass
            # Detached: what autograd is given becomes part of its graph.
            kept.results.append((result.detach(), result._version))
        return result
    before, version = kept.results[kept.next_one]
    kept.next_one += 1
    if not isinstance(before, Tensor):
        return cast(T, before)
    if before._version != version:
        raise RuntimeError(
            f"a communicated tensor of shape {list(before.shape)} was changed in place after the first pass of a "
            "recomputed block, which needs it again: use y = y + x in place of y += x, or checkpoint without "
            "keep_communicated"
        )
    return cast(T, before.detach())


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
