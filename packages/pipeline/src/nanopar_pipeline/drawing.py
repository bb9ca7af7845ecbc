"""Timelines: of a simulation or of a run that was measured, as text, SVG or Chrome trace.

rank 0 |F0 F1 .  .  B0 .  B1 .
rank 1 |.  F0 B0 .  F1 B1 .
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from nanopar_pipeline.passes import Simulation, Span

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}


def as_text(simulation: Simulation, tick: float = 1.0) -> str:
    """One row for each rank, one column for each tick; the stage's number is left out where a rank has but one."""
    shown = [[(_name(span, simulation.schedule.chunks), span) for span in spans] for spans in simulation.spans]
    width = max((len(name) for row in shown for name, _ in row), default=1) + 1
    lines = []
    for rank, row in enumerate(shown):
        end = max((span.end for _, span in row), default=0.0)
        cells = ["."] * round(end / tick)
        for name, span in row:
            place = round(span.start / tick)
            cells += ["."] * (place + 1 - len(cells))  # one that takes no time, at the end
            cells[place] = name
        lines.append(f"rank {rank} |" + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def as_svg(rows: Sequence[tuple[str, Sequence[Span]]], *, title: str = "") -> str:
    """Labelled rows of spans, all on one scale."""
    end = max((span.end for _, spans in rows for span in spans), default=1.0)
    scale, left, height, top = 1000.0 / end, 110, 26, 30 if title else 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 1010}" height="{top + height * len(rows) + 8}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>' if title else "",
    ]
    for number, (label, spans) in enumerate(rows):
        y = top + height * number
        parts.append(f'<text x="8" y="{y + 15}">{escape(label)}</text>')
        for span in spans:
            x, width = left + scale * span.start, scale * (span.end - span.start)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{height - 5}" '
                f'fill="{COLOURS[span.action.kind]}" stroke="white"><title>{span.action}</title></rect>'
            )
            if width > 14:
                parts.append(f'<text x="{x + 2:.1f}" y="{y + 14}" fill="white">{span.action.microbatch}</text>')
    return "\n".join(part for part in [*parts, "</svg>"] if part) + "\n"


def write_svg(simulation: Simulation, file: str | Path, *, measured: Sequence[Sequence[Span]] | None = None) -> None:
    """The timeline of all ranks; below each the one that was measured (``Runner.spans`` of all ranks), on one scale."""
    rows: list[tuple[str, Sequence[Span]]] = []
    for rank, spans in enumerate(simulation.spans):
        rows.append((f"rank {rank}" if measured is None else f"rank {rank} planned", spans))
        rows += [] if measured is None else [(f"rank {rank} measured", measured[rank])]
    bubble = f"{simulation.schedule.name}: bubble {simulation.bubble:.1%}"
    Path(file).write_text(as_svg(rows, title=bubble))


def as_chrome_trace(spans: Sequence[Sequence[Span]]) -> str:
    """For chrome://tracing or Perfetto; spans in seconds, one row for each rank."""
    events = [
        {"name": str(span.action), "cat": span.action.kind, "ph": "X", "pid": 0, "tid": rank,
         "ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
        for rank, of_rank in enumerate(spans)
        for span in of_rank
    ]  # fmt: skip
    return json.dumps({"traceEvents": events})


def _name(span: Span, chunks: int) -> str:
    name = str(span.action)
    return name if chunks > 1 else name.lstrip("0123456789")
