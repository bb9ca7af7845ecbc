"""Context parallelism: every rank has some positions through the whole model; only attention communicates.

    positions   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     2 N chunks (N = 4): rank r has chunks r and 2N - 1 - r, so that
    rank          0   1   2   3   3   2   1   0       under a causal mask all ranks have the same work ("zigzag")

    input_ids [B, S] --split_sequence--> [B, S/N] --model--> logits of these positions --loss--> this rank's share

    method       what is sent in a layer's forward pass                              where
    all_gather   keys and values, to all ranks                                       context_gather.py
    ulysses      heads for positions: q, k, v there and the output back, 2 calls     ulysses.py
    ring         keys and values, N - 1 times to the next rank, during attention     ring.py

A sequence that 2 N chunks do not divide is padded at its end, where a causal mask hides the padding from every other
position; give the padding label -100, and attention_mask 0 in a mixture of experts. Parameters are used by every rank
on its own positions: to zero these ranks are data-parallel ones, ``mesh.flatten("dp", "cp")``.

Shapes: B batch, H query heads, G key and value heads, S positions of the whole padded sequence, C head dim, N ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanopar_core import Axis, all_gather
from nanopar_core.along import all_gather_along
from nanopar_tensor import context_gather, ring, ulysses
from nanopar_tensor.autocast import cast_for_autocast
from nanopar_tensor.sequence import named_arguments
from nanopar_tensor.zigzag import in_order, my_positions, padded_length

Method = Callable[[Tensor, Tensor, Tensor, Axis, "ContextMask | None", "float | None", str], Tensor]
METHODS: dict[str, Method] = {
    "all_gather": context_gather.attention,
    "ulysses": ulysses.attention,
    "ring": ring.attention,
}


def split_sequence(x: Tensor, axis: Axis, *, dim: int = 1, padding: float = 0) -> Tensor:
    """This rank's positions of ``x``, the same on all ranks, in its chunks' order; a copy.

    Args:
        x: tokens, labels (shifted already: the next token of a chunk's last position lies in another chunk), masks.
        axis: of the context-parallel ranks.
        dim: that of the positions.
        padding: what the end of a sequence is filled with that 2 N chunks do not divide; -100 for labels.
    """
    missing = padded_length(x.shape[dim], axis.size) - x.shape[dim]
    if missing:
        x = F.pad(x.movedim(dim, -1), (0, missing), value=padding).movedim(-1, dim)
    return x.index_select(dim, my_positions(x.shape[dim], axis).to(x.device))


def merge_sequence(part: Tensor, axis: Axis, length: int, *, dim: int = 1) -> Tensor:
    """All ``length`` positions in order, on every rank, of what ``split_sequence`` has split; without gradient."""
    whole = all_gather_along(part.detach(), axis, dim, [part.shape[dim]] * axis.size, label="context").wait()
    return in_order(whole, axis.size, dim).narrow(dim, 0, length)


def split_positions(length: int, axis: Axis, *, device: torch.device | str | None = None) -> Tensor:
    """The positions ``[S/N]`` of ``length``, padding included, that this rank has: its ``position_ids``."""
    return my_positions(padded_length(length, axis.size), axis).to(device)


class ContextMask(NamedTuple):
    """What attention must know besides the order of positions.

    ``documents``: ``[B, S]`` in order, on the device: a position sees its own document only; None for one document.
    ``window``: a position sees this many, itself included; None for all before it.
    """

    documents: Tensor | None
    window: int | None

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool ``[B or 1, 1, queries, keys]``: who sees whom, by positions in the sequence."""
        distance = queries[:, None] - keys
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        if self.documents is None:
            return seen[None, None]
        same = self.documents[:, queries, None] == self.documents[:, None, keys]
        return (seen & same)[:, None]


class ContextAttention(nn.Module):
    """Causal attention over sequences that are divided among the ranks of ``axis``; takes the place of a core.

    Args:
        axis: of the context-parallel ranks.
        method: "all_gather", "ulysses" or "ring".
        core: what it takes the place of.

    Attributes:
        is_whole: while True, ``core`` attends to whole sequences, which this rank has for itself.

    Raises:
        ValueError: an unknown method.
    """

    def __init__(
        self, axis: Axis, method: str = "all_gather", label: str = "attention", core: nn.Module | None = None
    ) -> None:
        super().__init__()
        if method not in METHODS:
            raise ValueError(f"context method {method!r}: there are {', '.join(METHODS)}")
        self.axis, self.method, self.label = axis, method, label
        self.is_whole, self._core = False, (core,)  # in a tuple: no sub-module, whose names would be new

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask | None = None, scale: float | None = None
    ) -> Tensor:
        """``q`` ``[B, H, S/N, C]``, ``k``, ``v`` ``[B, G, S/N, C]`` -> ``[B, H, S/N, C]``; scale: 1/sqrt(C) by default.

        Raises:
            ValueError: not the same even number of queries and keys, as with cached keys, or heads that "ulysses"
                cannot divide.
        """
        if self.is_whole:
            [core] = self._core
            assert core is not None
            whole: Tensor = core(q, k, v, mask)
            return whole
        if q.shape[2] != k.shape[2] or q.shape[2] % 2:
            raise ValueError(
                f"context parallelism needs the same even number of queries and keys on a rank (split_sequence sees to "
                f"that), not {q.shape[2]} and {k.shape[2]}; cached keys cannot be used"
            )
        q, k, v = (cast_for_autocast(q)(x) for x in (q, k, v))  # what is sent, too
        return METHODS[self.method](q, k, v, self.axis, mask, scale, self.label)

    @property
    def make_mask(self) -> Callable[..., Any]:
        """What makes the ``mask`` that the layers' cores are given; none (``AttributeError``) if ``core`` has none."""
        return self._core[0].make_mask if self.is_whole else self._make_mask  # type: ignore[union-attr, return-value]

    def _make_mask(
        self, documents: Tensor | None, length: int, past: int, window: int | None, device: torch.device
    ) -> ContextMask | None:
        """This rank's documents, put together with those of the others.

        Args:
            documents: ``[B, S/N]``: 0 for padding, equal numbers for one document; None, on all ranks or on none (they
                gather it here), for neither.
        """
        if past:
            raise ValueError(
                "context parallelism cannot use cached keys: generate under nanopar_tensor.whole_sequences"
            )
        if window is not None and window >= length * self.axis.size:
            window = None
        whole = None if documents is None else self.gather_documents(documents.to(device))
        return None if whole is None and window is None else ContextMask(whole, window)

    def gather_documents(self, documents: Tensor) -> Tensor | None:
        """``[B, S]`` in order, of ``[B, S/N]``; None where causal attention sees no other document anyway."""
        part = documents.T.contiguous()
        whole = all_gather(part, self.axis, sizes=[part.shape[0]] * self.axis.size, label="documents").T
        whole = in_order(whole, self.axis.size, 1)
        is_late = (whole <= 1).all() & (whole[:, 1:] <= whole[:, :-1]).all()  # padding, which no real position sees
        return None if is_late else whole  # on CUDA a host sync, once a forward pass where a mask is given

    def extra_repr(self) -> str:
        """The method and the number of ranks."""
        return f"{self.method}, {self.axis.size} ranks"


def give_positions(model: nn.Module, axis: Axis) -> None:
    """Have ``model`` called with this rank's positions where none are given, and refuse labels that it would shift."""
    signature = inspect.signature(model.forward)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if any(isinstance(core, ContextAttention) and core.is_whole for core in module.modules()):
            return args, kwargs
        more = named_arguments(signature, args, kwargs)
        if more.get("labels") is not None and more.get("shift_labels") is None:
            raise ValueError(
                "labels: the model would shift them within this rank's chunks; shift them before split_sequence, and "
                "compute the loss from the logits (or pass shift_labels to a Hugging Face model)"
            )
        ids = next((more[name] for name in ("input_ids", "inputs_embeds") if more.get(name) is not None), None)
        if "position_ids" in signature.parameters and more.get("position_ids") is None and ids is not None:
            kwargs = {**kwargs, "position_ids": my_positions(ids.shape[1] * axis.size, axis).to(ids.device)[None]}
        return args, kwargs

    model.register_forward_pre_hook(before, with_kwargs=True)
