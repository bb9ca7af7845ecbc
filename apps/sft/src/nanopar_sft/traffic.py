"""What a step sends: calls by kind for any library, and the bytes that really left the process."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanopar_sft.torch_private import TorchDispatchMode

# torch's operators and what they are called here. The first that is part of an operator's name gives it.
KINDS = {
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "recv": "recv",
    "send": "send",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class CallCounter(TorchDispatchMode):
    """Counts torch's collectives, from Python or C++, while it is active: ``counter.calls["all_reduce"]``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count the operator if it is a collective, and run it."""
        if func.namespace in NAMESPACES:
            name = str(func)
            kind = next((kind for part, kind in KINDS.items() if part in name), None)
            if kind is not None:  # else a wait or a barrier, which move no tensor
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def written_bytes() -> int | None:
    """Bytes that this process has handed to write calls, gloo's messages among them; None where nobody counts."""
    if sys.platform != "linux":
        return None
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(counters["wchar"])
