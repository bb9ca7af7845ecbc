"""Gradients become global during backward: the hooks, and the order in which buckets are sent.

    a gradient arrives --> its bucket is complete --> all earlier buckets sent? --> all_reduce, asynchronously
    backward ends      --> send what is left, unused parameters as zeros ---------> wait for all, in order

Buckets go out in one fixed order on every rank, whatever the order in which gradients arrive and whichever parameters a
rank's data used: a bucket that never fills holds back those after it until the end of the pass, on this rank only. So
no rank waits for a collective that another one skips ("PyTorch Distributed", Li et al. 2020, section 3.2.3).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanopar_zero.buckets import Bucket, State
from nanopar_zero.torch_private import call_at_end_of_backward, current_backward, will_accumulate

NO_BACKWARD = -1


class OutputHook:
    """Forward hook of the whole model: lets the reducer know at once when a backward pass through its output begins.

    Holds the reducer weakly, as ``ParameterHooks`` does; in a copy of the model (deepcopy, pickle) it does nothing.
    """

    def __init__(self, reducer: Reducer | None = None) -> None:
        self._reducer = None if reducer is None else weakref.ref(reducer)

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Watch every tensor of the output from which a backward pass can start."""
        if self._reducer is not None:
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._backward_begins)

    def __reduce__(self) -> tuple[type[OutputHook], tuple[()]]:
        return OutputHook, ()

    def _backward_begins(self, _gradient: Tensor) -> None:
        if self._reducer is not None and (reducer := self._reducer()) is not None:
            reducer.begin_backward()


class ParameterHooks:
    """The two hooks of one parameter: before and after autograd writes its gradient.

    They hold the reducer weakly: torch keeps hooks where Python's garbage collector does not look, and a cycle through
    them would keep model and buffers in memory for ever.
    """

    def __init__(self, reducer: Reducer, bucket: int, index: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._bucket = bucket
        self._index = index

    def gradient_comes(self, _gradient: Tensor) -> None:
        """Nothing is added to ``p.grad`` yet."""
        if (reducer := self._reducer()) is not None:
            reducer.begin_backward()

    def gradient_arrived(self, _parameter: Tensor) -> None:
        """``p.grad`` has this pass' contribution."""
        if (reducer := self._reducer()) is not None:
            reducer.accept(self._bucket, self._index)


def is_watched(parameter: nn.Parameter) -> bool:
    """Whether a reducer has its hooks on this parameter."""
    hooks = (parameter._backward_hooks or {}).values()
    return any(isinstance(getattr(hook, "__self__", None), ParameterHooks) for hook in hooks)


class Reducer:
    """Watches the backward passes of one model and reduces its buckets, until it is closed or nobody holds it."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self._synchronizing = True
        self._backward = NO_BACKWARD
        self._nested = False
        self._sent = 0
        handles = [model.register_forward_hook(OutputHook(self))]
        for number, bucket in enumerate(self.buckets):
            for index, member in enumerate(bucket.members):
                hooks = ParameterHooks(self, number, index)
                handles.append(member.register_hook(hooks.gradient_comes))
                handles.append(member.register_post_accumulate_grad_hook(hooks.gradient_arrived))
        self._hooks = weakref.finalize(self, _remove, handles)
        self._hooks.atexit = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block backward passes accumulate gradients on this rank and send nothing."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def begin_backward(self) -> None:
        """The first gradient of a pass is on its way, to the model's output or to a parameter; nothing is added yet."""
        if self._backward != NO_BACKWARD or not self._hooks.alive:
            return
        if not any(will_accumulate(member) for bucket in self.buckets for member in bucket.members):
            return  # torch.autograd.grad, as for a penalty on the gradient: gives gradients away, adds none
        self._backward = current_backward()
        self._nested = False
        self._sent = 0
        for bucket in self.buckets:
            bucket.expect_gradients()
        call_at_end_of_backward(self._end_backward)

    def reduce_now(self) -> None:
        """Reduce what backward passes under ``no_sync`` have accumulated, or zeros where there was none."""
        for bucket in self.buckets:
            if bucket.state is State.REDUCED:
                bucket.collect()  # the caller may have replaced gradients after backward, on all ranks alike
        self._finish()

    def abandon(self) -> None:
        """Forget all gradients, also those of a backward pass that ended in an exception."""
        self._backward = NO_BACKWARD
        for bucket in self.buckets:
            bucket.abandon()

    def close(self) -> None:
        """Remove every hook."""
        self._hooks()
        for bucket in self.buckets:
            bucket.release()

    def accept(self, number: int, index: int) -> None:
        """A parameter has its gradient: the bucket that it completes can be sent."""
        self.buckets[number].accept(index)
        # Nested passes (reentrant checkpointing) may bring more for the same parameters: then send the rest at the end.
        self._nested |= current_backward() != self._backward
        if self._synchronizing and not self._nested:
            self._send_complete_buckets()

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


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


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
