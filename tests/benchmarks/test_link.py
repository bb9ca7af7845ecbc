"""The benchmark over a slow link: its critical path by hand, and that every row is measured; times are not judged."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

import nanopar_core as core
from nanopar_core.testing import run
from nanopar_sft import workload
from nanopar_sft.setup import Setup

pytest.importorskip("transformers")
PROGRAM = str(Path(__file__).parents[2] / "benchmarks" / "link.py")


def link() -> dict:
    before = list(sys.modules)
    module = runpy.run_path(PROGRAM)
    assert "benchmarks" not in set(sys.modules) - set(before)
    return module


LINK = link()
# Forward of the root alone, of two units and of what follows them, 1 s each; backward twice that; the update 1 s.
TIMES = LINK["Times"](
    forward=[0.0, 1.0, 1.0], backward=[0.0, 2.0, 2.0], ready=[4.0, 6.0], end_of_backward=6.0, update=1.0
)


@pytest.mark.parametrize(
    ("stage", "goodput", "expected"),
    [
        (0, 1e9, 7.0),  # all hidden
        (0, 10.0, 6 + 2 + 1),  # the last bucket, 2 x 10 bytes, is sent when backward has ended
        (0, 5.0, 4 + 4 + 4 + 1),  # the second waits for the first
        (1, 1e9, 7.0),
        (1, 10.0, 6 + 1 + 1 + 1),  # the last bucket; the gather of the first unit, while the second's is hidden
        (1, 5.0, 6 + 2 + 1 + 3),  # gathers at 2 and 4: forward ends at 5 instead of 2
        (3, 1e9, 7.0),
        # forward waits 1 s for the first unit, backward 1 s for the last; then the last reduce_scatter, 1 s
        (3, 10.0, 1 + 2 + 1 + 4 + 1 + 1),
    ],
)
def test_critical_path(stage: int, goodput: float, expected: float) -> None:
    units = [0.0, 10.0, 10.0]
    assert LINK["critical_path"](stage, TIMES, goodput, [10.0, 10.0], units) == pytest.approx(expected, abs=1e-6)


def measured() -> list[tuple[str, ...]]:
    module = link()
    axis = core.Mesh(dp=2).dp
    setup = Setup("nano", axis, torch.device("cpu"), 1, fused=True)
    batch = workload.batch(0, 2, 16, 320)
    return [module["measure"](name, setup, batch, 1) for name in ("zero1", "zero3", "torch-ddp", "tp-sp-alone")]


def as_cells() -> list[tuple[str, ...]]:
    return [row.cells for row in measured()]


def test_every_row_is_measured() -> None:
    one, three, ddp, divided = run(2, as_cells)[0]
    for cells in (one, three, ddp, divided):
        assert float(cells[1]) > 0
        assert len(cells) == len(LINK["HEADINGS"])
    assert (one[6], three[6]) == ("5", "7")  # 2 P/2 and 3 P/2, in MiB
    assert ddp[2:4] == divided[2:4] == ("-", "-")
    row = LINK["Row"]("zero0", 3.0, 1.0, 2.0**20, 2.0**21, 2.0)
    assert LINK["markdown"]([row], "a title").splitlines()[2:] == [
        "| strategy | step s | critical s | ratio | computation s | exposed s | sent MiB | goodput MiB/s |",
        "| -------- | -----: | ---------: | ----: | ------------: | --------: | -------: | ------------: |",
        "| zero0    |   3.00 |       2.00 |  1.50 |          1.00 |      2.00 |        2 |           1.0 |",
    ]
