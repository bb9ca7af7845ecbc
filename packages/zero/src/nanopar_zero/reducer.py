"""Gradients become global during backward: the hooks, and the order in which buckets are sent.

    a gradient arrives --> its bucket is complete --> all earlier buckets sent? --> all_reduce, asynchronously
    backward ends      --> send what is left, unused parameters as zeros ---------> wait for all, in order

Buckets go out in one fixed order on every rank, whatever the order in which gradients arrive and whichever parameters a
rank's data used: a bucket that never fills holds back those after it until the end of the pass, on this rank only. So
no rank waits for a collective that another one skips ("PyTorch Distributed", Li et al. 2020, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanopar_zero.buckets import Bucket, State
from nanopar_zero.torch_private import call_at_end_of_backward, current_backward

NO_BACKWARD = -1


class OutputHook:
    """Forward hook of the whole model: lets the reducer know at once when a backward pass through its output begins."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Watch every tensor of the output from which a backward pass can start."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self.reducer.begin_backward)


class Reducer:
    """Watches the backward passes of one model and reduces its buckets."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self._synchronizing = True
        self._backward = NO_BACKWARD
        self._sent = 0
        self._handles: list[RemovableHandle] = [model.register_forward_hook(OutputHook(self))]
        for bucket in self.buckets:
            for index, member in enumerate(bucket.members):
                self._handles.append(member.register_hook(self.begin_backward))
                self._handles.append(member.register_post_accumulate_grad_hook(self._on_gradient(bucket, index)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block backward passes accumulate gradients on this rank and send nothing."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def begin_backward(self, _gradient: Tensor) -> None:
        """The first gradient of a pass is on its way, to the model's output or to a parameter; nothing is added yet."""
        if self._backward != NO_BACKWARD:
            return
        self._backward = current_backward()
        self._sent = 0
        for bucket in self.buckets:
            bucket.expect_gradients()
        call_at_end_of_backward(self._end_backward)

    def reduce_now(self) -> None:
        """Reduce what backward passes under ``no_sync`` have accumulated, or zeros where there was none."""
        if any(bucket.state is not State.REDUCED for bucket in self.buckets):
            self._finish()

    def abandon(self) -> None:
        """Forget all gradients, also those of a backward pass that ended in an exception."""
        self._backward = NO_BACKWARD
        for bucket in self.buckets:
            bucket.abandon()

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        def gradient_arrived(_parameter: Tensor) -> None:
            bucket.accept(index)
            # A nested pass (reentrant checkpointing) may bring more for the same parameters: then send at the end.
            if self._synchronizing and current_backward() == self._backward:
                self._send_complete_buckets()

        return gradient_arrived

    def _send_complete_buckets(self) -> None:
        while self._sent < len(self.buckets) and not self.buckets[self._sent].waiting:
            self.buckets[self._sent].start_reduction()
            self._sent += 1

    def _end_backward(self) -> None:
        self._backward = NO_BACKWARD
        if self._synchronizing:
            self._finish()

    def _finish(self) -> None:
        for bucket in self.buckets:
            if bucket.state is State.COLLECTING:
                bucket.start_reduction()
        for bucket in self.buckets:
            if bucket.state is State.REDUCING:
                bucket.finish_reduction()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a model's output: alone, or in tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
