"""The README's example runs, and its drawing is the schedule's."""

import re
from pathlib import Path

from tests.as_launched import last_loss

from nanopar_core.testing import run
from nanopar_pipeline import schedules

README = (Path(__file__).parents[2] / "packages" / "pipeline" / "README.md").read_text()


def the_example() -> float:
    return last_loss(README)


def test_the_example_runs_on_one_rank_and_on_two() -> None:
    assert the_example() < 0.1
    one, two = run(2, the_example)
    assert one == two < 0.1


def test_the_drawing() -> None:
    [drawn] = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    assert drawn.splitlines() == str(schedules.one_f_one_b(4, 1, 4)).splitlines()
