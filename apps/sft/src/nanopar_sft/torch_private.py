"""The names of torch's that are not public and that nanopar-sft relies on; tests fail when torch changes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


@contextmanager
def every_allocation_noted() -> Iterator[None]:
    """Within the block torch's CPU allocator keeps account of all threads.

    By itself it does so only in threads that the profiler knows. gloo's worker threads drop the last reference to
    buffers outside of what the profiler knows, and these would be taken for memory in use for ever.

    Raises:
        RuntimeError: this build of torch has no such switch.
    """
    library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    try:
        switch = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    except ValueError:
        raise RuntimeError(
            f"torch {torch.__version__} lacks the switch that makes its CPU allocator account for all threads"
        ) from None
    before, switch.value = switch.value, True
    try:
        yield
    finally:
        switch.value = before
