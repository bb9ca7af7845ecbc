"""Compare a run with plain single-process results, parameter by parameter, and say what is probably wrong with it.

    reference   {"loss": .., "norm": .., "gradients": {name: tensor}, "weights": {name: tensor}}   one plain process
    candidate   the same keys with full tensors, or the list of all ranks' dictionaries (``testing.run`` gives one)

        |
        +--> differences   (evidence.py)   what deviates from the reference; replicas that differ in any bit
        `--> diagnosis     (diagnosis.py)  the earliest cause that explains them: mend it, compare again

Any of these keys may be missing: a model alone is compared by its ``outputs``, ``loss`` and ``gradients``.

A parallel step goes wrong in few ways, and each leaves its mark:

    one constant ratio               a factor too many or too few; the axis whose size it is says which
    replicas differ                  a gradient that was not reduced, a rank that started or stepped by itself
    all zero, negative, reordered    detached; wrong sign; shards put together in a wrong order
    gradients right, norm wrong      a shard's norm taken for the whole, or copies counted as parts
    gradients right, weights wrong   the optimizer, its master weights, the clipping factor
    outputs wrong                    the forward pass: other weights, inputs, arithmetic
    no ratio at all, loss wrong too  other rows or other weights of the rows: the error lies before backward

Compare after one step where you can: from the second step on, an error in one parameter is in all of them.

>>> up, down = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0])
>>> reference = {"loss": 0.5, "gradients": {"up": up, "down": down}}
>>> print(compare(reference, {"loss": 0.5, "gradients": {"up": up, "down": 2 * down}}, axes={"dp": 4, "tp": 2}))
1 difference from the reference
diagnosis:
  first deviation down: constant ratio 2.000 = size of axis tp: summed where it should be averaged
  1 of 2 parameters deviate
largest deviations:
  gradients.down: differs by 4.000e+00, largest value 4.000e+00, tolerance 4.0e-05, ratio 2.000
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanopar_core.diagnosis import diagnose
from nanopar_core.evidence import Difference, Evidence, as_tensor, leaves, ranks_by_axis
from nanopar_core.mesh import Axis, Mesh
from nanopar_core.specs import ParamSpec

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
SHOWN = 20


@dataclass(frozen=True)
class Report:
    """What ``compare`` found: all differences in the model's order, and sentences that name their probable cause."""

    differences: tuple[Difference, ...]
    diagnosis: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether candidate and reference agree."""
        return not self.differences

    def check(self) -> None:
        """Raise ``AssertionError`` with the whole text unless ``ok``."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        if self.ok:
            return "no differences from the reference"
        count = len(self.differences)
        lines = [f"{count} difference{'s' if count > 1 else ''} from the reference"]
        if self.diagnosis:
            lines += ["diagnosis:", *(f"  {sentence}" for sentence in self.diagnosis)]
        worst = sorted(self.differences, key=lambda difference: -difference.excess)[:SHOWN]
        lines += ["largest deviations:", *(f"  {difference}" for difference in worst)]
        return "\n".join([*lines, f"  and {count - SHOWN} more"] if count > SHOWN else lines)


def compare(
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    specs: Mapping[str, ParamSpec] | None = None,
    *,
    axes: Mesh | Mapping[str, int] | None = None,
    micro_batches: int = 1,
    rtol: float | Mapping[str, float] | None = None,
    floor: float = 1e-3,
) -> Report:
    """Compare ``candidate`` with ``reference``; every value counts, whatever its key.

    A tensor deviates when its largest absolute difference exceeds ``rtol`` times the largest absolute value of the
    reference tensor, or ``rtol * floor`` where that is larger (values that should be near zero). What is not finite
    never agrees. Of several ranks the first is compared with the reference and the others with the first, bit by bit.

    Args:
        reference: dictionary (nested, of tensors, numbers and lists of these), as ``testing.train_plainly`` returns
            it. The diagnosis knows ``loss`` and ``norm`` (before clipping; a number, or a list by step), ``gradients``
            of the last step before clipping, ``weights`` after it, by name in the model's order, ``tokens`` (how
            many were counted, as ``loss``), and ``outputs`` of the forward pass (logits).
        candidate: the same keys, unsharded tensors; or one such dictionary per rank of the world.
        specs: how parameters are divided, for better names of what is wrong. From another process: ``portable(specs)``.
        axes: the mesh of the candidate, or the sizes that it was made with (``{"dp": 2, "tp": 2}``), beside the axes in
            ``specs``; by default one axis dp over the ranks given.
        micro_batches: number of micro-batches in the last step, so that a factor of that size has a name.
        rtol: by default 1e-9 for float64 tensors and 1e-5 for others; numbers are compared as tensors of the widest
            dtype among the reference's tensors. ``{"outputs": 1e-6, "loss": 1e-7}`` sets some keys' alone.

    Raises:
        ValueError: an empty list, sizes of axes that do not fit the number of ranks, or ``rtol`` for a key that the
            reference has not.
    """
    ranks = [candidate] if isinstance(candidate, Mapping) else list(candidate)
    if not ranks:
        raise ValueError("candidate is an empty list: give one dictionary, or one per rank")
    specs = specs or {}
    expected = dict(leaves(reference))
    evidence = Evidence(
        {name: as_tensor(value) for name, value in expected.items()},
        [{name: as_tensor(value) for name, value in leaves(rank)} for rank in ranks],
        _limits(reference, rtol),
        floor,
        specs,
        ranks_by_axis(axes, specs, len(ranks)),
        micro_batches,
    )
    differences = (*evidence.find_deviations(), *evidence.find_replicas_apart())
    return Report(differences, tuple(diagnose(evidence)) if differences else ())


def portable(specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """The same specs without process groups, so that a rank can return them to the process that compares."""

    def bare(axis: Axis) -> Axis:
        return replace(axis, group=None, communicates=False)

    return {
        name: ParamSpec(
            tuple(replace(shard, axis=bare(shard.axis)) for shard in spec.shards),
            None if spec.data_axis is None else bare(spec.data_axis),
            tuple(bare(axis) for axis in spec.grad_sum),
            None if spec.stages is None else bare(spec.stages),
        )
        for name, spec in specs.items()
    }


def _limits(reference: Mapping[str, Any], rtol: float | Mapping[str, float] | None) -> dict[str, float]:
    """Relative tolerance by leaf; numbers as tensors of the widest dtype."""
    given = dict(rtol) if isinstance(rtol, Mapping) else {} if rtol is None else dict.fromkeys(reference, rtol)
    if unknown := sorted(set(given) - set(reference)):
        raise ValueError(f"rtol names {unknown[0]}, which is none of the reference's keys: {', '.join(reference)}")
    by_key = {key: dict(leaves(value, key)) for key, value in reference.items()}
    dtypes = {value.dtype for values in by_key.values() for value in values.values() if isinstance(value, Tensor)}
    of_numbers = torch.float64 if dtypes <= {torch.float64} else torch.float32

    def default(value: Any) -> float:
        return TOLERANCE.get(value.dtype if isinstance(value, Tensor) else of_numbers, 1e-5)

    return {name: given.get(key, default(value)) for key, values in by_key.items() for name, value in values.items()}
