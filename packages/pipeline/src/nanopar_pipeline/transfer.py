"""Messages between stages: activations to the next, gradients to the one before, each direction with its own channel.

    first micro-batch of a kind     header: number of tensors, their dtypes, shapes and whether they need a gradient
    every micro-batch               the tensors; a receive is posted as soon as the one before it was taken

A kind is what all ranks know of a micro-batch: the shapes and dtypes of the inputs that are cut, and the mode. So a
shape that is new (a last batch that is smaller, another sequence length) is announced, and nothing else is.

Receives are posted early and sends never waited for before their receiver must have them, so that no rank waits for
another in a way that the schedule does not show. Every channel is a communicator of two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanopar_core import Axis, Pending, send_recv
from nanopar_pipeline.passes import Message, messages
from nanopar_pipeline.schedules import Schedule

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8,
    torch.int16, torch.int8,
)  # fmt: skip
MOST_DIMS = 8
HEADER = 1 + 16 * (3 + MOST_DIMS)  # int64 numbers: for up to 16 tensors


class Description(NamedTuple):
    """Of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


Descriptions = tuple[Description, ...]


def channels(schedule: Schedule, axis: Axis, device: torch.device, *, backward: bool) -> dict[tuple[int, int], Axis]:
    """The channels of this rank by (sender, receiver); every rank of the world makes them together.

    A first message goes through each, in one order on all ranks: NCCL makes a communicator at its first use, and waits
    for the other side, for which a schedule leaves no room.
    """
    kind = "backward" if backward else "forward"
    found = {}
    for sender, receiver in sorted(messages(schedule, backward=backward)):
        channel = axis.subset([sender, receiver], f"{axis.name}_{kind}")
        if channel is not None:
            found[sender, receiver] = channel
            first = torch.zeros(1, device=device)
            sends, receives = ([(first, 1)], []) if channel.rank == 0 else ([], [(first, 0)])
            send_recv(sends, receives, channel, label="first message")
    return found


def describe(tensors: Sequence[Tensor]) -> Descriptions:
    """Of what is about to be sent."""
    return tuple(Description(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors)


def write_header(descriptions: Descriptions, device: torch.device) -> Tensor:
    """``[HEADER]``, int64."""
    if len(descriptions) > 16 or any(len(one.shape) > MOST_DIMS for one in descriptions):
        raise ValueError(f"a stage may give at most 16 tensors of at most {MOST_DIMS} dims, not {descriptions}")
    numbers = [len(descriptions)]
    for shape, dtype, needs_gradient in descriptions:
        if dtype not in DTYPES:
            raise ValueError(f"a stage gave a tensor of {dtype}; known are {', '.join(map(str, DTYPES))}")
        numbers += [DTYPES.index(dtype), int(needs_gradient), len(shape), *shape, *[0] * (MOST_DIMS - len(shape))]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64, device=device)


def read_header(header: Tensor) -> Descriptions:
    """The inverse."""
    numbers = header.tolist()
    found, width = [], 3 + MOST_DIMS
    for first in range(1, 1 + width * numbers[0], width):
        dtype, needs_gradient, dims, *shape = numbers[first : first + width]
        found.append(Description(tuple(shape[:dims]), DTYPES[dtype], bool(needs_gradient)))
    return tuple(found)


class Incoming:
    """The messages from one rank in one direction, in their order.

    Args:
        channel: of sender and receiver.
        order: of the messages.
        describe: the description of a message, or None while it is not known.
    """

    def __init__(
        self,
        channel: Axis,
        order: Sequence[Message],
        describe: Callable[[Message], Descriptions | None],
        device: torch.device,
        label: str,
    ) -> None:
        self.channel, self.order, self.describe, self.device, self.label = channel, list(order), describe, device, label
        self._taken = 0
        self._posted: Pending[list[Tensor]] | None = None
        self._post()

    def take(self, message: Message, learn: Callable[[Descriptions], None] | None = None) -> list[Tensor]:
        """Wait for the next message, which must be this one; ``learn`` its description where that comes first."""
        if self.order[self._taken] != message:
            raise RuntimeError(f"{message} was asked for, but {self.order[self._taken]} comes next")
        if self.describe(message) is None and learn is not None:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            self._receive([header]).wait()
            learn(read_header(header))
        if self._posted is None:
            self._post()
        assert self._posted is not None
        tensors, self._posted = self._posted.wait(), None
        self._taken += 1
        self._post()
        return tensors

    def _post(self) -> None:
        """Post the next message's receive, if its shape is known."""
        described = self.describe(self.order[self._taken]) if self._taken < len(self.order) else None
        if described is not None:
            buffers = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in described]
            self._posted = self._receive(buffers)

    def _receive(self, buffers: list[Tensor]) -> Pending[list[Tensor]]:
        return send_recv([], [(buffer, 0) for buffer in buffers], self.channel, label=self.label, async_op=True)


class Outgoing:
    """The messages to one rank in one direction."""

    def __init__(self, channel: Axis, device: torch.device, label: str) -> None:
        self.channel, self.device, self.label = channel, device, label
        self._sent: dict[Message, list[Pending[list[Tensor]]]] = {}

    def send(self, message: Message, tensors: Sequence[Tensor], header: Descriptions | None) -> None:
        """Begin to send; ``header`` where the receiver does not know the shapes."""
        self._sent[message] = []
        if header is not None:  # by itself, as it is received
            self._send(message, [write_header(header, self.device)])
        self._send(message, [tensor.detach().contiguous() for tensor in tensors])

    def _send(self, message: Message, tensors: list[Tensor]) -> None:
        sends = [(tensor, 1) for tensor in tensors]
        self._sent[message].append(send_recv(sends, [], self.channel, label=self.label, async_op=True))

    def arrived(self, message: Message) -> None:
        """The receiver must have it: let go of the tensors."""
        for pending in self._sent.pop(message, []):
            pending.wait()

    def release(self) -> None:
        """Let go of what has gone."""
        for message, sent in list(self._sent.items()):
            if all(work.is_completed() for pending in sent for work in pending.works):
                self.arrived(message)

    def finish(self) -> None:
        """Wait until all messages are on their way."""
        for message in list(self._sent):
            self.arrived(message)


def signature(values: object) -> Hashable:
    """What all ranks know of a micro-batch: shapes and dtypes, without contents."""
    if isinstance(values, Tensor):
        return tuple(values.shape), values.dtype
    if isinstance(values, dict):
        return tuple((key, signature(value)) for key, value in values.items())
    if isinstance(values, (list, tuple)):
        return tuple(map(signature, values))
    return (type(values), values if isinstance(values, (bool, int, str)) else None)
