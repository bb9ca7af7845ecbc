"""One flat bucket: its parameters, gradients and masters, and the life of its gradient within a backward pass.

    parameters  [ p0 | p1 | .. ]   the model's parameters are views of it
    masters     [ ............ ]   what the optimizer updates; the same storage unless a PrecisionPolicy says otherwise
    gradients   [ g0 | g1 | .. ]   p.grad are views of it

    COLLECTING --all gradients are there--> REDUCING --wait--> REDUCED --zero_grad, or the next backward--> COLLECTING

While a bucket is REDUCING the collective owns its gradients: ``p.grad`` is None, so that autograd cannot add to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from nanopar_core import Axis, Pending, all_reduce, broadcast
from nanopar_zero.layout import BucketLayout
from nanopar_zero.precision import PrecisionPolicy


class State(Enum):
    """Where the bucket's gradient is."""

    COLLECTING = auto()
    REDUCING = auto()
    REDUCED = auto()


@dataclass(frozen=True)
class Reduction:
    """How a bucket's gradient becomes global: sum over ``axes``, one after the other, then divide.

    Attributes:
        axes: the data axis first, then further axes on which gradients are partial sums.
        divisor: 1 for reduce="sum".
        shard_axes: axes over which the parameters themselves are divided; the norm adds up over these.
    """

    axes: tuple[Axis, ...]
    divisor: int
    shard_axes: tuple[Axis, ...]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first on all axes."""
        return all(axis.rank == 0 for axis in self.axes)


@dataclass(eq=False)
class Bucket:
    """The flat buffers of some parameters, and the views of value and gradient of each member."""

    layout: BucketLayout
    members: list[nn.Parameter]
    reduction: Reduction
    parameters: Tensor
    masters: Tensor
    gradients: Tensor
    weight_views: list[Tensor]
    gradient_views: list[Tensor]
    versions: list[int]
    state: State = State.COLLECTING
    waiting: set[int] = field(default_factory=set)
    pending: Pending[Tensor] | None = None

    @classmethod
    def build(
        cls,
        layout: BucketLayout,
        members: list[nn.Parameter],
        reduction: Reduction,
        policy: PrecisionPolicy | None,
    ) -> Bucket:
        """Move ``members`` into flat buffers: their data become views of ``parameters``."""
        first = members[0]
        master_dtype = first.dtype if policy is None else torch.promote_types(first.dtype, torch.float32)
        param_dtype = master_dtype if policy is None else policy.param_dtype
        reduce_dtype = master_dtype if policy is None or policy.reduce_dtype is None else policy.reduce_dtype
        masters = first.new_zeros(layout.length, dtype=master_dtype)
        for slot, member in zip(layout.slots, members, strict=True):
            place = masters[slot.start : slot.start + slot.numel].view(member.shape)
            member.data = place.copy_(member.detach())  # frees the old storage at once
        parameters = masters if param_dtype == masters.dtype else masters.to(param_dtype)
        gradients = torch.zeros(layout.length, dtype=reduce_dtype, device=masters.device)
        weight_views, gradient_views = [], []
        for slot, member in zip(layout.slots, members, strict=True):
            here = slice(slot.start, slot.start + slot.numel)
            weight_views.append(parameters[here].view(member.shape))
            gradient_views.append(gradients[here].view(member.shape))
            member.grad = None
            member.data = weight_views[-1]
            member.grad_dtype = reduce_dtype
        versions = [member._version for member in members]
        return cls(layout, members, reduction, parameters, masters, gradients, weight_views, gradient_views, versions)

    def synchronize_weights(self, axes: tuple[Axis, ...]) -> None:
        """Make all copies equal to that of the first rank of each axis."""
        for axis in axes:
            broadcast(self.masters, axis, label="initial weights")
        self.publish()

    def expect_gradients(self) -> None:
        """A backward pass begins: wait for every member, and let an earlier pass' sum count once, not once per rank."""
        self.waiting = set(range(len(self.members)))
        if (
            self.state is State.REDUCED
        ):  # all ranks hold the sum (or mean) of the earlier passes: let one of them keep it
            if self.reduction.leads:
                self.gradients.mul_(self.reduction.divisor)
            else:
                self.gradients.zero_()
        self.state = State.COLLECTING

    def accept(self, index: int) -> None:
        """Autograd has put a gradient into ``members[index].grad``: move it into the bucket unless it is there."""
        if self.state is State.REDUCING:
            raise RuntimeError(
                f"{self.layout.slots[index].item.name} received a gradient after its bucket was sent in the same pass; "
                "this happens with reentrant checkpointing: use torch.utils.checkpoint with use_reentrant=False"
            )
        member, view = self.members[index], self.gradient_views[index]
        if member.grad is None:
            view.zero_()
        elif member.grad is not view:
            gradient = member.grad.detach()  # with create_graph=True it has a history, which the bucket has not
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        member.grad = view
        self.waiting.discard(index)

    def collect(self) -> None:
        """Take in what is in ``p.grad`` now: zeros for None (not used), or a tensor that the caller put there."""
        for index, member in enumerate(self.members):
            if member.grad is not self.gradient_views[index]:
                self.accept(index)

    def start_reduction(self) -> None:
        """Sum over the first axis, asynchronously."""
        self.collect()
        for member in self.members:
            member.grad = None
        self.state = State.REDUCING
        first, *_ = self.reduction.axes
        self.pending = all_reduce(self.gradients, first, out=self.gradients, label="gradients", async_op=True)

    def finish_reduction(self) -> None:
        """Wait, sum over the remaining axes, divide, and give the parameters their gradients."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = None
        for axis in self.reduction.axes[1:]:
            all_reduce(self.gradients, axis, out=self.gradients, label="gradients")
        if self.reduction.divisor != 1:
            self.gradients.div_(self.reduction.divisor)
        for member, view in zip(self.members, self.gradient_views, strict=True):
            member.grad = view
        self.state = State.REDUCED

    def abandon(self) -> None:
        """Forget the gradient: ``p.grad`` is None until the next backward pass writes it anew."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        for member in self.members:
            member.grad = None
        self.state = State.COLLECTING
        self.waiting = set()

    def adopt_edits(self, everything: bool = False) -> None:
        """Take weights that were written into the model since the last step (a loaded checkpoint) into the masters."""
        for index, (slot, member, weight) in enumerate(
            zip(self.layout.slots, self.members, self.weight_views, strict=True)
        ):
            moved = member.data_ptr() != weight.data_ptr()
            if moved:  # somebody has set p.data
                if (member.shape, member.dtype, member.device) != (weight.shape, weight.dtype, weight.device):
                    raise RuntimeError(
                        f"{slot.item.name} became {member.dtype} {list(member.shape)} on {member.device} after it was "
                        f"given to shard as {weight.dtype} {list(weight.shape)} on {weight.device}: change it before"
                    )
                weight.copy_(member.detach())
                member.data = weight
            if self.parameters is self.masters:
                continue
            if moved or everything or member._version != self.versions[index]:
                self.masters[slot.start : slot.start + slot.numel].copy_(weight.view(-1))
                self.versions[index] = member._version

    def publish(self) -> None:
        """Write the masters into the parameters."""
        if self.parameters is not self.masters:
            self.parameters.copy_(self.masters)
        increment_version(self.members)  # so that autograd refuses a backward pass through the weights before the step
        self.versions = [member._version for member in self.members]

    def release(self) -> None:
        """Leave the parameters to themselves: they keep their place in the flat buffer, and drop their gradients."""
        self.abandon()
        for member in self.members:
            member.grad_dtype = member.dtype
