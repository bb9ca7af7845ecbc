"""Checkpoints of named tensors, through ``torch.distributed.checkpoint`` into safetensors files: no pickle.

    save:  every rank writes its share of the tensors into PATH.saving --> all succeeded? --> rank 0 renames it to PATH
    load:  every rank reads what its own tensors need, straight into them

A directory with the final name is therefore whole. It holds ``shard-*.safetensors``, ``checkpoint.json`` (whatever the
caller adds), and further files of the caller's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_JSON = "checkpoint.json"
_FILE_BYTES = 2**30  # a file is put together in memory before it is written: this bounds the extra memory


def save(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any] | None = None,
    write_files: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint; called on all ranks of the world with the same names.

    Args:
        path: the directory to make; one that exists is replaced once the new one is whole.
        tensors: what every rank holds alike; each is written by one of the ranks.
        extra: JSON values to keep with them.
        write_files: called on rank 0 with the unfinished directory, to add files.

    Raises:
        RuntimeError: on every rank, when any rank could not write; nothing is visible under ``path`` then.
    """
    dcp = _distributed_checkpoint()
    path = Path(path)
    unfinished = path.with_name(path.name + ".saving")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
    _agree("", path)  # nobody writes before the leftovers are gone
    writer = dcp.HuggingFaceStorageWriter(str(unfinished), _file_numbers(tensors), save_distributed=True)
    try:
        with _single_process_allowed():
            dcp.save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    except Exception as error:
        raise RuntimeError(f"checkpoint {path} was not written: {error}") from error
    problem = ""
    if first:
        try:
            (unfinished / _JSON).write_text(json.dumps(dict(extra or {}), indent=1) + "\n", encoding="utf-8")
            if write_files is not None:
                write_files(unfinished)
            _publish(unfinished, path)
        except OSError as error:
            problem = str(error)
    _agree(problem, path)


def load(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` in place from a checkpoint; called on all ranks of the world, each with what it needs.

    Raises:
        ValueError: no whole checkpoint at ``path``, a damaged file, or a tensor that it lacks or has in another shape.
    """
    found = describe(path)
    for name, tensor in tensors.items():
        if name not in found:
            raise ValueError(f"checkpoint {path} has no {name}")
        if found[name].shape != tensor.shape:
            saved, wanted = list(found[name].shape), list(tensor.shape)
            raise ValueError(f"checkpoint {path}: {name} has shape {saved}, the model needs {wanted}")
    dcp = _distributed_checkpoint()
    reader = dcp.HuggingFaceStorageReader(str(path))
    with _single_process_allowed():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def describe(path: str | Path) -> dict[str, Tensor]:
    """Names, shapes and dtypes of a checkpoint, as tensors on the meta device.

    Raises:
        ValueError: no whole checkpoint at ``path``, or a damaged file.
    """
    dcp = _distributed_checkpoint()
    if not (Path(path) / _JSON).is_file():
        raise ValueError(f"{path} is not a checkpoint: it has no {_JSON}")
    try:
        stored = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # safetensors' own errors derive from Exception alone
        raise ValueError(f"checkpoint {path} is damaged: {error}") from error
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in stored.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }


def read_extra(path: str | Path) -> dict[str, Any]:
    """The JSON values that ``save`` was given as ``extra``."""
    file = Path(path) / _JSON
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a checkpoint: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return values


def _distributed_checkpoint() -> Any:
    """torch's package, imported when it is needed: that takes about a second."""
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("checkpoints need the package safetensors: pip install nanopar-core[checkpoint]")
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which of its files (from 1) a rank puts a tensor into, so that none is much larger than ``_FILE_BYTES``."""
    numbers, before = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + before // _FILE_BYTES
        before += tensor.numel() * tensor.element_size()
    return numbers


def _publish(unfinished: Path, path: Path) -> None:
    for file in unfinished.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    unfinished.rename(path)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _single_process_allowed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _agree(problem: str, path: Path) -> None:
    """Wait for all ranks; raise on every rank the problem that rank 0 met, if any."""
    told = [problem]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise RuntimeError(f"checkpoint {path} was not written: {told[0]}")
