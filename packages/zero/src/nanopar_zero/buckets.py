"""One flat bucket: the parameters, gradients and masters of some parameters, and what becomes of them.

    parameters  [ p0 | p1 | ..... ]   compute dtype; the model's parameters are views of it
    masters     [ rank 0 | rank 1 ]   this rank's part (stage 0: all): what the optimizer updates
    gradient    [ g0 | g1 | ..... ]   of this rank, exists from when all p.grad are there until it is reduced
    reduced     [ rank 0 | rank 1 ]   this rank's part (stage 0: all) of the global gradient

The masters are the same storage as the parameters where both have one dtype and the parameters stay whole. The life of
the gradient:

    EMPTY --first backward--> COLLECTING --all gradients are there--> REDUCING --wait--> REDUCED --zero_grad--> EMPTY
                                   ^                                                        |
                                   '--------- the next backward, which adds to it ----------'

While a bucket is REDUCING the collective owns its gradient: ``p.grad`` is None, so that autograd cannot add to it.

Stage 3 frees the parameters outside of their windows. Their storage is then empty, and the model's parameters are NaN
of the right shape, which take no memory. When they are gathered again the same storage is filled, so that views which
autograd has saved for backward are valid again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from nanopar_core import Axis, Pending, all_gather, all_reduce, broadcast, reduce_scatter
from nanopar_zero.layout import BucketLayout
from nanopar_zero.precision import PrecisionPolicy
from nanopar_zero.torch_private import divide_each


class State(Enum):
    """Where the bucket's gradient is."""

    EMPTY = auto()
    COLLECTING = auto()
    REDUCING = auto()
    REDUCED = auto()


