"""Are two runs the same, step by step? ``python -m nanopar_sft.same RUN_A RUN_B``.

Prints loss and gradient norm of every step of both output directories, and the largest relative differences; status 1
where they exceed 1e-4. The layout of a run (ranks, micro-batches) must not show here.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nanopar_sft import metrics

TOLERANCE = 1e-4


def main(arguments: list[str]) -> int:
    """Compare two runs; returns the exit status."""
    if len(arguments) != 2:
        print("usage: python -m nanopar_sft.same RUN_A RUN_B", file=sys.stderr)
        return 2
    runs = [metrics.read(Path(folder) / metrics.METRICS) for folder in arguments]
    for folder, records in zip(arguments, runs, strict=True):
        if not records:
            print(f"{folder} has no {metrics.METRICS}", file=sys.stderr)
            return 2
    if [record["step"] for record in runs[0]] != [record["step"] for record in runs[1]]:
        print(f"different steps: {len(runs[0])} and {len(runs[1])}")
        return 1
    worst = {"loss": 0.0, "grad_norm": 0.0}
    print(f"{'step':>6}  {'loss':>12} {'loss':>12}  {'grad norm':>12} {'grad norm':>12}")
    for one, two in zip(*runs, strict=True):
        pairs = {name: (one[name] or 0.0, two[name] or 0.0) for name in worst}
        for name, (a, b) in pairs.items():
            worst[name] = max(worst[name], abs(a - b) / max(abs(a), 1e-12))
        (loss_a, loss_b), (norm_a, norm_b) = pairs["loss"], pairs["grad_norm"]
        print(f"{one['step']:>6}  {loss_a:>12.6f} {loss_b:>12.6f}  {norm_a:>12.6f} {norm_b:>12.6f}")
    print(f"largest relative difference: loss {worst['loss']:.1e}, gradient norm {worst['grad_norm']:.1e}")
    return 0 if max(worst.values()) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
