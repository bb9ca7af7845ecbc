"""A schedule of one's own from a CSV file: one row for each rank, one action in each cell, empty cells are skipped.

0F0,0F1,,0B0,0B1
,1F0,1B0,1F1,1B1
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from nanopar_pipeline.schedules import Action, Schedule


def read_csv(file: str | Path, *, chunks: int = 1, placement: str = "loop") -> Schedule:
    """A checked schedule.

    Raises:
        ValueError: a cell that is not an action, or a schedule that does not run; with the file's name.
    """
    actions: list[list[Action]] = []
    with Path(file).open(newline="", encoding="utf-8") as opened:
        for line, row in enumerate(csv.reader(opened), start=1):
            if not row:  # a blank line
                continue
            actions.append([])
            for cell in row:
                if text := cell.strip():
                    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
                    if match is None:
                        raise ValueError(f"{file}, line {line}: {text!r} is not an action such as 0F1")
                    actions[-1].append(Action(int(match[1]), match[2], int(match[3])))
    microbatches = 1 + max((action.microbatch for row in actions for action in row), default=-1)
    try:
        return Schedule(actions, chunks, microbatches, placement, name=Path(file).stem)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def write_csv(schedule: Schedule, file: str | Path) -> None:
    """The actions, as ``read_csv`` reads them; it must be told chunks and placement."""
    with Path(file).open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([str(action) for action in actions] for actions in schedule.actions)
