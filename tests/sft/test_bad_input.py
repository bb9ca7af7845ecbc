"""Bad input: one clear line that names the value and the remedy, exit status 2, nothing written."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nanopar_models as models
from nanopar_sft import __main__ as cli
from nanopar_sft import assemble
from nanopar_sft.config import Config

GOOD_ROW = json.dumps({"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"})


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def save_model(folder: Path, **changes: int) -> Path:
    chat = assemble.load_chat(Config.parse([]))
    sizes = {"vocab_size": len(chat.tokenizer), "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 16}
    models.save(models.PhiMoE(models.PhiMoEConfig.preset("nano", **{**sizes, **changes})), folder)
    chat.tokenizer.save_pretrained(folder)
    return folder


def truncated_weights(folder: Path) -> list[str]:
    file = save_model(folder / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return ["--model", str(folder / "m")]


def missing_weight(folder: Path) -> list[str]:
    from safetensors.torch import load_file, save_file

    file = save_model(folder / "m") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, file)
    return ["--model", str(folder / "m")]


def small_vocabulary(folder: Path) -> list[str]:
    return ["--model", str(save_model(folder / "m", vocab_size=16)), "--tokenizer", "builtin"]


def other_architecture(folder: Path) -> list[str]:
    save_model(folder / "m")
    config = folder / "m" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama"}))
    return ["--model", str(folder / "m"), "--tokenizer", "builtin"]


def jsonl(*lines: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
        return ["--data", str(folder / "rows.jsonl")]

    return write


def dataset_without_answers(folder: Path) -> list[str]:
    (folder / "d").mkdir()
    (folder / "d" / "train.jsonl").write_text('{"text": "no question, no answer"}\n')
    return ["--data", str(folder / "d")]


def yaml_key(folder: Path) -> list[str]:
    (folder / "c.yaml").write_text("batchsize: 8\n")
    return ["--config", str(folder / "c.yaml")]


def output_is_a_file(folder: Path) -> list[str]:
    (folder / "taken").write_text("mine")
    return ["--output-dir", str(folder / "taken")]


def old_checkpoints(folder: Path) -> list[str]:
    (folder / "run" / "checkpoints" / "step-000020").mkdir(parents=True)
    return ["--output-dir", str(folder / "run")]


def plain(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda _folder: list(arguments)


CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "unknown preset": (plain("--model", "nanoo"), r"model=nanoo: neither a preset \(nano.*did you mean nano\?"),
    "missing model directory": (plain("--model", "./no/such"), r"model=\./no/such: neither"),
    "truncated weights": (truncated_weights, r"model=.*model\.safetensors cannot be read as safetensors"),
    "missing weight": (missing_weight, r"model=.*lacks model\.layers\.0\.block_sparse_moe\.experts\.3\.w2\.weight"),
    "other architecture": (other_architecture, r"model_type must be 'phimoe', got 'llama'"),
    "small vocabulary": (small_vocabulary, r"the tokenizer has \d+ tokens, the model 16"),
    "missing data file": (plain("--data", "no/rows.jsonl"), r"no/rows\.jsonl"),
    "malformed row": (jsonl(GOOD_ROW, '{"question": "2 +'), r"rows\.jsonl:2: not valid JSON"),
    "row without an answer": (
        jsonl(GOOD_ROW, GOOD_ROW, '{"question": "2 + 3?"}'),
        r"rows\.jsonl:3: 'answer' is missing",
    ),
    "no rows": (jsonl(""), r"has no rows"),
    "dataset without answers": (dataset_without_answers, r"no answer in this row: it has the keys text"),
    "unknown key": (plain("--batch-siz", "8"), r"unknown key 'batch-siz'; did you mean 'batch_size'\?"),
    "unknown key in YAML": (yaml_key, r"c\.yaml: unknown key 'batchsize'; did you mean 'batch_size'\?"),
    "indivisible batch": (
        plain("--batch-size", "10", "--dp", "2", "--microbatches", "2"),
        r"batch_size=10 is not divisible by dp=2 x microbatches=2 = 4",
    ),
    "output is a file": (output_is_a_file, r"taken exists and is not a directory"),
    "another run's checkpoints": (
        old_checkpoints,
        r"checkpoints of an earlier run, the newest is step-000020: go on with",
    ),
    "sequence too long": (plain("--seq-len", "5000"), r"seq_len=5000 is longer than the model's 1024 positions"),
    "too many layers": (plain("--layers", "9"), r"layers=9: the model has only 3"),
    "freeze nothing": (plain("--freeze", "model.embedd*"), r"freeze=model\.embedd\* matches no parameter"),
    "freeze everything": (plain("--freeze", "*"), r"leaves nothing to train"),
    "no checkpoint": (plain("--resume", "no/checkpoint"), r"resume=no/checkpoint: no such checkpoint directory"),
    "rows too long": (plain("--seq-len", "8"), r"seq_len 8: none of 50 rows fits"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_status_2_nothing_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = CASES[name]
    inputs, here = tmp_path / "inputs", tmp_path / "here"
    inputs.mkdir()
    here.mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(here)
    status = cli.main(["train", "--steps", "3", "--train-rows", "50", *make(inputs)])
    error = capsys.readouterr().err
    assert status == 2, error
    last = error.strip().splitlines()[-1]
    assert last.startswith("nanopar-sft: error: ")
    assert re.search(expected, last), last
    assert "Traceback" not in error
    assert list(here.iterdir()) == []  # nothing half-written
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--max-new-tokens", "0"), "max_new_tokens=0 lets generate say nothing: use --max-new-tokens 256"),
        (("--max-new-tokens", "1020"), r"a prompt of \d+ tokens and max_new_tokens=1020 do not fit the model's 1024"),
    ],
)
def test_generate_says_what_does_not_fit(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt", "Mia has 3 cards.", *arguments]) == 2
    assert re.search(expected, capsys.readouterr().err.strip().splitlines()[-1])


def test_unknown_words_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"question": "Quirky zebras yodel?", "answer": "perhaps\n#### 3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(["data", "--data", str(tmp_path / "rows.jsonl"), "--show", "0"]) == 0
    ids = assemble.load_chat(Config.parse([])).tokenizer("Quirky zebras yodel? perhaps\n#### 3")["input_ids"]
    assert len(ids) == 8  # four words that it does not know, ?, a line break, ####, 3
    # Of the row's 12 tokens: the four chat tokens are known too.
    said = capsys.readouterr().out
    assert re.search(r"unknown to the tokenizer +33\.3% of the tokens", said), said
