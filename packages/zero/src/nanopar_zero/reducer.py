"""Gradients become global during backward: the hooks, and the order in which buckets are sent.

    a gradient arrives --> its bucket is complete --> all earlier buckets sent? --> reduce it, asynchronously
    backward ends      --> send what is left, unused parameters as zeros ---------> wait for all, in order

Buckets go out in one fixed order on every rank, whatever the order in which gradients arrive and whichever parameters a
rank's data used: a bucket that never fills holds back those after it until the end of the pass, on this rank only. So
no rank waits for a collective that another one skips ("PyTorch Distributed", Li et al. 2020, section 3.2.3).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanopar_zero.buckets import Bucket, State
from nanopar_zero.loss_scale import LossScaler
from nanopar_zero.torch_private import call_at_end_of_backward, current_backward, will_accumulate

if TYPE_CHECKING:
    from nanopar_zero.windows import Windows

NO_BACKWARD = -1
MAX_IN_FLIGHT = 2  # divided buckets: the next one waits for the first, so that few whole gradients exist at a time


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

    @property
    def windows(self) -> Windows | None:
        """Those of the model whose parameter this is, while somebody holds them."""
        reducer = self._reducer()
        return None if reducer is None or reducer.windows is None else reducer.windows()


def hooks_on(parameter: nn.Parameter) -> list[ParameterHooks]:
    """Those of reducers on this parameter."""
    owners = (getattr(hook, "__self__", None) for hook in (parameter._backward_hooks or {}).values())
    return [owner for owner in owners if isinstance(owner, ParameterHooks)]


class Reducer:
    """Watches the backward passes of one model and reduces its buckets, until it is closed or nobody holds it.

    Args:
        buckets: in the order in which they are reduced.
        keeps_local: stages 0 and 1, where ``no_sync`` lets gradients add up on this rank.
        by_units: stage 3, where ``send`` says when a bucket is complete; otherwise its gradients do.
        scaler: of fp16; knows what losses were multiplied by, which reduced gradients are divided by again.
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, keeps_local: bool, by_units: bool, scaler: LossScaler | None = None
    ) -> None:
        self.buckets = list(buckets)
        self.scaler = scaler
        self.windows: weakref.ref[Windows] | None = None  # once there are any
        self._always_local = self._keeps_local = keeps_local
        self._by_units = by_units
        self._synchronizing = True
        self._backward = NO_BACKWARD
        self._nested = False
        self._sent = 0
        self._in_flight: deque[Bucket] = deque()
        handles = []
        for number, bucket in enumerate(self.buckets):
            for index, member in enumerate(bucket.members):
                hooks = ParameterHooks(self, number, index)
                handles.append(member.register_hook(hooks.gradient_comes))
                handles.append(member.register_post_accumulate_grad_hook(hooks.gradient_arrived))
        self._hooks = weakref.finalize(self, _remove, handles)
        self._hooks.atexit = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block backward passes accumulate gradients on this rank and send nothing (stages 0 and 1)."""
        before, self._synchronizing = self._synchronizing, not self._keeps_local
        try:
            yield
        finally:
            self._synchronizing = before

    def keep_local(self, on: bool = True) -> None:
        """Let gradients add up on this rank under ``no_sync``, or not any more; in stages 0 and 1 they always do."""
        if self._always_local or on == self._keeps_local:
            return
        self._keeps_local = on
        for bucket in self.buckets:
            bucket.accumulate_locally(on)

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

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Stage 3: no more gradients will come for these buckets."""
        if self._backward != NO_BACKWARD and self._synchronizing:
            for bucket in buckets:
                if bucket.state is State.COLLECTING:
                    self._start(bucket)

    def reduce_now(self) -> None:
        """Reduce what backward passes under ``no_sync`` have accumulated, or zeros where there was none."""
        for bucket in self.buckets:
            bucket.refresh_reduced()
        self._finish()

    def abandon(self) -> bool:
        """Forget all gradients, also those of a pass that ended in an exception; says whether there was such a pass."""
        was_running, self._backward = self._backward != NO_BACKWARD, NO_BACKWARD
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.forget_gradients()
        return was_running

    def close(self) -> None:
        """Remove every hook."""
        self._hooks()

    def accept(self, number: int, index: int) -> None:
        """A parameter has its gradient: the bucket that it completes can be sent."""
        self.buckets[number].accept(index)
        # Nested passes (reentrant checkpointing) may bring more for the same parameters: then send the rest at the end.
        self._nested |= current_backward() != self._backward
        if self._synchronizing and not self._nested and not self._by_units:
            while self._sent < len(self.buckets) and not self.buckets[self._sent].waiting:
                self._start(self.buckets[self._sent])
                self._sent += 1

    def _end_backward(self) -> None:
        self._backward = NO_BACKWARD
        if self._synchronizing:
            self._finish()

    def _start(self, bucket: Bucket) -> None:
        if bucket.reduction.divided and len(self._in_flight) >= MAX_IN_FLIGHT:
            self._finish_first()  # before the next one takes memory; meanwhile the others are on their way
        bucket.start_reduction()
        self._in_flight.append(bucket)

    def _finish(self) -> None:
        for bucket in self.buckets:
            if bucket.state in (State.EMPTY, State.COLLECTING):
                self._start(bucket)
        while self._in_flight:
            self._finish_first()

    def _finish_first(self) -> None:
        self._in_flight.popleft().finish_reduction(1.0 if self.scaler is None else self.scaler.scale)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
