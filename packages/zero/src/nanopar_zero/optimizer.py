"""``ZeroOptimizer``: what ``shard`` returns. A ``torch.optim.Optimizer`` around the user's own, working on flat shards.

step():  gradients reduced? finite (fp16)? --> user's optimizer on this rank's masters, flat, per bucket and group
         --> stage 0: write the parameters; 1, 2: start to gather them; 3: they are gathered when they are needed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanopar_core import Axis, ParamSpec, global_norm
from nanopar_zero.buckets import Bucket
from nanopar_zero.layout import Run
from nanopar_zero.reducer import Reducer
from nanopar_zero.rounding import Rounding
from nanopar_zero.windows import Windows


class FlatShard(NamedTuple):
    """What the user's optimizer sees in place of parameters: what of one bucket's masters is of one group."""

    bucket: Bucket
    run: Run
    flat: nn.Parameter

    @property
    def gradient(self) -> Tensor:
        """The reduced gradient of the same elements."""
        assert self.bucket.reduced is not None
        return self.bucket.reduced[self._place]

    @property
    def masters(self) -> Tensor:
        """The same elements of the bucket's masters: the storage of ``flat``, except under stochastic rounding."""
        return self.bucket.masters[self._place]

    @property
    def _place(self) -> slice:
        start = self.bucket.own.start
        return slice(self.run.start - start, self.run.stop - start)