@dataclass(frozen=True)
class Reduction:
    """How a bucket's gradient becomes global: divided, then summed over ``data_axis``, then over ``more_axes``.

    Attributes:
        data_axis: the axis over whose ranks gradients are summed and, in stages 1 to 3, the bucket is divided.
        divided: each rank of ``data_axis`` keeps its part only.
        more_axes: further axes on which gradients are partial sums.
        divisor: 1 for reduce="sum".
        shard_axes: axes over which the parameters themselves are divided; the norm adds up over these.
    """

    data_axis: Axis
    divided: bool
    more_axes: tuple[Axis, ...]
    divisor: int
    shard_axes: tuple[Axis, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes over which gradients are summed."""
        return (self.data_axis, *self.more_axes)

    @property
    def communicates(self) -> bool:
        """Whether anything is ever sent."""
        return any(axis.communicates for axis in self.axes)

    @property
    def parts(self) -> int:
        """Number of ranks that hold different parts of the bucket."""
        return self.data_axis.size if self.divided else 1

    @property
    def norm_axes(self) -> tuple[Axis, ...]:
        """Axes over whose ranks the reduced gradients are different parts of the whole."""
        return (*self.shard_axes, self.data_axis) if self.divided else self.shard_axes

    @property
    def leads(self) -> bool:
        """Whether this rank is the first on all axes."""
        return all(axis.rank == 0 for axis in self.axes)


@dataclass(eq=False)
class Bucket:
    """The flat buffers of some parameters; trained ones, or (in stage 3) frozen ones, which have no gradients."""

    layout: BucketLayout
    members: list[nn.Parameter]
    reduction: Reduction
    frees_parameters: bool
    parameters: Tensor
    masters: Tensor
    weight_views: list[Tensor]
    placeholders: list[Tensor]
    reduce_dtype: torch.dtype
    versions: list[int]
    is_whole: bool = True  # the parameters are there, or on their way
    arriving: Pending[Tensor] | None = None
    state: State = State.EMPTY
    waiting: set[int] = field(default_factory=set)
    gradient: Tensor | None = None
    reduced: Tensor | None = None
    pending: Pending[Tensor] | None = None

    @classmethod
    def build(
        cls,
        layout: BucketLayout,
        members: list[nn.Parameter],
        reduction: Reduction,
        policy: PrecisionPolicy | None,
        *,
        frees_parameters: bool,
        keeps_local: bool,
        equal_axes: tuple[Axis, ...],
    ) -> Bucket:
        """Move ``members`` into flat buffers, with the values that the first rank of each of ``equal_axes`` has.

        Where passes may add up on this rank (``keeps_local``) ``p.grad`` is of ``reduce_dtype``. Otherwise it only
        waits for its bucket to be complete, and autograd need not widen it before it is copied there.
        """
        first = members[0]
        trained = first.requires_grad
        param_dtype, master_dtype, reduce_dtype = (
            (first.dtype, first.dtype, first.dtype) if policy is None else policy.dtypes(first.dtype)
        )
        if not trained:
            master_dtype = param_dtype
        whole = first.new_zeros(layout.length, dtype=master_dtype)
        for slot, member in zip(layout.slots, members, strict=True):
            place = whole[slot.start : slot.start + slot.numel].view(member.shape)
            member.data = place.copy_(member.detach())  # frees the old storage at once
        for axis in equal_axes:
            broadcast(whole, axis, label="initial weights")
        own = whole.chunk(reduction.parts)[reduction.data_axis.rank if reduction.divided else 0]
        if param_dtype == master_dtype:
            parameters, masters = whole, own.clone() if frees_parameters else own
        else:
            parameters, masters = whole.to(param_dtype), own.clone() if reduction.parts > 1 else own
        views, placeholders = [], []
        for slot, member in zip(layout.slots, members, strict=True):
            views.append(parameters[slot.start : slot.start + slot.numel].view(slot.item.shape))
            placeholders.append(parameters.new_full((), float("nan")).expand(slot.item.shape))
            member.grad = None
            member.data = views[-1]
            member.grad_dtype = reduce_dtype if keeps_local else param_dtype
        versions = [member._version for member in members]
        bucket = cls(
            layout,
            members,
            reduction,
            frees_parameters,
            parameters,
            masters,
            views,
            placeholders,
            reduce_dtype,
            versions,
        )
        if frees_parameters:
            bucket.free()
        return bucket

    # ------------------------------------------------------------------------------------------- this rank's part

    @property
    def own(self) -> slice:
        """This rank's part of the flat buffers: all of them in stage 0."""
        start = self.masters.numel() * (self.reduction.data_axis.rank if self.reduction.divided else 0)
        return slice(start, start + self.masters.numel())

    @property
    def masters_are_parameters(self) -> bool:
        """Whether the optimizer updates the parameters themselves, or its part of them."""
        return not self.frees_parameters and self.masters.dtype == self.parameters.dtype

    # -------------------------------------------------------------------------------------------------- gradients

    def accumulate_locally(self, on: bool) -> None:
        """Whether ``p.grad`` is of ``reduce_dtype``, so that passes can add up in it."""
        for member in self.members:
            if member.grad is None:
                member.grad_dtype = self.reduce_dtype if on else self.parameters.dtype

    def expect_gradients(self) -> None:
        """A backward pass begins: wait for every member. What earlier passes have reduced stays where it is."""
        self.waiting = set(range(len(self.members)))
        if self.state is State.REDUCED:
            self._adopt_reduced()
            for member in self.members:
                member.grad = None
        self.state = State.COLLECTING

    def accept(self, index: int) -> None:
        """Autograd has put a gradient into ``members[index].grad``."""
        if self.state is State.REDUCING or self.state is State.REDUCED:
            raise RuntimeError(
                f"{self.layout.slots[index].item.name} received a gradient after its bucket was sent in the same pass; "
                "this happens with reentrant checkpointing: use torch.utils.checkpoint with use_reentrant=False"
            )
        self.waiting.discard(index)

    def _collect(self) -> Tensor:
        """Move what is in ``p.grad``, divided, into a flat gradient: zeros for None (not used)."""
        if (only := self._only_gradient()) is not None:
            return only.div_(self.reduction.divisor) if self.reduction.divisor != 1 else only
        flat = torch.empty(self.layout.length, dtype=self.reduce_dtype, device=self.masters.device)
        for gap in self.layout.gaps:
            flat[gap].zero_()
        arrived, places = [], []
        for member, view in zip(self.members, self._views_of(flat), strict=True):
            if member.grad is None:
                view.zero_()
            else:
                gradient = member.grad.detach()  # with create_graph=True it has a history, which the bucket has not
                arrived.append(gradient.to_dense() if gradient.is_sparse else gradient)
                places.append(view)
                member.grad = None
        if arrived:
            divide_each(places, arrived, self.reduction.divisor)
        return flat

    def _only_gradient(self) -> Tensor | None:
        """The gradient of a bucket's only member where it can be the flat gradient itself, as of a large embedding."""
        [first, *others] = self.members
        gradient = first.grad
        if others or gradient is None or gradient.is_sparse or gradient.requires_grad:
            return None
        if gradient.dtype != self.reduce_dtype or not gradient.is_contiguous():
            return None
        if gradient.numel() != self.layout.length:
            return None
        first.grad = None
        return gradient.view(-1)

    def start_reduction(self) -> None:
        """Sum over the data axis, asynchronously."""
        self.gradient = self._collect()
        self.state = State.REDUCING
        self.waiting = set()
        axis = self.reduction.data_axis
        if self.reduction.divided:
            # What is only added to earlier passes' sum needs no memory of its own.
            place = None if self.reduced is None else self.gradient[self.own]
            self.pending = reduce_scatter(self.gradient, axis, out=place, label="gradients", async_op=True)
        else:
            self.pending = all_reduce(self.gradient, axis, out=self.gradient, label="gradients", async_op=True)

    def finish_reduction(self, loss_scale: float) -> None:
        """Wait, sum over the remaining axes, and add to what earlier passes have left."""
        assert self.pending is not None
        part = self.pending.wait()
        self.pending = self.gradient = None
        for axis in self.reduction.more_axes:
            all_reduce(part, axis, out=part, label="gradients")
        if loss_scale != 1:
            part.div_(loss_scale)
        self.reduced = part if self.reduced is None else self.reduced.add_(part)
        self.state = State.REDUCED
        if not self.reduction.divided:
            for member, view in zip(self.members, self._views_of(self.reduced), strict=True):
                member.grad = view

    def refresh_reduced(self) -> None:
        """Take in gradients that the caller put in the place of the reduced ones after backward, on all ranks alike."""
        if self.state is State.REDUCED:
            self._adopt_reduced()

    def forget_gradients(self) -> None:
        """``p.grad`` is None until the next backward pass writes it anew."""
        if self.pending is not None:
            self.pending.wait()
        for member in self.members:
            member.grad = None
        self.pending = self.gradient = self.reduced = None
        self.state = State.EMPTY
        self.waiting = set()

    def _adopt_reduced(self) -> None:
        """Stage 0 shows the reduced gradient in ``p.grad``, where the caller may replace it."""
        if self.reduction.divided or self.reduced is None:
            return
        for member, view in zip(self.members, self._views_of(self.reduced), strict=True):
            if member.grad is None:
                view.zero_()
            elif member.grad.data_ptr() != view.data_ptr():
                view.copy_(member.grad)

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.start : slot.start + slot.numel].view(slot.item.shape) for slot in self.layout.slots]

    # ------------------------------------------------------------------------------------------------- parameters

    def start_gather(self) -> None:
        """Make the parameters whole again from the parts of all ranks, asynchronously, unless they are already."""
        if self.is_whole:
            return
        self.is_whole = True
        if self.frees_parameters:
            self.parameters.untyped_storage().resize_(self.parameters.numel() * self.parameters.element_size())
        own = self.parameters[self.own]
        if not self.masters_are_parameters:
            own.copy_(self.masters)
        if self.reduction.parts > 1 or self.reduction.data_axis.communicates:
            sizes = [own.numel()] * self.reduction.parts
            self.arriving = all_gather(
                own, self.reduction.data_axis, sizes=sizes, out=self.parameters, label="parameters", async_op=True
            )
        else:
            self._show_parameters()

    def wait_for_parameters(self) -> None:
        """The parameters have arrived when this returns (on CUDA: for what the current stream does from now on)."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None
            self._show_parameters()

    def _show_parameters(self) -> None:
        """Stage 3: the model reads the whole parameters in place of NaN, not before they have arrived."""
        if self.frees_parameters:
            for member, view in zip(self.members, self.weight_views, strict=True):
                member.data = view

    def free(self) -> None:
        """Stage 3: give the whole parameters' memory back; until they are gathered they read as NaN."""
        self.wait_for_parameters()
        self.is_whole = False
        for member, placeholder in zip(self.members, self.placeholders, strict=True):
            member.data = placeholder
        self.parameters.untyped_storage().resize_(0)

    def publish(self) -> None:
        """The masters have changed: the whole parameters are stale. Stages 1 and 2 start to gather them anew."""
        increment_version(self.members)  # so that autograd refuses a backward pass through the weights before the step
        if self.frees_parameters:
            if self.is_whole:
                self.free()
        elif self.reduction.divided:
            self.is_whole = False
            self.start_gather()
        elif not self.masters_are_parameters:
            self.parameters.copy_(self.masters)
        self.versions = [member._version for member in self.members]

    def adopt_edits(self, everything: bool = False) -> None:
        """Take weights that were written into the model since the last step (a loaded checkpoint) into the masters."""
        if not self.is_whole:
            return
        self.wait_for_parameters()
        for index, member in enumerate(self.members):
            moved = self.put_back(index)
            if moved or everything or member._version != self.versions[index]:
                self.take_in(index)

    def put_back(self, index: int) -> bool:
        """Copy a weight that somebody put elsewhere (``p.data = ...``) to its place; says whether it was."""
        member, weight = self.members[index], self.weight_views[index]
        if member.data_ptr() == weight.data_ptr():
            return False
        if (member.shape, member.dtype, member.device) != (weight.shape, weight.dtype, weight.device):
            raise RuntimeError(
                f"{self.layout.slots[index].item.name} became {member.dtype} {list(member.shape)} on {member.device} "
                f"after it was given to shard as {weight.dtype} {list(weight.shape)} on {weight.device}: "
                "change it before"
            )
        weight.copy_(member.detach())
        member.data = weight
        return True

    def take_in(self, index: int) -> None:
        """A whole weight was written: take this rank's part of it into the masters."""
        if self.masters_are_parameters:
            return
        slot, own = self.layout.slots[index], self.own
        start, stop = max(slot.start, own.start), min(slot.start + slot.numel, own.stop)
        if start < stop:
            self.masters[start - own.start : stop - own.start].copy_(self.parameters[start:stop])
        self.versions[index] = self.members[index]._version

    def release(self) -> None:
        """Leave the parameters to themselves: whole, in their place in the flat buffer, without gradients."""
        self.forget_gradients()
        self.start_gather()
        self.wait_for_parameters()
        for member in self.members:
            member.grad_dtype = member.dtype
