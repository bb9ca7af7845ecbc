"""The comparison as people read it: a table for the terminal, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from rich import box
from rich.table import Table

from nanopar_sft.figures import Row

MIB = 2**20
SHORT = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_to_all": "A2A",
    "broadcast": "BC",
    "send_recv": "P2P",
    "send": "send",
    "recv": "recv",
}
LEGEND = (
    "wall, CPU: a plain local step's time / the strategy's, median (least-largest) of the pairs; 1.00 would be free of "
    "cost.\npeak: MiB of tensors on the fullest rank. sent: MiB that a rank sends in a step, in these collectives.\n"
    "loss: largest difference to one plain process. Below each figure its floor: what the strategy cannot do without."
)


def terminal(rows: Sequence[Row], title: str) -> Table:
    """Two lines a candidate, figures above floors; fits 100 columns."""
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, title_justify="left")
    table.add_column("strategy", no_wrap=True)
    table.add_column("tok/s", justify="right", no_wrap=True)
    for heading in ("wall", "CPU"):
        table.add_column(heading, no_wrap=True)
    for heading in ("peak", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("calls")
    table.add_column("loss", justify="right", no_wrap=True)
    for row in rows:
        if row.problem is not None:
            table.add_row(row.strategy, "-", "-", "-", "-", "-", "failed" if row.failed else "missing", "-")
            continue
        table.add_row(
            row.strategy,
            _number(row.tokens_per_second, 0),
            f"{_number(row.wall_ratio, 2)} {_range(row.wall_ratio_range)}",
            f"{_number(row.cpu_ratio, 2)} {_range(row.cpu_ratio_range)}",
            _mib(row.peak_memory_bytes),
            _mib(row.bytes_sent),
            calls(row),
            _loss(row),
            style="bold" if row.kind == "nanopar" else None,
        )
        table.add_row(
            "",
            "",
            _number(row.wall_ratio_floor, 2),
            _number(row.cpu_ratio_floor, 2),
            _mib(row.peak_memory_bytes_floor),
            _mib(row.bytes_sent_floor),
            "",
            "",
            style="dim",
        )
    return table


def problems(rows: Sequence[Row]) -> list[str]:
    """One line for each candidate without figures."""
    return [f"{row.strategy}: {row.problem}" for row in rows if row.problem is not None]


HEADINGS = (
    "strategy",
    "tok/s",
    "wall",
    "range",
    "floor",
    "CPU",
    "range",
    "floor",
    "peak MiB",
    "floor",
    "sent MiB",
    "floor",
    "calls",
    "loss difference",
)


def markdown(rows: Sequence[Row], title: str, command: str) -> str:
    """Title, command, table, and what its columns mean."""
    body = pipe_table(HEADINGS, map(_cells, rows), left=range(len(HEADINGS)))
    notes = "\n".join(f"- {text}" for text in problems(rows))
    text = f"# {title}\n\n    {command}\n\n{body}\n\n{LEGEND.replace('Below each', 'Beside each')}\n"
    return f"{text}\n{notes}\n" if notes else text


def pipe_table(headings: Sequence[str], rows: Iterable[Sequence[object]], left: Container[int] = (0,)) -> str:
    """A table in Markdown that can be read as plain text too; columns at the places ``left`` begin on the left.

    >>> print(pipe_table(["op", "ms"], [["sum", 12]]))
    | op  | ms |
    | --- | -: |
    | sum | 12 |
    """
    lines = [list(map(str, line)) for line in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width if place in left else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    padded = [
        [
            text.ljust(width) if place in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))


def _cells(row: Row) -> tuple[str, ...]:
    if row.problem is not None:
        return (row.strategy, "failed" if row.failed else "missing", *["-"] * (len(HEADINGS) - 2))
    return (
        row.strategy,
        _number(row.tokens_per_second, 0),
        _number(row.wall_ratio, 2),
        _range(row.wall_ratio_range).strip("()"),
        _number(row.wall_ratio_floor, 2),
        _number(row.cpu_ratio, 2),
        _range(row.cpu_ratio_range).strip("()"),
        _number(row.cpu_ratio_floor, 2),
        _mib(row.peak_memory_bytes),
        _mib(row.peak_memory_bytes_floor),
        _mib(row.bytes_sent),
        _mib(row.bytes_sent_floor),
        calls(row) or "-",
        _loss(row),
    )


def calls(row: Row) -> str:
    """The collectives of a step, as ``9 RS, 18 AG``."""
    return ", ".join(f"{number} {SHORT.get(kind, kind)}" for kind, number in row.calls.items())


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _range(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"({ends[0]:.2f}-{ends[1]:.2f})"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"


def _loss(row: Row) -> str:
    if row.loss_difference is None:
        return row.differs or "-"
    return f"{row.loss_difference:.0e}"
