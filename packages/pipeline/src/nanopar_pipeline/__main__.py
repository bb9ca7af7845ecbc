"""``python -m nanopar_pipeline draw zb_h1 --stages 4 --microbatches 8``: timeline, bubble and memory of a schedule."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nanopar_pipeline.drawing import as_text, write_svg
from nanopar_pipeline.files import read_csv
from nanopar_pipeline.schedules import NAMED, Schedule

V_SHAPED = ("zbv", "dualpipe_v")


def main(arguments: list[str] | None = None) -> int:
    """Draw one; 2 and one line for what cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m nanopar_pipeline", description="Pipeline schedules.")
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw", help="print a schedule's timeline, bubble and memory, and write it as SVG")
    draw.add_argument("schedule", help=f"{', '.join(NAMED)}, or a CSV file with one row of actions for each rank")
    draw.add_argument("--stages", type=int, default=4, metavar="N", help="stages in all [4]")
    draw.add_argument(
        "--chunks", type=int, metavar="N", help="stages on a rank [1; 2 for interleaved, zbv, dualpipe_v]"
    )
    draw.add_argument("--microbatches", type=int, default=8, metavar="N", help="micro-batches of a step [8]")
    draw.add_argument("--placement", default="loop", choices=("loop", "v"), help="of the stages in a CSV file [loop]")
    draw.add_argument("--forward", type=float, default=1.0, metavar="T", help="time of a stage's forward [1]")
    draw.add_argument("--input-part", type=float, default=1.0, metavar="T", help="of its backward's input part [1]")
    draw.add_argument("--weight-part", type=float, default=1.0, metavar="T", help="of its backward's weight part [1]")
    draw.add_argument("--communication", type=float, default=0.0, metavar="T", help="from rank to rank [0]")
    draw.add_argument("--svg", type=Path, metavar="FILE", help="where to write the picture [SCHEDULE.svg]")
    given = parser.parse_args(arguments)
    times = {name: getattr(given, name) for name in ("forward", "input_part", "weight_part", "communication")}
    try:
        schedule = _schedule(given)
        simulation = schedule.simulate(**times)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    ticks = [time for time in times.values() if time > 0]
    print(as_text(simulation, min(ticks, default=1.0)))
    print(f"\nmakespan {simulation.makespan:g}, bubble {simulation.bubble:.1%}")
    print(f"most live (stage, micro-batch) pairs by rank: {', '.join(map(str, simulation.peak_live))}")
    file = given.svg or Path(f"{schedule.name}.svg")
    write_svg(simulation, file)
    print(f"written to {file}")
    return 0


def _schedule(given: argparse.Namespace) -> Schedule:
    if given.schedule not in NAMED:
        if not Path(given.schedule).is_file():
            raise ValueError(f"{given.schedule}: no such schedule or file; there are {', '.join(NAMED)}")
        return read_csv(given.schedule, chunks=given.chunks or 1, placement=given.placement)
    chunks = given.chunks or (2 if given.schedule in ("interleaved", *V_SHAPED) else 1)
    if given.stages % chunks:
        raise ValueError(f"{given.stages} stages are not {chunks} for each rank: give --stages or --chunks")
    return NAMED[given.schedule](given.stages // chunks, chunks, given.microbatches)


if __name__ == "__main__":
    sys.exit(main())
