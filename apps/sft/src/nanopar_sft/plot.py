"""The picture of a run: its loss by step, and the accuracy of its evaluations."""

import math
from collections.abc import Sequence
from pathlib import Path

from nanopar_sft import metrics

PLOT = "loss.png"


def draw(output_dir: Path) -> Path | None:
    """Draw `loss.png` from the files that the run left in `output_dir`.

    Returns:
        The picture's path; None if no step with a finite loss was recorded.
    """
    # Figure, unlike pyplot, keeps no global state and needs no display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    records = [record for record in metrics.read(output_dir / metrics.METRICS) if record["loss"] is not None]
    if not records:
        return None
    steps = [record["step"] for record in records]
    losses = [record["loss"] for record in records]
    evaluations = [point for point in metrics.read(output_dir / metrics.EVALUATIONS) if point["total"]]

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="loss of each step")
    axes.plot(steps, smooth(losses), color="tab:blue", linewidth=2, label="loss, smoothed")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss per answer token")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    lines = axes.get_lines()
    if evaluations:
        right = axes.twinx()
        share = [100 * point["strict"] / point["total"] for point in evaluations]
        right.plot([point["step"] for point in evaluations], share, "o-", color="tab:orange", label="exact match")
        right.set_ylabel(f"exact match on {evaluations[-1]['total']} held-back problems")
        right.set_ylim(-3, 103)
        right.yaxis.set_major_formatter(PercentFormatter())
        lines = [*lines, *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
    path = output_dir / PLOT
    figure.savefig(path, dpi=150)
    return path


def smooth(values: Sequence[float]) -> list[float]:
    """Means over a window of about a thirtieth of all values, centred, and cut off at both ends.

    >>> smooth([4.0, 2.0, 3.0])
    [4.0, 2.0, 3.0]
    """
    half = len(values) // 60
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]
