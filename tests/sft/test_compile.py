"""``--compile true``: the same training, the same names; without a C++ compiler one line before anything is done."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nanopar_sft import __main__ as cli
from nanopar_sft import metrics, same
from nanopar_sft.checkpoints import checkpoint_path

# Rows of equal length: without padding there is one kind of batch, and one graph to compile.
ROWS = [json.dumps({"question": f"{a} + {b}?", "answer": f"#### {a + b}"}) for a in range(2, 6) for b in range(2, 5)]
SMALL = "--data rows.jsonl --steps 3 --batch-size 4 --layers 1 --warmup 0 --plot false"


def train(folder: str, *arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "nanopar_sft", "train", *SMALL.split(), "--output-dir", folder, *arguments]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of processes that import torch first
    done = subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is None,
    reason="torch.compile needs a C++ compiler",
)
def test_training_on_two_ranks_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(ROWS) + "\n")
    train("plain", "--nproc", "2", cwd=tmp_path)
    train("compiled", "--nproc", "2", "--compile", "true", "--save-every", "2", cwd=tmp_path)
    assert same.main([str(tmp_path / "plain"), str(tmp_path / "compiled")]) == 0
    plain, compiled = (metrics.read(tmp_path / name / metrics.METRICS) for name in ("plain", "compiled"))
    for one, other in zip(plain, compiled, strict=True):
        assert one["collectives"] == other["collectives"]
    plain_weights, weights = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "compiled"))
    assert list(weights) == list(plain_weights)
    resume = ["--resume", str(checkpoint_path(tmp_path / "compiled", 2)), "--output-dir", str(tmp_path / "resumed")]
    assert cli.main(["train", *SMALL.replace("rows.jsonl", str(tmp_path / "rows.jsonl")).split(), *resume]) == 0
    [last] = metrics.read(tmp_path / "resumed" / metrics.METRICS)
    assert last["loss"] == pytest.approx(compiled[2]["loss"], rel=1e-5)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    out = tmp_path / "out"
    assert cli.main(["train", "--compile", "true", "--output-dir", str(out)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("nanopar-sft: error: compile=true: torch.compile needs a C++ compiler and finds no 'no-such")
    assert "install one" in line
    assert not out.exists()
