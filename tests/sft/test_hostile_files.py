"""Files that somebody has damaged, or made up: one clear error for each of more than ten thousand, and nothing else.

What is written is right first; then bytes are changed, cut, doubled, or values of it replaced by odd ones. A loader may
accept what still makes sense. It must not crash, hang, run anything, or raise what no caller expects.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nanopar_models as models
from nanopar_core import checkpoint
from nanopar_models.weights import read_config
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.rows import load_rows

pytest.importorskip("safetensors")
pytestmark = pytest.mark.long

TIMES = 1_500  # for each of seven files
ODD: list[Any] = [
    None, True, -1, 0, 2**63, -(2**70), 1e308, float("nan"), "", "\0", "../../etc/passwd", "/etc/passwd", "a" * 5000,
    [], {}, [[]], {"": {}}, [1, 2], "!!python/object/apply:os.system ['true']", "\ud83d\ude00", "nan", "1e999",
    [None] * 50,
]  # fmt: skip


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled or put in."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(result) + 1)
        what = rng.randrange(5)
        if what == 0 and result:
            result[place % len(result)] = rng.randrange(256)
        elif what == 1:
            del result[place : place + rng.randint(1, 40)]
        elif what == 2:
            result[place:place] = result[place : place + rng.randint(1, 40)]
        elif what == 3:
            result[place:place] = rng.choice(string.punctuation + "0123456789\n\t ").encode() * rng.choice([1, 1, 300])
        else:
            del result[place:]
    return bytes(result)


def changed_values(value: Any, rng: random.Random) -> Any:
    """One value somewhere inside replaced, left out, or put under another name."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        result, key = dict(value), rng.choice(list(value))
        what = rng.random()
        if what < 0.15:
            del result[key]
        elif what < 0.25:
            result[f"{key}{rng.choice(['x', '.', '@0of1', ' '])}"] = result.pop(key)
        else:
            result[key] = changed_values(result[key], rng)
        return result
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], changed_values(value[place], rng), *value[place + 1 :]]
    return rng.choice(ODD)


def changed_json(data: bytes, rng: random.Random) -> bytes:
    """Values of a JSON file changed, or its bytes, or another depth of brackets."""
    if rng.random() < 0.02:
        return b"[" * 100_000
    if rng.random() < 0.4:
        return changed_bytes(data, rng)
    return json.dumps(changed_values(json.loads(data), rng)).encode()


def attack(file: Path, change: Callable[[bytes, random.Random], bytes], load: Callable[[], object], error: Any) -> int:
    """How many changed files were refused; anything but ``error`` is a failure that names the seed."""
    right, refused = file.read_bytes(), 0
    for seed in range(TIMES):
        file.write_bytes(change(right, random.Random(seed)))
        try:
            load()
        except error as problem:
            assert str(problem), seed
            refused += 1
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {type(problem).__name__}: {problem}") from problem
    file.write_bytes(right)
    load()
    return refused


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    shape = models.PhiMoEConfig.preset("nano", vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    models.save(models.PhiMoE(shape), tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def test_configurations(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: nano\nlr: 1.0e-3\nsteps: 12\nbetas: [0.9, 0.95]\nfreeze: [a, 'b*']\ntp: 2\nsp: true\nclip: 1\n"
    )
    refused = attack(file, changed_bytes, lambda: Config.parse(["--config", str(file)]), InputError)
    assert refused > TIMES // 4


def test_model_configurations(model_dir: Path) -> None:
    refused = attack(model_dir / "config.json", changed_json, lambda: read_config(model_dir), ValueError)
    assert refused > TIMES // 4


def test_weights(model_dir: Path) -> None:
    def load() -> None:
        with models.opened(model_dir) as weights:
            weights.read("model.norm.weight")

    refused = attack(model_dir / "model.safetensors.index.json", changed_json, load, ValueError)
    assert refused > TIMES // 2
    [file, *_] = sorted(model_dir.glob("*.safetensors"))
    assert attack(file, changed_bytes, load, ValueError) > TIMES // 4


def test_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [{"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"}, {"messages": [{"role": "user", "content": "a"}]}]
    lines[1]["messages"].append({"role": "assistant", "content": "b"})  # type: ignore[union-attr]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")

    def change(data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return changed_bytes(data, rng)
        return b"\n".join(json.dumps(changed_values(json.loads(line), rng)).encode() for line in data.splitlines())

    assert attack(file, change, lambda: load_rows(str(file), "train", seed=0), InputError) > TIMES // 4


def test_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "c"
    parts = checkpoint.Parts((4, 3), {(0, 0): torch.ones(2, 3), (2, 0): torch.ones(2, 3)})
    checkpoint.save(path, {"w": parts, "n": torch.tensor(3)}, {"step": 1, "more": {"a": [1, 2]}})

    def load() -> None:
        checkpoint.read_extra(path)
        checkpoint.verify(path)
        with checkpoint.reading(path) as stored:
            for one in stored.values():
                one.read()

    assert attack(path / "checkpoint.json", changed_json, load, ValueError) > TIMES // 4
    [file] = path.glob("*.safetensors")

    def read() -> None:
        about = json.loads((path / "checkpoint.json").read_text())
        about["files"][file.name] = [file.stat().st_size, checkpoint._checksum(file)]  # who made it can do that
        (path / "checkpoint.json").write_text(json.dumps(about))
        load()

    assert attack(file, changed_bytes, read, ValueError) > TIMES // 4
