"""Drawings, CSV files and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nanopar_pipeline as pipeline
from nanopar_pipeline import schedules
from nanopar_pipeline.__main__ import main
from nanopar_pipeline.drawing import as_svg, as_text


def test_a_schedule_goes_through_a_file(tmp_path: Path) -> None:
    for make, chunks, placement in ((schedules.interleaved, 2, "loop"), (schedules.zbv, 2, "v")):
        made = make(3, chunks, 5)
        pipeline.write_csv(made, tmp_path / "own.csv")
        assert pipeline.read_csv(tmp_path / "own.csv", chunks=chunks, placement=placement) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"own.csv, line 1: '0X0' is not an action such as 0F1"),
        ("0F0,,0B0\n1B0,1F0\n", r"own.csv: ranks wait for each other"),
        ("0F0\n", r"own.csv: stage 0, micro-batch 0 has F"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        pipeline.read_csv(tmp_path / "own.csv")


def test_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture.svg"
    assert main(["draw", "1f1b", "--stages", "2", "--microbatches", "3", "--svg", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 |F0 F1 .  .  B0 .  F2 B1 .  .  B2 .",
        "rank 1 |.  F0 B0 .  F1 B1 .  F2 B2 .",
        "",
        "makespan 12, bubble 25.0%",
        "most live (stage, micro-batch) pairs by rank: 2, 1",
        f"written to {file}",
    ]
    picture = file.read_text()
    assert picture.count("<rect") == 12
    assert "bubble 25.0%" in picture


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none: no such schedule or file; there are gpipe, 1f1b, interleaved"),
        (["zbv", "--stages", "5"], "5 stages are not 2 for each rank"),
        (["1f1b", "--chunks", "2"], "chunks must be 1 for this schedule, not 2"),
    ],
)
def test_what_cannot_be_drawn(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_timelines_of_other_times() -> None:
    run = schedules.one_f_one_b(2, 1, 2).simulate(forward=2, backward=4, communication=2)
    assert as_text(run, 2).splitlines() == [
        "rank 0 |F0 F1 .  .  .  .  B0 .  .  B1 .",
        "rank 1 |.  .  F0 B0 .  F1 B1 .",
    ]
    assert as_svg([("measured", run.spans[0]), ("planned", run.spans[1])]).count('<text x="8"') == 2
    trace = json.loads(pipeline.as_chrome_trace(run.spans))["traceEvents"]
    assert trace[0] == {"name": "0F0", "cat": "F", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 2e6}
