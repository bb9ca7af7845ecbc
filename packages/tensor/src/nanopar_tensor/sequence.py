"""Sequence parallelism: between the divided layers every rank has some positions.

("Reducing Activation Recomputation in Large Transformer Models", Korthikanti et al. 2022, section 4.2.2.)

    x [B, S, D] --scatter--> [B, S/N, D]   norms, residuals: on this rank's positions
                                  |
                               gather      [B, S, D], the input of the column layers       backward: reduce_scatter
                               sum         reduce_scatter of the row layers' summands      backward: gather
                                  |
                             [B, S/N, D] --gather after the last norm, or in the head

All-gather and reduce-scatter together send what one all-reduce sends. A column layer keeps its part of the input and
gathers it again in backward, so that activations between two divided layers take 1/N of the memory everywhere. The
products are done for one rank's positions after the other, while those of others travel (``nanopar_core.in_parts``).

Positions are divided as evenly as possible, the first ranks having one more; nothing is padded.

Shapes: B batch, S positions, D hidden size, N ranks; the positions are dim -2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from nanopar_core import Axis, Pending, all_reduce
from nanopar_core.along import all_gather_along
from nanopar_core.autograd import all_gather_fwd_split_bwd, split_fwd_all_gather_bwd
from nanopar_core.grid import split_sizes
from nanopar_core.in_parts import gather_parts, sum_parts
from nanopar_core.recompute import once

Sizes = tuple[int, ...]


class Boundary(Protocol):
    """What happens to activations where a divided layer begins and ends.

    A layer works part by part: on the positions of one rank after the other, so that its products overlap with what
    travels. Without sequence parallelism there is one part, which every rank has.
    """

    axis: Axis

    def sizes_of_part(self, x: Tensor) -> Sizes:
        """Positions by part of the activations that ``x`` is this rank's part of."""

    def sizes_of_whole(self, x: Tensor) -> Sizes:
        """Positions by part of ``x``, which has all of them."""

    def gather(self, x: Tensor, sizes: Sizes, label: str) -> Pending[list[Tensor]]:
        """The parts of the input of a divided layer; this rank's own is there at once."""

    def sum(self, make: Callable[[int], Tensor], sizes: Sizes, label: str) -> Pending[Tensor]:
        """What this rank keeps of the sum of what the ranks make: ``make(number)`` for one part, a new tensor."""


