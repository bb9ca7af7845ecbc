"""The command as a user runs it: real processes, two ranks, by the app's own launcher and by torchrun."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanopar_sft import __main__ as cli
from nanopar_sft import metrics, same

SMALL = "--steps 3 --train-rows 48 --eval-rows 5 --batch-size 8 --max-new-tokens 4 --layers 1 --warmup 0 --plot false"


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )


def test_one_rank_two_ranks_and_torchrun_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *SMALL.split(), "--output-dir", str(tmp_path / "one")]) == 0
    two = run("nanopar_sft", "train", *SMALL.split(), "--output-dir", "two", "--nproc", "2", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    assert "2 rank(s)" in two.stderr
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nanopar_sft", "train")
    third = run(*torchrun, *SMALL.split(), "--output-dir", "three", "--microbatches", "2", cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    for other in ("two", "three"):
        assert same.main([str(tmp_path / "one"), str(tmp_path / other)]) == 0
    assert "largest relative difference" in capsys.readouterr().out
    record = metrics.read(tmp_path / "two" / metrics.METRICS)[0]
    assert record["collectives"]["all_reduce/dp"]["calls"] == 1  # one bucket holds the whole model
    assert record["collectives"]["all_gather/dp"] == {"calls": 1, "bytes": 32}  # loss, memory and two flags

    capsys.readouterr()
    evaluation = (
        f"eval --model {tmp_path / 'two'} --eval-rows 5 --max-new-tokens 4 --output-dir {tmp_path / 'evaluated'}"
    )
    assert cli.main(evaluation.split()) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["total"] == 5
    assert last["accuracy"] == last["correct"] / 5
    assert json.loads((tmp_path / "evaluated" / "eval.json").read_text()) == last
    final = metrics.read(tmp_path / "two" / metrics.EVALUATIONS)[-1]
    assert last["loss"] == pytest.approx(final["loss"], rel=1e-5)


def test_a_failing_rank_ends_the_run_with_its_error_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n' * 8)
    # Rank 0 cannot open its output, a directory stands in the way; rank 1 knows nothing of it.
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    arguments = (*SMALL.split(), "--nproc", "2", "--data", "rows.jsonl", "--output-dir", "out")
    failed = run("nanopar_sft", "train", *arguments, cwd=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.count("Traceback (most recent call last)") == 1, failed.stderr
    assert "IsADirectoryError" in failed.stderr
    places = [line.removeprefix("[rank0]: ").strip() for line in failed.stderr.splitlines()]
    where = places.index("last collective of each rank:")  # rank 1 waits in the first one of the first step
    assert re.match(r"rank 0 \(failed\): #\d+ broadcast on dp .* from \w+.py:\d+", places[where + 1]), places[where + 1]
    assert re.match(r"rank 1: #\d+ all_reduce on dp 'gradients' .* from \w+.py:\d+", places[where + 2]), places[
        where + 2
    ]


def test_a_run_goes_on_in_another_layout_and_answers_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pipeline and experts first, then tensor and sequence parallelism; whole in between and after."""
    small = [
        *SMALL.replace("--steps 3", "--steps 4").replace("--layers 1", "--layers 2").split(),
        "--lr-schedule=constant",
    ]
    first = ("--pp", "2", "--dp", "2", "--ep", "2", "--microbatches", "2", "--zero", "2")
    assert cli.main(["train", *small, "--output-dir", str(tmp_path / "one")]) == 0
    begun = run("nanopar_sft", "train", *small, "--steps", "2", *first, "--save-every", "2", cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert "layout: pp=2 dp=2 ep=2, zero=2; pipeline 1f1b, 33% of it idle" in begun.stderr
    second = (
        "--tp",
        "2",
        "--sp",
        "true",
        "--recompute",
        "true",
        "--resume",
        "auto",
        "--save-every",
        "2",
        "--keep",
        "1",
    )
    ended = run("nanopar_sft", "train", *small, *second, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in (tmp_path / "runs/sft/checkpoints").iterdir()] == ["step-000004"], "keep=1"
    one, moved = (metrics.read(tmp_path / name / metrics.METRICS) for name in ("one", "runs/sft"))
    for here, there in zip(one, moved, strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=2e-5)
        assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-3)  # fp32: a router near a tie may tip
    question = ("--prompt", "Mia has 3 cards. Tom gives Mia 4. How many?", "--max-new-tokens", "6")
    texts = [
        run("nanopar_sft", "generate", "--model", "runs/sft", *question, *layout.split(), cwd=tmp_path).stdout
        for layout in ("", "--pp 2", "--tp 2 --ep 2 --etp 1")
    ]
    assert texts[0].strip()
    assert texts[1:] == texts[:1] * 2
    asked = ("--model", "runs/sft", "--eval-rows", "5", "--max-new-tokens", "4", "--dp", "2", "--ep", "2")
    evaluated = run("nanopar_sft", "eval", *asked, cwd=tmp_path)
    last = json.loads(evaluated.stdout.strip().splitlines()[-1])
    assert last["total"] == 5
    final = metrics.read(tmp_path / "runs/sft" / metrics.EVALUATIONS)[-1]
    assert last["loss"] == pytest.approx(final["loss"], rel=1e-5)


def test_16_bits_train_in_a_pipeline(tmp_path: Path) -> None:
    """The loss is scaled on the last stage only, and all stages must know; skipped steps are skipped by all."""
    arguments = (*SMALL.split(), "--pp", "2", "--tp", "2", "--microbatches", "2", "--zero", "1")
    for precision in ("fp32", "fp16"):
        done = run(
            "nanopar_sft", "train", *arguments, "--precision", precision, "--output-dir", precision, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    one, two = (metrics.read(tmp_path / name / metrics.METRICS) for name in ("fp32", "fp16"))
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=2e-2)
    assert one[0]["grad_norm"] == pytest.approx(two[0]["grad_norm"], rel=5e-2)
