"""Rows of data: where they come from, and the one form they are brought into.

    synthetic | gsm8k | org/name | directory | file.jsonl        load_rows
      |
      v     {"question", "answer"}   {"prompt", "completion"}   {"messages": [{"role", "content"}, ...]}
    Row(messages, where)                                         a conversation that ends with the assistant

In GSM8K's form (question and answer) the calculator marks ("<<48/2=24>>") are removed from the answer: a model that
has no calculator should not learn to call one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nanopar_sft.errors import InputError
from nanopar_sft.synthetic import Difficulty, make_problem

ROLES = ("system", "user", "assistant")
SYNTHETIC_ROWS = {"train": 20_000, "test": 1_000}
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>\w+))?")
EXPECTED = "question and answer, prompt and completion, or messages"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """A conversation that ends with an assistant's turn; ``where`` says where it came from ("train.jsonl:3")."""

    messages: tuple[Message, ...]
    where: str

    @property
    def prompt(self) -> tuple[Message, ...]:
        """What a model is asked: everything before the last turn."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """The last turn: what a model should say."""
        return self.messages[-1].content


def load_rows(
    source: str,
    split: str = "train",
    *,
    seed: int = 0,
    count: int | None = None,
    difficulty: Difficulty | None = None,
) -> list[Row]:
    """The rows of a source, checked.

    Args:
        source: what to read:
            - ``synthetic``: generated problems (``seed`` and ``difficulty`` are for these alone);
            - ``gsm8k``: the hub's ``openai/gsm8k``, configuration ``main``;
            - ``org/name``, ``org/name:split``, ``org/name/config`` or ``org/name/config:split``: a hub dataset;
            - a directory: a dataset in the hub's layout (data files, README.md);
            - a file: JSON Lines, one row a line, of which the whole is the split.
        split: the split to read, where ``source`` does not name one.
        count: the first so many rows; None: all (20,000 for training and 1,000 for testing with ``synthetic``).

    Raises:
        InputError: the source cannot be found or reached, a row is malformed or has no answer (said with file and line
            or row number), or there is no row at all.
    """
    rows: Iterator[Row]
    if source == "synthetic":
        rows = _synthetic_rows(split, seed, count, difficulty)
    elif source and Path(source).is_dir():
        rows = _dataset_rows(source, None, split)
    elif Path(source).is_file() or source.endswith((".jsonl", ".json")):
        rows = _jsonl_rows(Path(source))
    elif match := HUB_ID.fullmatch("openai/gsm8k/main" if source == "gsm8k" else source):
        rows = _dataset_rows(match["repository"], match["config"], match["split"] or split)
    else:
        raise InputError(
            f"data {source!r}: not synthetic, gsm8k, a JSONL file, a directory or a hub id (org/name:split)"
        )
    found = list(islice(rows, count))
    if not found:
        raise InputError(f"data {source!r} has no rows")
    return found


def to_row(record: Mapping[str, Any], where: str) -> Row:
    """Bring one record of any of the three forms into the common one.

    Raises:
        InputError: the record has none of the forms, or no answer; the message starts with ``where``.
    """
    if record.get("messages") is not None:
        messages = _checked_conversation(record["messages"], where)
    elif "question" in record or "answer" in record:
        answer = CALCULATOR_MARK.sub("", _text(record, "answer", where))
        messages = _pair(_text(record, "question", where), answer)
    elif "prompt" in record or "completion" in record:
        messages = _pair(_text(record, "prompt", where), _text(record, "completion", where))
    else:
        keys = ", ".join(record) or "none"
        raise InputError(f"{where}: no answer in this row: it has the keys {keys}; expected {EXPECTED}")
    for message in messages:
        try:
            message.content.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{where}: text that is not Unicode ({error})") from error
    return Row(messages, where)


def _synthetic_rows(split: str, seed: int, count: int | None, difficulty: Difficulty | None) -> Iterator[Row]:
    for index in range(SYNTHETIC_ROWS.get(split, 1) if count is None else count):
        problem = make_problem(split, index, seed=seed, difficulty=difficulty)
        yield to_row({"question": problem.question, "answer": problem.answer}, f"synthetic {split} row {index}")


def _jsonl_rows(path: Path) -> Iterator[Row]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"data file {str(path)!r} cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: syntax, encoding, integers past Python's limit
                raise InputError(f"{where}: not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise InputError(f"{where}: a row must be a JSON object, not {type(record).__name__}")
            yield to_row(record, where)


def _dataset_rows(path: str, config: str | None, split: str) -> Iterator[Row]:
    """Rows through ``datasets``, which reads data files only: it has not run a dataset's own code since version 4."""
    import datasets  # slow to import, and not needed for the other sources

    try:
        dataset: Iterable[Mapping[str, Any]] = datasets.load_dataset(path, config, split=split)
    except ConnectionError as error:
        raise InputError(
            f"the hub cannot be reached for data {path!r}: check the network, or download the dataset elsewhere and "
            "give its directory or a JSONL file"
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"data {path!r}, split {split!r}, cannot be loaded: {reason}") from error
    for index, record in enumerate(dataset):
        yield to_row(record, f"{path} {split} row {index}")


def _pair(question: str, answer: str) -> tuple[Message, ...]:
    return Message("user", question), Message("assistant", answer)


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        found = f"is {type(value).__name__}" if key in record and not isinstance(value, str) else "is empty"
        problem = found if key in record else "is missing"
        raise InputError(f"{where}: {key!r} {problem}; the row has the keys {', '.join(record)}; expected {EXPECTED}")
    return value


def _checked_conversation(turns: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InputError(f"{where}: 'messages' must be a list of objects with role and content")
    for number, turn in enumerate(turns, start=1):
        if turn.get("role") not in ROLES:
            raise InputError(
                f"{where}: message {number} has the role {turn.get('role')!r}; expected {', '.join(ROLES)}"
            )
        if not isinstance(turn.get("content"), str) or not turn["content"].strip():
            raise InputError(f"{where}: message {number} ({turn['role']}) has no text in 'content'")
    # Turns behind the last answer would be read but never answered.
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
    if last < 1:
        roles = ", ".join(turn["role"] for turn in turns) or "none"
        raise InputError(
            f"{where}: no answer in this row: its messages have the roles {roles}; an assistant must reply"
        )
    if turns[0]["role"] == "assistant":
        raise InputError(f"{where}: a conversation must not start with the assistant")
    return tuple(Message(turn["role"], turn["content"]) for turn in turns[: last + 1])
