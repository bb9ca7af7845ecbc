"""``ZeroOptimizer``: what ``shard`` returns. A ``torch.optim.Optimizer`` around the user's own, working on flat shards.

step():  gradients reduced? --> user's optimizer on this rank's masters, one flat tensor per bucket and group
         --> stage 0: write the parameters; 1, 2: start to gather them; 3: they are gathered when they are needed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanopar_core import global_norm
from nanopar_zero.buckets import Bucket
from nanopar_zero.layout import Run
from nanopar_zero.reducer import Reducer
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
        start = self.bucket.own.start
        return self.bucket.reduced[self.run.start - start : self.run.stop - start]


class ZeroOptimizer(torch.optim.Optimizer):
    """Data-parallel training of one model; made by ``nanopar_zero.shard``, used like any ``torch.optim.Optimizer``.

    ``param_groups`` and ``state`` are those of the optimizer that ``make_optimizer`` built, so learning-rate schedulers
    and changes of ``group["lr"]`` act on it. Every rank calls ``step``, ``clip_grad_norm_`` and ``zero_grad`` alike.
    """

    def __init__(
        self, reducer: Reducer, windows: Windows, inner: torch.optim.Optimizer, shards: Sequence[FlatShard]
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.reducer = reducer
        self.windows = windows
        self.inner = inner
        self.shards = list(shards)
        self._share_state()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights on every rank; gradients that are still local (``no_sync``) are reduced first.

        Args:
            closure: optional; recomputes the loss under ``torch.enable_grad`` and is called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reducer.reduce_now()
        with torch.no_grad():
            self.windows.wait()
            self._adopt_edits()
            for shard in self.shards:
                shard.flat.grad = shard.gradient.to(shard.flat.dtype)
            self.inner.step()
            for shard in self.shards:
                shard.flat.grad = None  # of another dtype than the bucket's it would take memory until the next step
            for bucket in reversed(self.reducer.buckets):  # in the order of forward
                bucket.publish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - torch's signature; the result is the same
        """Start anew: gradients are None until the next backward pass, which also forgets a pass that failed."""
        if self.reducer.abandon():
            self.windows.reset()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients by one factor so that their global norm is at most ``max_norm``.

        In stages 1 to 3 ``p.grad`` is None after backward: torch's own ``clip_grad_norm_`` would silently do nothing.
        Gradients with a norm that is not finite are left as they are: skip that step.

        Returns:
            the global norm before clipping, a 0-dim tensor equal on all ranks; no host sync.
        """
        self.reducer.reduce_now()
        reduced = [(bucket.reduced, bucket.reduction.norm_axes) for bucket in self.reducer.buckets]
        norm = global_norm((gradient, axes) for gradient, axes in reduced if gradient is not None)
        # A norm that is not finite must not reach the buckets: it would turn their padding into NaN for good.
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for gradient, _ in reduced:
            if gradient is not None:
                gradient.mul_(factor.to(gradient.dtype))
        return norm

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

    def hold(self) -> None:
        """Stage 3: keep gathered units whole over several micro-batches, until ``step``, and on until ``release``."""
        self.windows.hold()

    def release(self) -> None:
        """End ``hold`` and free the units."""
        self.windows.release()

    def close(self) -> None:
        """Remove all hooks; the model stays usable and keeps its present weights, whole. Called on all ranks."""
        self.reducer.close()
        self.windows.close()
        for bucket in dict.fromkeys([*self.reducer.buckets, *self.windows.buckets]):
            bucket.release()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, by flat shard: for resuming in the same layout. ``nanopar_zero.save`` moves."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, in the same layout."""
        self.inner.load_state_dict(state_dict)
        self._share_state()

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