class WholeSequence:
    """Tensor parallelism alone: every rank has all positions, and sums are all-reduced."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def sizes_of_part(self, x: Tensor) -> Sizes:
        """One part."""
        return (x.shape[-2],)

    def sizes_of_whole(self, x: Tensor) -> Sizes:
        """One part."""
        return self.sizes_of_part(x)

    def gather(self, x: Tensor, sizes: Sizes, label: str) -> Pending[list[Tensor]]:  # noqa: ARG002
        """``x`` itself."""
        return Pending([x])

    def sum(self, make: Callable[[int], Tensor], sizes: Sizes, label: str) -> Pending[Tensor]:  # noqa: ARG002
        """The sum, on all ranks."""
        summand = make(0)
        return all_reduce(summand, self.axis, out=summand, label=label, async_op=True)


class DividedSequence:
    """Sequence parallelism: every rank has some positions. Knows the length of the sequence that was scattered last.

    While ``is_whole`` every rank has all positions, as without sequence parallelism.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self.length, self.is_whole = axis, 0, False
        self._whole = WholeSequence(axis)
        self._parts: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()  # what ``enter`` gathered

    def __deepcopy__(self, _memo: object) -> DividedSequence:
        """A copy of a model may share it, as it shares the hooks: each scatters before it reads the length."""
        return self

    def sizes_of_whole(self, x: Tensor) -> Sizes:
        """As even as possible."""
        if self.is_whole:
            return self._whole.sizes_of_whole(x)
        return split_sizes(x.shape[-2], self.axis.size)

    def sizes_of_part(self, x: Tensor) -> Sizes:
        """Those of the sequence that was scattered last.

        Raises:
            ValueError: ``x`` does not have this rank's number of positions.
        """
        if self.is_whole:
            return self._whole.sizes_of_part(x)
        sizes = split_sizes(self.length, self.axis.size)
        if x.shape[-2] != sizes[self.axis.rank]:
            raise ValueError(
                f"rank {self.axis.rank} of axis {self.axis.name} has {sizes[self.axis.rank]} of the {self.length} "
                f"positions scattered last, but {x.shape[-2]} were given to a divided layer: under sequence "
                "parallelism positions cannot be selected before the head (logits_to_keep), nor sequences of several "
                "lengths be recomputed in one backward pass"
            )
        return sizes

    def gather(self, x: Tensor, sizes: Sizes, label: str) -> Pending[list[Tensor]]:
        """``[.., S/N, D]`` of every rank."""
        if self.is_whole:
            return self._whole.gather(x, sizes, label)
        return gather_parts(x, self.axis, sizes, label=label)

    def sum(self, make: Callable[[int], Tensor], sizes: Sizes, label: str) -> Pending[Tensor]:
        """``[.., S/N, D]``, summed."""
        if self.is_whole:
            return self._whole.sum(make, sizes, label)
        return sum_parts(make, self.axis, sizes, label=label)

    # ------------------------------------------------------------------------- the same with a gradient, as hooks

    def scatter(self, x: Tensor, label: str) -> Tensor:
        """This rank's positions of ``x``, the same on all ranks; the sequence that the layers below now work on.

        Raises:
            ValueError: fewer positions than ranks, or no such dim.
        """
        if self.is_whole:
            return x
        if x.dim() < 2 or x.shape[-2] < self.axis.size:
            raise ValueError(
                f"sequence parallelism needs [.., positions, width] with at least {self.axis.size} positions, one for "
                f"each rank of axis {self.axis.name}, not {list(x.shape)}"
            )
        self.length = x.shape[-2]
        return self.split(x, label)

    def collect(self, x: Tensor, label: str) -> Tensor:
        """All positions, of which all ranks make the same use."""
        if self.is_whole:
            return x
        return all_gather_fwd_split_bwd(x, self.axis, x.dim() - 2, sizes=self.sizes_of_part(x), label=label)

    def collect_once(self, x: Tensor, label: str) -> Tensor:
        """Likewise; a block that is recomputed keeps them, and does not gather them again."""
        if self.is_whole:
            return x
        return _CollectOnce.apply(x, self, label)  # type: ignore[no-any-return, no-untyped-call]

    def enter(self, x: Tensor, label: str) -> Tensor:
        """All positions, for a block that reads their number before its column layers project them."""
        whole = self.collect(x, label)
        if not whole.is_inference() and whole is not x:
            self._parts[whole] = x, whole._version
        return whole

    def part_of(self, whole: Tensor) -> Tensor | None:
        """What ``enter`` gathered ``whole`` from, to which its gradient may go directly; None if it was changed."""
        part, version = self._parts.get(whole, (None, -1))
        return part if version >= 0 and not whole.is_inference() and whole._version == version else None

    def split(self, x: Tensor, label: str) -> Tensor:
        """This rank's positions again, of what all ranks have."""
        if self.is_whole:
            return x
        return split_fwd_all_gather_bwd(x, self.axis, x.dim() - 2, label=label)


class _CollectOnce(torch.autograd.Function):
    """Forward: all positions. Backward: this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divided: DividedSequence, label: str) -> Tensor:
        ctx.rank, ctx.sizes = divided.axis.rank, divided.sizes_of_part(x)
        return once(lambda: all_gather_along(x, divided.axis, -2, ctx.sizes, label=label).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.split(ctx.sizes, -2)[ctx.rank], None, None


# ---------------------------------------------------------------------------------------------- at a module's border


def change_input(module: nn.Module, change: Callable[[Tensor, str], Tensor], label: str) -> None:
    """Have ``module`` called with ``change(x, label)`` in place of ``x``, its first tensor of floating point."""

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for place, value in enumerate(args):
            if _is_activation(value):
                return (*args[:place], change(value, label), *args[place + 1 :]), kwargs
        for name, value in kwargs.items():
            if _is_activation(value):
                return args, {**kwargs, name: change(value, label)}
        raise ValueError(f"{type(module).__name__} was called without activations, which are to be divided here")

    module.register_forward_pre_hook(before, with_kwargs=True)


def change_output(module: nn.Module, change: Callable[[Tensor, str], Tensor], label: str) -> None:
    """Have ``module`` return ``change(y, label)`` in place of ``y``, its output or the first of several."""

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0], label), *output[1:])
        return change(output, label)

    module.register_forward_hook(after)


def refuse_partial_outputs(model: nn.Module) -> None:
    """Have ``model`` refuse calls of a Hugging Face model that would give out some positions for all."""
    signature = inspect.signature(model.forward)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = named_arguments(signature, args, kwargs)
        kept = given.get("logits_to_keep")
        if isinstance(kept, Tensor) or kept:
            raise ValueError(
                f"logits_to_keep={kept}: under sequence parallelism positions cannot be selected before the head"
            )
        asked = given.get("output_hidden_states")
        if getattr(getattr(model, "config", None), "output_hidden_states", False) if asked is None else asked:
            raise ValueError("output_hidden_states: under sequence parallelism a rank has some positions of them only")

    model.register_forward_pre_hook(before, with_kwargs=True)


def named_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those that the signature takes as ``**kwargs`` included."""
    given = signature.bind_partial(*args, **kwargs).arguments
    return {**given, **given.get("kwargs", {})}


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
