"""``MemoryCounter``: exactly how many bytes of tensors exist, and the most there ever were.

    with MemoryCounter(device) as counter:      from before the model is built
        build, two steps
        with counter.window("step"):            the peak inside is what counts
            one step
    counter.windows["step"].peak, .start, .end

On CUDA the figures are the caching allocator's own. On the CPU torch's allocator keeps a running total of the bytes it
has handed out, over all threads, and torch's profiler notes it at every allocation and release: the largest one noted
is the peak. What is counted and what is not:

    counted        storages of all tensors, those that kernels allocate for themselves and those of C++ code, such as
                   DDP's buckets, gloo's copies of tensors and what autograd saved
    not counted    what is not torch's: the sockets' buffers, the scratch memory of oneDNN and MKL, Python's objects;
                   and what existed before the counter was opened

A dispatch mode that watches storages gives the same figures where kernels have no temporaries, and cannot see those.
Replaying the profiler's allocations alone takes for used what a thread unknown to it released. A counter of all
malloc'd blocks counts the libraries' scratch memory too. The resident set is no use: freed pages may stay in it.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanopar_sft.torch_private import every_allocation_noted

_WINDOW = "nanopar memory window "
_CPU = 0  # "Device Type" in the profiler's trace


class Window(NamedTuple):
    """Bytes above what there was when the counter was opened: at the window's start, at its end, and the most."""

    start: int
    end: int
    peak: int


class Moment(NamedTuple):
    """The bytes in use after one allocation or release; time in microseconds."""

    time: float
    total: int


class MemoryCounter:
    """Counts from ``__enter__`` on; ``windows`` holds the figures, by name, after ``__exit__``. One per process.

    The peak of a window is missed only where threads that the profiler does not know make it all by themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self.windows: dict[str, Window] = {}
        self._device = device
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._open = ExitStack()
        self._base = 0

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()  # what exists now does not count: the collections in a window need not look at it again
        if self._device.type == "cuda":
            self._base = torch.cuda.memory_allocated(self._device)
        else:
            self._open.enter_context(every_allocation_noted())
            self._open.enter_context(self._profiler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        gc.unfreeze()
        if self._device.type != "cuda" and error is None:
            self.windows = _read_trace(self._profiler)

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """A stretch of time whose figures are wanted."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            start = torch.cuda.memory_allocated(self._device)
            yield
            gc.collect()
            figures = (start, torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device))
            self.windows[name] = Window(*(figure - self._base for figure in figures))
        else:
            with record_function(_WINDOW + name):
                yield
                gc.collect()
                torch.empty(1)  # the total is noted again: what threads unknown to the profiler have let go of counts


def _read_trace(profiler: profile) -> dict[str, Window]:
    """The windows of a finished profile, by name."""
    with tempfile.TemporaryDirectory(prefix="nanopar-memory-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    notes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == _CPU]
    notes.sort(key=lambda event: event["ts"])  # stable: those of one time stay in the order in which they were noted
    base = notes[0]["args"]["Total Allocated"] - notes[0]["args"]["Bytes"] if notes else 0
    moments = [Moment(event["ts"], event["args"]["Total Allocated"] - base) for event in notes]
    return {
        event["name"].removeprefix(_WINDOW): between(moments, event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith(_WINDOW) and event["ph"] == "X"
    }


def between(moments: Iterable[Moment], start: float, end: float) -> Window:
    """The figures of a stretch of time out of all moments, in order."""
    before = now = peak = 0
    for time, total in moments:
        if time > end:
            break
        now = total
        if time < start:
            before = peak = now
        peak = max(peak, now)
    return Window(before, now, peak)
