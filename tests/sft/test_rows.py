import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from nanopar_sft.errors import InputError
from nanopar_sft.rows import Message, Row, load_rows, to_row

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
QUESTION = {"question": "3 and 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return str(path)


def pair(prompt: str, answer: str, where: str) -> Row:
    return Row((Message("user", prompt), Message("assistant", answer)), where)


def test_question_and_answer_lose_their_calculator_marks(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", QUESTION)
    [row] = load_rows(path)
    assert row == pair("3 and 4?", "3 + 4 = 7\n#### 7", f"{path}:1")
    assert (row.prompt, row.answer) == ((Message("user", "3 and 4?"),), "3 + 4 = 7\n#### 7")


def test_prompt_and_completion_are_kept_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "C++?", "completion": "cout << x; cin >> y;", "id": 3})
    assert load_rows(path) == [pair("C++?", "cout << x; cin >> y;", f"{path}:1")]


def test_messages_end_with_the_last_answer(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "so long")]
    record = {"messages": [{"role": role, "content": content} for role, content in [*turns, ("user", "again")]]}
    [row] = load_rows(write(tmp_path / "rows.jsonl", record))
    assert row.messages == tuple(Message(*turn) for turn in turns)
    assert row.answer == "so long"
    assert row.prompt[-1] == Message("user", "bye")


def test_empty_lines_count_as_lines_but_not_as_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", QUESTION, "", QUESTION)
    assert [row.where for row in load_rows(path)] == [f"{path}:1", f"{path}:3"]


def test_count_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", QUESTION, QUESTION, "not json")
    assert len(load_rows(path, count=2)) == 2


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"question": "3', "rows.jsonl:2: not valid JSON"),
        ("9" * 5000, "rows.jsonl:2: not valid JSON"),
        ("[" * 100_000, "rows.jsonl:2: not valid JSON"),
        ('{"question": "a", "answer": "\\ud800"}', "rows.jsonl:2: text that is not Unicode"),
        ("[1, 2]", "rows.jsonl:2: a row must be a JSON object, not list"),
        ({"text": "a", "id": 1}, "rows.jsonl:2: no answer in this row: it has the keys text, id; expected"),
        ({}, "rows.jsonl:2: no answer in this row: it has the keys none"),
        ({"question": "a"}, "rows.jsonl:2: 'answer' is missing; the row has the keys question;"),
        ({"question": "a", "answer": ""}, "rows.jsonl:2: 'answer' is empty"),
        ({"question": "a", "answer": None}, "rows.jsonl:2: 'answer' is NoneType"),
        ({"question": "a", "answer": 7}, "rows.jsonl:2: 'answer' is int"),
        ({"answer": "7"}, "rows.jsonl:2: 'question' is missing"),
        ({"prompt": "a"}, "rows.jsonl:2: 'completion' is missing"),
        ({"messages": "hi"}, "rows.jsonl:2: 'messages' must be a list"),
        ({"messages": []}, "rows.jsonl:2: no answer in this row: its messages have the roles none"),
        ({"messages": [{"role": "user", "content": "a"}]}, "rows.jsonl:2: no answer in this row: its messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "rows.jsonl:2: no answer in this row"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "rows.jsonl:2: message 1 has the role 'tool'"),
        ({"messages": [{"role": "user", "content": " "}]}, "rows.jsonl:2: message 1 (user) has no text"),
        (
            {"messages": [{"role": r, "content": "a"} for r in ("assistant", "user", "assistant")]},
            "rows.jsonl:2: a conversation must not start with the assistant",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_rows(write(tmp_path / "rows.jsonl", QUESTION, record))
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
    assert "\n" not in str(caught.value)


def test_a_line_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "\xff\xfe"}\n')
    with pytest.raises(InputError, match=r"rows\.jsonl:1: not valid JSON"):
        load_rows(str(tmp_path / "rows.jsonl"))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.jsonl' cannot be read: No such file"):
        load_rows(str(tmp_path / "gone.jsonl"))
    with pytest.raises(InputError, match="has no rows"):
        load_rows(write(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("source", ["sythetic", "a/b/c/d", "no such file", ""])
def test_unknown_source(source: str) -> None:
    with pytest.raises(InputError, match="not synthetic, gsm8k, a JSONL file, a directory or a hub id"):
        load_rows(source)


def test_synthetic_rows() -> None:
    rows = load_rows("synthetic", "test", count=20)
    assert rows == load_rows("synthetic", "test", count=30)[:20]
    assert rows != load_rows("synthetic", "train", count=20)
    assert rows != load_rows("synthetic", "test", count=20, seed=1)
    assert rows[0].answer == "7 - 3 = 4\n4 + 12 = 16\n#### 16"
    assert rows[3].where == "synthetic test row 3"


def test_synthetic_has_two_splits() -> None:
    with pytest.raises(InputError, match="train and test, not 'validation'"):
        load_rows("synthetic", "validation")


@pytest.fixture
def hub_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for the hub: notes what was asked for, and gives one row."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> list[dict[str, str]]:
        calls.append((path, name, split))
        return [QUESTION]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("gsm8k", ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k/main", ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k/main:train", ("openai/gsm8k", "main", "train")),
        ("org/some.name", ("org/some.name", None, "test")),
        ("org/some-name:validation", ("org/some-name", None, "validation")),
    ],
)
def test_what_the_hub_is_asked_for(source: str, asked: tuple[Any, ...], hub_calls: list[tuple[Any, ...]]) -> None:
    assert load_rows(source, "test")[0].answer == "3 + 4 = 7\n#### 7"
    assert hub_calls == [asked]


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match="the hub cannot be reached for data 'openai/gsm8k': check the network, or"):
        load_rows("gsm8k")


def test_local_directory_in_hub_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "mine"
    folder.mkdir()
    write(folder / "train.jsonl", QUESTION, QUESTION)
    write(folder / "test.jsonl", {"question": "only this?", "answer": "#### 1"})
    assert len(load_rows(str(folder), "train")) == 2
    [row] = load_rows(str(folder), "test")
    assert row == pair("only this?", "#### 1", f"{folder} test row 0")
    with pytest.raises(InputError, match="'dev', cannot be loaded: Unknown split"):
        load_rows(str(folder), "dev")


def test_a_datasets_own_code_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "trap"
    folder.mkdir()
    (folder / "trap.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_rows(str(folder))
    assert not (tmp_path / "ran").exists()


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be loaded: The directory at"):
        load_rows(str(tmp_path))


def test_missing_keys_of_a_hub_row_name_the_row() -> None:
    with pytest.raises(InputError, match="org/name train row 5: no answer in this row: it has the keys a, b"):
        to_row({"a": 1, "b": 2}, "org/name train row 5")


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs ../shared/data/gsm8k")
def test_gsm8k_files() -> None:
    train, test = (load_rows(str(GSM8K / f"{name}.jsonl")) for name in ("train", "test"))
    assert (len(train), len(test)) == (7473, 1319)
    assert not any("<<" in row.answer or ">>" in row.answer for row in train + test)
    assert train[0].answer.splitlines()[0] == "Natalia sold 48/2 = 24 clips in May."
