"""Loss scaling for fp16: ``LossScale`` is the rule, ``LossScaler`` follows it (Micikevicius et al. 2018, section 3.2).

fp16 has no numbers between 0 and 6e-8: small gradients would vanish. So backward starts from a loss that is larger by
``scale``, and what the ranks have summed is divided by it again. A scale that was too large shows as gradients that are
not finite; then the step is skipped and the scale lowered:

    loss * scale --> backward in fp16 --> sum over ranks / scale --> all finite? --> clip, step
                                                                        |
                                                                        no: skip, lower the scale

Whether all are finite is seen from the global norm, which is equal on all ranks, whichever rank had the bad value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossScale:
    """How the scale begins and moves. ``LossScale(1024.0, factor=1.0)`` is a static scale: it only skips.

    Attributes:
        initial: the first scale; powers of two scale without rounding.
        factor: what the scale is divided by after an overflow, and multiplied by after ``window`` good steps.
        window: number of steps without overflow, one after the other, before the scale grows.
        hysteresis: the number of overflows that it takes to lower the scale; every further one lowers it again, until
            it has grown. At 1 the first overflow counts.
        floor: the scale never falls below this.
    """

    initial: float = 2.0**16
    factor: float = 2.0
    window: int = 2000
    hysteresis: int = 1
    floor: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("factor", 1), ("window", 1), ("hysteresis", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"LossScale: {name} must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.floor <= self.initial < float("inf"):
            raise ValueError(
                f"LossScale: initial must be finite and at least floor, floor above 0, not {self.initial}, {self.floor}"
            )


class LossScaler:
    """The scale of one training run, moved once by every step; equal on all ranks since the norm is."""

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self.scale = float(rule.initial)
        self._good_steps = 0  # since the last overflow, or since the scale last grew
        self._overflows = 0  # since the scale last grew, counted up to the rule's hysteresis
        self._was_used = False

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale, in fp32 or the loss' own dtype where that is wider."""
        self._was_used = True
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    def update(self, overflowed: bool) -> None:
        """A step was tried; lower or raise the scale, as the rule says."""
        if not self._was_used:
            raise RuntimeError(
                "step() with a loss scale, but no loss was scaled: call optimizer.scale(loss).backward(); "
                "a rank without a loss of its own (a pipeline stage) calls optimizer.scale too"
            )
        rule = self.rule
        if overflowed:
            self._good_steps = 0
            self._overflows = min(self._overflows + 1, rule.hysteresis)
            if self._overflows == rule.hysteresis:
                self.scale = max(self.scale / rule.factor, rule.floor)
            return
        self._good_steps += 1
        if self._good_steps == rule.window:
            self._good_steps = self._overflows = 0
            self.scale *= rule.factor

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs; plain numbers."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows": self._overflows}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where ``state_dict`` was taken; the rule stays the one given here."""
        self.scale = float(state["scale"])
        self._good_steps, self._overflows = int(state["good_steps"]), int(state["overflows"])
