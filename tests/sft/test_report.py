"""What a run leaves behind: metrics, evaluations, a plot, tensorboard's events; and what it shows meanwhile."""

import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from nanopar_sft import plot
from nanopar_sft.errors import InputError
from nanopar_sft.metrics import StepRecord, read
from nanopar_sft.report import Reporter, clock


def record(step: int, loss: float = 0.5, **values: object) -> StepRecord:
    fields: dict[str, object] = {
        "step": step,
        "loss": loss,
        "grad_norm": 1.25,
        "lr": 2e-3,
        "tokens": 900,
        "tokens_per_second": 12345.6,
        "peak_memory_bytes": 3 * 2**29,
        "collectives": {"all_reduce/dp": {"calls": 3, "bytes": 1024}},
    }
    return StepRecord(**{**fields, **values})  # type: ignore[arg-type]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def has_color(picture: Path, color: str) -> bool:
    pixels = imread(picture)[..., :3]
    return bool((np.abs(pixels - np.array(to_rgb(color))).max(axis=-1) < 0.02).sum() > 50)


def test_metrics_have_exactly_these_fields(tmp_path: Path) -> None:
    with Reporter(tmp_path, 2, plot=False) as reporter:
        reporter.step(record(1))
        assert len(lines(tmp_path / "metrics.jsonl")) == 1  # on disk while the run goes on
        reporter.step(record(2, math.nan, grad_norm=math.inf, skipped=True, mfu=0.25))
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first == {
        "step": 1,
        "loss": 0.5,
        "grad_norm": 1.25,
        "lr": 0.002,
        "tokens": 900,
        "tokens_per_second": 12345.6,
        "peak_memory_bytes": 1610612736,
        "collectives": {"all_reduce/dp": {"calls": 3, "bytes": 1024}},
        "skipped": False,
    }
    assert second["mfu"] == 0.25
    assert (second["loss"], second["grad_norm"], second["skipped"]) == (None, None, True)


def test_a_resumed_run_adds_records_and_the_last_one_counts(tmp_path: Path) -> None:
    with Reporter(tmp_path, 4, plot=False) as reporter:
        for step in (1, 2, 3):
            reporter.step(record(step, loss=step))
        reporter.evaluation(2, 1, 2, 10, 0.5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    with Reporter(tmp_path, 4, start_step=2, plot=False) as reporter:
        for step in (3, 4):
            reporter.step(record(step, loss=10 * step))
        reporter.evaluation(4, 5, 6, 10, 0.5)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 3, 4]
    assert [(line["step"], line["loss"]) for line in read(tmp_path / "metrics.jsonl")] == [
        (1, 1),
        (2, 2),
        (3, 30),
        (4, 40),
    ]
    assert lines(tmp_path / "evaluations.jsonl") == [
        {"step": 2, "strict": 1, "flexible": 2, "total": 10, "loss": 0.5},
        {"step": 4, "strict": 5, "flexible": 6, "total": 10, "loss": 0.5},
    ]


def test_a_fresh_run_starts_anew(tmp_path: Path) -> None:
    for _ in range(2):
        with Reporter(tmp_path, 1, plot=False) as reporter:
            reporter.step(record(1))
            reporter.evaluation(1, 0, 0, 1, 0.5)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    assert len(lines(tmp_path / "evaluations.jsonl")) == 1


def test_other_ranks_report_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path / "out", 1, log="tensorboard", enabled=False) as reporter:
        reporter.note("hello")
        reporter.step(record(1))
        reporter.evaluation(1, 1, 1, 1, 0.5)
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr() == ("", "")


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, 100, plot=False) as reporter:
        reporter.note("routing is [deterministic]")
        for step in range(1, 101):
            reporter.step(record(step, skipped=step == 52))
        reporter.evaluation(100, 150, 165, 200, 0.5)
    printed = capsys.readouterr()
    assert printed.out == ""
    said = printed.err.splitlines()
    assert said[0] == "routing is [deterministic]"
    assert said[1].startswith("step 1/100 loss 0.5000 norm 1.25 lr 2.0e-03 12,346 tok/s 1.50 GiB 0:00 left")
    assert [line.split()[1] for line in said[2:12]] == [f"{step}/100" for step in range(5, 55, 5)]
    assert said[12] == "step 52: skipped, its gradients were not finite"
    assert said[-2].startswith("step 100/100 ")
    assert said[-1] == "step 100: held-back loss 0.5000, exact match 150/200 = 75.0% (last number: 82.5%)"
    assert len(said) == 1 + 1 + 20 + 1 + 1


def test_a_progress_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with Reporter(tmp_path, 600, start_step=590, plot=False) as reporter:
        reporter.note("routing is [deterministic]")
        for step in range(591, 601):
            reporter.step(record(step))
    shown = terminal.getvalue()
    assert "routing is [deterministic]" in shown
    last = shown.rpartition("step 600/600")[2]
    assert "loss 0.5000 norm 1.25 lr 2.0e-03 12,346 tok/s 1.50 GiB" in last
    assert "…" not in shown  # it fits into 80 columns


@pytest.mark.parametrize("evaluated", [True, False])
def test_plot(tmp_path: Path, evaluated: bool) -> None:
    with Reporter(tmp_path, 100) as reporter:
        for step in range(1, 101):
            reporter.step(record(step, loss=math.nan if step == 50 else 4 * math.exp(-step / 20)))
        if evaluated:
            reporter.evaluation(0, 0, 3, 200, 0.5)
            reporter.evaluation(100, 180, 190, 200, 0.5)
    picture = tmp_path / "loss.png"
    assert imread(picture).shape[:2] == (675, 1200)
    assert has_color(picture, "tab:blue")
    assert has_color(picture, "tab:orange") == evaluated


def test_no_plot_without_steps_or_when_switched_off(tmp_path: Path) -> None:
    with Reporter(tmp_path, 1):
        pass
    with Reporter(tmp_path, 1, plot=False) as reporter:
        reporter.step(record(1))
    assert not (tmp_path / "loss.png").exists()


def test_smoothing_is_a_centred_mean_cut_off_at_the_ends() -> None:
    assert plot.smooth([4.0, 2.0, 3.0]) == [4.0, 2.0, 3.0]
    values = [float(i * i) for i in range(60)]  # a window of three
    smooth = plot.smooth(values)
    assert smooth[0] == 0.5  # (0 + 1) / 2
    assert smooth[1] == pytest.approx(5 / 3)  # (0 + 1 + 4) / 3
    assert smooth[-1] == (58**2 + 59**2) / 2


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Reporter(tmp_path, 2, log="tensorboard", plot=False) as reporter:
        reporter.step(record(1, loss=3.0))
        reporter.step(record(2, loss=2.0))
        reporter.evaluation(2, 3, 4, 8, 0.5)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 3.0), (2, 2.0)]
    assert [(event.step, event.value) for event in events.Scalars("eval/strict")] == [(2, 0.375)]
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(2, 0.5)]


def test_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r'pip install "nanopar-sft\[tensorboard\]"'):
        Reporter(tmp_path / "out", 1, log="tensorboard")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("seconds", "expected"), [(0, "0:00"), (83, "1:23"), (3723, "1:02:03"), (59.7, "1:00")])
def test_clock(seconds: float, expected: str) -> None:
    assert clock(seconds) == expected
