"""The benchmarks of experts and of balancing: they run and write what they measured; times are not judged."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def bench(program: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / program))


def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    names = bench("experts.py")
    names["SHAPES"][:] = [(16, 16, 4, 24)]
    names["main"](["--pairs", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "experts.json").read_text())
    assert [row["dtype"] for row in rows] == ["fp32", "bf16"]
    assert all(set(row["milliseconds"]) == {"ours", "phi-moe", "transformers", "loop"} for row in rows)
    assert (tmp_path / "experts.md").read_text().count("\n| bf16") == 1


def test_balance(tmp_path: Path) -> None:
    bench("balance.py")["main"](["--steps", "2", "--batch-size", "2", "--output", str(tmp_path)])
    runs = json.loads((tmp_path / "balance.json").read_text())
    assert list(runs) == ["nothing", "loss", "bias"]
    assert all(len(run["busiest"]) == 2 and min(run["busiest"]) >= 1 for run in runs.values())
    assert runs["nothing"]["loss"][0] == pytest.approx(runs["bias"]["loss"][0], rel=1e-6)
    assert (tmp_path / "balance.svg").read_text().startswith("<?xml")
    assert "python benchmarks/balance.py --steps 2" in (tmp_path / "balance.md").read_text()