class ZeroOptimizer(torch.optim.Optimizer):
    """Data-parallel training of one model; made by ``nanopar_zero.shard``, used like any ``torch.optim.Optimizer``.

    ``param_groups`` and ``state`` are those of the optimizer that ``make_optimizer`` built, so learning-rate schedulers
    and changes of ``group["lr"]`` act on it. Every rank calls ``step``, ``clip_grad_norm_`` and ``zero_grad`` alike.
    """

    def __init__(
        self,
        reducer: Reducer,
        windows: Windows,
        inner: torch.optim.Optimizer,
        shards: Sequence[FlatShard],
        specs: Mapping[str, ParamSpec],
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.reducer = reducer
        self.windows = windows
        self.inner = inner
        self.shards = list(shards)
        self.specs = dict(specs)  # by first names
        self.stages = next((spec.stages for spec in self.specs.values() if spec.stages is not None), None)
        self.skipped = False  # by the last step, on all ranks alike: its gradients were not finite (fp16)
        self._scaler = reducer.scaler
        self._rounding = rounding
        self._share_state()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights on every rank; gradients that are still local (``no_sync``) are reduced first.

        With a loss scale (fp16) the host waits here to see whether the gradients are finite. Where they are not, the
        step is skipped on all ranks: ``skipped`` is True, the loss scale falls, nothing else moves. Schedulers step by
        themselves: ``if not optimizer.skipped: scheduler.step()``. With other policies nothing is skipped and nothing
        waits.

        Args:
            closure: optional; recomputes the loss under ``torch.enable_grad`` and is called once.

        Raises:
            RuntimeError: a loss scale, but ``scale`` was never called.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reducer.reduce_now()
        with torch.no_grad():
            self.skipped = self._overflows()
            if not self.skipped:
                self._update()
        return loss

    def _overflows(self) -> bool:
        """Whether gradients are not finite, known from their norm, which all ranks share; moves the loss scale."""
        if self._scaler is None:
            return False
        overflows = not math.isfinite(self._norm().item())
        self._scaler.update(overflows)
        return overflows

    def _update(self) -> None:
        self.windows.wait()
        self._adopt_edits()
        for shard in self.shards:
            if self._rounding is not None:
                self._rounding.widen(shard.flat, shard.masters)
            shard.flat.grad = shard.gradient.to(shard.flat.dtype)
        self.inner.step()
        for shard in self.shards:
            shard.flat.grad = None  # of another dtype than the bucket's it would take memory until the next step
            if self._rounding is not None:
                self._rounding.narrow(shard.flat, shard.masters, shard.bucket, shard.run.start)
        if self._rounding is not None:
            self._rounding.updates += 1
        for bucket in reversed(self.reducer.buckets):  # in the order of forward
            bucket.publish()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on: times ``loss_scale``, in fp32 at least; without a loss scale as it is.

        Gradients are divided by the scale again when they are reduced. Compute the loss in fp32: in fp16 its own
        gradient overflows at a scale of 65536.
        """
        if self._scaler is None:
            return loss
        return self._scaler.scaled(loss)

    @property
    def loss_scale(self) -> float:
        """What ``scale`` multiplies by, equal on all ranks; 1 without a loss scale."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - torch's signature; the result is the same
        """Start anew: gradients are None until the next backward pass; a pass that failed is forgotten."""
        if self.reducer.abandon() or self.windows.forward_runs:
            self.windows.reset()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients by one factor so that their global norm is at most ``max_norm``.

        In stages 1 to 3 ``p.grad`` is None after backward: torch's own ``clip_grad_norm_`` would silently do nothing.
        Gradients with a norm that is not finite are left as they are: skip that step.

        Returns:
            the global norm before clipping, a 0-dim tensor equal on all ranks; no host sync.
        """
        self.reducer.reduce_now()
        norm = self._norm()
        # A norm that is not finite must not reach the buckets: it would turn their padding into NaN for good.
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for bucket in self.reducer.buckets:
            if bucket.reduced is not None:
                bucket.reduced.mul_(factor.to(bucket.reduced.dtype))
        return norm

    def _norm(self) -> Tensor:
        pieces = []
        for bucket in self.reducer.buckets:
            if bucket.reduced is not None:
                counts = self._is_counted_here(bucket)
                pieces.append((bucket.reduced if counts else bucket.reduced[:0], bucket.reduction.norm_axes))
        return global_norm(pieces, stages=self.stages)

    def _is_counted_here(self, bucket: Bucket) -> bool:
        """Of a weight that several stages share, the first one counts."""
        return all(axis.rank == 0 for axis in bucket.reduction.more_axes if self.is_among_stages(axis))

    def is_among_stages(self, axis: Axis) -> bool:
        """Whether an axis joins stages, which have copies of a tied weight."""
        return self.stages is not None and set(axis.ranks) <= set(self.stages.ranks)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for all but the last micro-batch of a step.

        In stages 0 and 1 gradients add up on this rank and nothing is sent. Stages 2 and 3 keep only this rank's part
        of a gradient and reduce every micro-batch, within this context too.
        """
        return self.reducer.no_sync()

    def reload_from_model(self) -> None:
        """Take the model's present weights into the masters.

        ``step`` does so by itself for weights written in place by torch functions (``load_state_dict``, ``copy_``);
        call this after writing through ``parameter.data``, which torch does not count.
        """
        self._adopt_edits(everything=True)

    def wait(self) -> None:
        """After ``step``, before weights are read otherwise than by the model's forward: let them arrive."""
        self.windows.wait()

    def hold(self, *, gradients: bool = False) -> None:
        """Stage 3: keep gathered units whole over several micro-batches, until ``release``; ``step`` renews them.

        ``gradients``, in stages 2 and 3: within ``no_sync`` whole gradients add up on this rank too, as in stages 0 and
        1, so that they are reduced once: for a pipeline, whose weights are whole for as long.
        """
        self.windows.hold()
        if gradients:
            self.reducer.keep_local()

    def release(self) -> None:
        """End ``hold`` and free the units."""
        self.windows.release()
        self.reducer.keep_local(False)

    def close(self) -> None:
        """Remove all hooks; the model stays usable and keeps its present weights, whole. Called on all ranks."""
        self.reducer.close()
        self.windows.close()
        for bucket in dict.fromkeys([*self.reducer.buckets, *self.windows.buckets]):
            bucket.release()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, by flat shard: for resuming in the same layout. ``nanopar_zero.save`` moves."""
        return {**self.inner.state_dict(), "extra": self.extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, in the same layout."""
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "extra"})
        self._share_state()
        self.load_extra_state(state_dict.get("extra", {}))

    def extra_state(self) -> dict[str, Any]:
        """What resuming needs beside weights and the inner optimizer's state: JSON values, equal on all ranks."""
        state: dict[str, Any] = {}
        if self._scaler is not None:
            state["loss_scale"] = self._scaler.state_dict()
        if self._rounding is not None:
            state["updates"] = self._rounding.updates
        return state

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``extra_state`` gave; what is not there, or of no use under this policy, is left alone."""
        if self._scaler is not None and "loss_scale" in state:
            self._scaler.load_state_dict(state["loss_scale"])
        if self._rounding is not None and "updates" in state:
            self._rounding.updates = int(state["updates"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not offered, since a new parameter has no bucket: ``close()`` this optimizer and call ``shard`` again."""
        if hasattr(self, "inner"):  # torch's own constructor adds the first groups by this method
            raise RuntimeError(
                "a ZeroOptimizer takes no new parameters: close() it and call shard again with all groups"
            )
        super().add_param_group(param_group)

    def _share_state(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _adopt_edits(self, everything: bool = False) -> None:
        for bucket in self.reducer.buckets:
            bucket.adopt_edits(everything)
