"""What a training run records, and the two files it is recorded in.

    output_dir/metrics.jsonl        one JSON object per optimizer step:  {"step": 1, "loss": 3.9, ...}
    output_dir/evaluations.jsonl    one per evaluation:                  {"step": 0, "strict": 1, "total": 200, ...}

A resumed run adds its records at the end, so that a step it repeats is there twice: the last record of a step counts,
which is also what `read` returns. A fresh run starts both files anew.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"


class Traffic(TypedDict):
    """What one rank sent in a step by one operation over one axis."""

    calls: int
    bytes: int


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: number of the step; the first is 1.
        loss: mean loss per counted token of the global batch.
        grad_norm: global gradient norm before clipping.
        lr: learning rate that the step used.
        tokens: counted tokens (those that carry loss) of the global batch.
        tokens_per_second: all tokens that the model read in this step, over the time it took.
        peak_memory_bytes: highest memory use so far, the largest over all ranks.
        collectives: what one rank sent, by "operation/axis".
        skipped: the step changed nothing, because its gradients were not finite.
        mfu: share of the hardware's peak arithmetic in use, 0 to 1; None where the peak is not known.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    peak_memory_bytes: int
    collectives: Mapping[str, Traffic]
    skipped: bool = False
    mfu: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The record as `metrics.jsonl` holds it: a number that is not finite is null, an unknown `mfu` is left out."""
        record = {name: _finite(value) for name, value in asdict(self).items()}
        if self.mfu is None:
            del record["mfu"]
        return record


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on held-back problems.

    Attributes:
        step: optimizer steps before it; 0 is the model as it was loaded.
        strict: answers whose number after "####" is right.
        flexible: answers whose last number is right.
        total: number of problems answered; 0 where only the loss was measured.
        loss: mean loss per counted token of the reference answers.
    """

    step: int
    strict: int
    flexible: int
    total: int
    loss: float

    def as_json(self) -> dict[str, Any]:
        """The record as `evaluations.jsonl` holds it; a loss that is not a number is null."""
        return {name: _finite(value) for name, value in asdict(self).items()}


class JsonLines:
    """A file of JSON objects, one a line, each on disk as soon as it is written.

    Args:
        path: the file.
        resume: keep what is there (without a last line that a killed run left unfinished); otherwise start anew.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        if resume and path.exists():
            _drop_unfinished_line(path)
        self._file = path.open("a" if resume else "w", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file in order of their step, the last one of each step; empty if there is no file."""
    if not path.exists():
        return []
    records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_unfinished_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
