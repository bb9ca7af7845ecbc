"""What a training run tells its user while it runs: progress, files, a picture.

    StepRecord -> Reporter -+-> stderr              a progress bar on a terminal, a plain line now and then elsewhere
                            +-> metrics.jsonl       one JSON object per step
                            +-> tensorboard         with log=tensorboard
    Evaluation -> Reporter -+-> stderr, evaluations.jsonl, tensorboard
    end of the run ---------+-> loss.png

One rank reports; on the others a `Reporter` made with `enabled=False` takes the same calls and does nothing. Standard
output is left to results.
"""

import importlib.util
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from nanopar_sft import plot as picture
from nanopar_sft.errors import InputError
from nanopar_sft.metrics import EVALUATIONS, METRICS, Evaluation, JsonLines, StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LINES_PER_RUN = 20  # plain lines, where there is no terminal ...
LINE_EVERY_S = 30.0  # ... and one at least this often


def check_log(log: str) -> None:
    """Raise InputError, naming the extra to install, if the package behind `log` is missing."""
    if log == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            'log=tensorboard needs a package that is not installed: pip install "nanopar-sft[tensorboard]"'
        )


class Reporter:
    """Shows and records a training run. Use it as a context manager.

    Args:
        output_dir: where files go; made if missing.
        total_steps: number of the last step.
        start_step: steps that were done before this run (more than 0 after a resume).
        log: "none" or "tensorboard".
        plot: whether to draw the loss at the end.
        enabled: False on all ranks but the one that reports.

    Raises:
        InputError: the package behind `log` is missing.
    """

    def __init__(
        self,
        output_dir: Path,
        total_steps: int,
        *,
        start_step: int = 0,
        log: str = "none",
        plot: bool = True,
        enabled: bool = True,
    ) -> None:
        check_log(log)
        self._enabled = enabled
        if not enabled:
            return
        self._output_dir = output_dir
        self._plot = plot
        output_dir.mkdir(parents=True, exist_ok=True)
        self._open = ExitStack()
        resume = start_step > 0
        self._metrics = self._open.enter_context(JsonLines(output_dir / METRICS, resume=resume))
        self._evaluations = self._open.enter_context(JsonLines(output_dir / EVALUATIONS, resume=resume))
        self._board = _tensorboard(output_dir, start_step, self._open) if log == "tensorboard" else None
        if sys.stderr.isatty():
            self._display: _Bar | _Lines = self._open.enter_context(_Bar(total_steps, start_step))
        else:
            self._display = _Lines(total_steps, start_step)

    def note(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._enabled:
            self._display.note(text)

    def step(self, record: StepRecord) -> None:
        """Show and record one optimizer step."""
        if not self._enabled:
            return
        self._metrics.write(record.as_json())
        self._display.step(record)
        if record.skipped:
            self.note(f"step {record.step}: skipped, its gradients were not finite")
        if self._board:
            for name in ("loss", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes"):
                self._board.add_scalar(f"train/{name}", getattr(record, name), record.step)

    def evaluation(self, step: int, strict: int, flexible: int, total: int, loss: float) -> None:
        """Show and record an evaluation after `step` steps: right answers of `total`, read in two ways, and loss."""
        if not self._enabled:
            return
        self._evaluations.write(Evaluation(step, strict, flexible, total, loss).as_json())
        text = f"step {step}: held-back loss {loss:.4f}"
        if total:
            text += f", exact match {strict}/{total} = {strict / total:.1%} (last number: {flexible / total:.1%})"
        self.note(text)
        if self._board:
            self._board.add_scalar("eval/loss", loss, step)
            if total:
                self._board.add_scalar("eval/strict", strict / total, step)
                self._board.add_scalar("eval/flexible", flexible / total, step)

    def close(self) -> None:
        """End the bar, close the files and draw the picture; a second call does nothing."""
        if not self._enabled:
            return
        self._enabled = False
        self._open.close()
        path = picture.draw(self._output_dir) if self._plot else None
        if path:
            print(f"loss curve: {path}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Bar:
    """A progress bar, for terminals."""

    def __init__(self, total_steps: int, start_step: int) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            console=Console(stderr=True),
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=start_step, numbers="")

    def step(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step, numbers=numbers(record))

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class _Lines:
    """A plain line now and then, for logs."""

    def __init__(self, total_steps: int, start_step: int) -> None:
        self._total = total_steps
        self._start_step = start_step
        self._interval = max(1, (total_steps - start_step) // LINES_PER_RUN)
        self._started = self._last_line = time.monotonic()

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        done = record.step - self._start_step
        due = done == 1 or record.step == self._total or done % self._interval == 0
        if not due and now - self._last_line < LINE_EVERY_S:
            return
        self._last_line = now
        left_s = (now - self._started) / done * (self._total - record.step)
        self.note(f"step {record.step}/{self._total} {numbers(record)} {clock(left_s)} left")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def numbers(record: StepRecord) -> str:
    """The figures of a step in words short enough for one line of a terminal."""
    return (
        f"loss {record.loss:.4f} norm {record.grad_norm:.2f} lr {record.lr:.1e} "
        f"{record.tokens_per_second:,.0f} tok/s {record.peak_memory_bytes / 2**30:.2f} GiB"
    )


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on.

    >>> clock(83), clock(3723)
    ('1:23', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _tensorboard(output_dir: Path, start_step: int, stack: ExitStack) -> "SummaryWriter":
    """A writer into output_dir/tensorboard; after a resume it hides the steps that will be repeated."""
    from torch.utils.tensorboard import SummaryWriter

    purge_step = start_step + 1 if start_step else None
    writer: SummaryWriter = SummaryWriter(str(output_dir / "tensorboard"), purge_step=purge_step)
    stack.callback(writer.close)
    return writer
