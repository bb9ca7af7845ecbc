"""Checkpoints of named tensors in safetensors files, written through ``torch.distributed.checkpoint``: no pickle.

    save:  every rank writes its tensors into PATH.saving --> all succeeded? --> rank 0 renames it to PATH
    read:  every rank opens all files, of which only what it uses is read from the disk

A directory with the final name is therefore whole. It holds ``shard-*.safetensors``, further files of the caller's, and
``checkpoint.json``: the size of every file, and whatever the caller adds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
    """Write a checkpoint; called on all ranks of the world.

    Args:
        path: the directory to make; one that exists is replaced once the new one is whole.
        tensors: whole tensors that this rank has, other ones than other ranks or the same. What several ranks have must
            be alike on these, and is written by one of them.
        extra: JSON values to keep with them; those of rank 0 count.
        write_files: called on rank 0 with the unfinished directory, to add files.

    Raises:
        RuntimeError: on every rank, when any rank could not write; nothing is visible under ``path`` then.
    """
    _need_safetensors()
    dcp = _distributed_checkpoint()
    path = Path(path)
    unfinished = path.with_name(path.name + ".saving")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _agree("", path)  # nobody writes before the leftovers are gone
        writer = dcp.HuggingFaceStorageWriter(str(unfinished), _file_numbers(tensors), save_distributed=True)
        with _single_process_allowed():
            dcp.save(_writable(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as error:  # of one rank or several, told to all; no Exception by its class
        told = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
        raise RuntimeError(f"checkpoint {path} was not written: {told}") from None
    except Exception as error:
        raise RuntimeError(f"checkpoint {path} was not written: {error}") from error
    problem = ""
    if first:
        try:
            if write_files is not None:
                write_files(unfinished)
            _publish(unfinished, path, dict(extra or {}))
        except OSError as error:
            problem = str(error)
    _agree(problem, path)


@contextmanager
def reading(path: str | Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint by name, mapped from its files: only what is used of them is read from the disk.

    ``tensors[name].view(-1)[100:200]`` reads these elements alone. Copy them to keep them: they are valid inside the
    block only. No communication: each rank may read what it needs.

    Raises:
        ValueError: no whole checkpoint at ``path``, or a file that is missing or damaged, by name.
    """
    _need_safetensors()
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    _check_files(path)
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for file in sorted(path.glob("*.safetensors")):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
                tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping
            except SafetensorError as error:
                raise ValueError(f"checkpoint {path} is damaged: {file.name}: {error}") from error
        yield tensors


def load(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` in place from a checkpoint, each rank what it needs.

    Raises:
        ValueError: no whole checkpoint at ``path``, a damaged file, or a tensor that it lacks or has in another shape.
    """
    with reading(path) as stored:
        for name, tensor in tensors.items():
            if name not in stored:
                raise ValueError(f"checkpoint {path} has no {name}")
            if stored[name].shape != tensor.shape:
                saved, wanted = list(stored[name].shape), list(tensor.shape)
                raise ValueError(f"checkpoint {path}: {name} has shape {saved}, the model needs {wanted}")
        for name, tensor in tensors.items():
            tensor.detach().copy_(stored[name])


def describe(path: str | Path) -> dict[str, Tensor]:
    """Names, shapes and dtypes of a checkpoint, as tensors on the meta device.

    Raises:
        ValueError: no whole checkpoint at ``path``, or a damaged file.
    """
    with reading(path) as stored:
        return {name: torch.empty_like(tensor, device="meta") for name, tensor in stored.items()}


def read_extra(path: str | Path) -> dict[str, Any]:
    """The JSON values that ``save`` was given as ``extra``.

    Raises:
        ValueError: no whole checkpoint at ``path``.
    """
    extra: dict[str, Any] = _read_json(Path(path))["extra"]
    return extra


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads((path / _JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a checkpoint: {error}") from error
    if not (isinstance(values, dict) and all(isinstance(values.get(key), dict) for key in ("files", "extra"))):
        raise ValueError(f"{path} is not a checkpoint: {_JSON} does not name its files")
    return values


def _check_files(path: Path) -> None:
    for name, size in _read_json(path)["files"].items():
        if not (path / name).is_file():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
        if (found := (path / name).stat().st_size) != size:
            raise ValueError(f"checkpoint {path} is damaged: {name} has {found} bytes, it was written with {size}")


def _need_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("checkpoints need the package safetensors: pip install nanopar-core[checkpoint]")


def _distributed_checkpoint() -> Any:
    """torch's package, imported when it is needed: that takes about a second."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def _writable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and no two the same storage, which safetensors refuses; parts of one storage are copied by torch."""
    seen: set[int] = set()
    writable = {}
    for name, given in tensors.items():
        tensor = given.detach().contiguous()
        storage = tensor.untyped_storage()
        is_whole = storage.nbytes() == tensor.nbytes and tensor.numel() > 0
        writable[name] = tensor.clone() if is_whole and storage.data_ptr() in seen else tensor
        seen |= {storage.data_ptr()} if is_whole else set()
    return writable


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which of its files (from 1) a rank puts a tensor into, so that none is much larger than ``_FILE_BYTES``.

    Of the names of all ranks, since torch takes rank 0's numbers for all.
    """
    numbers, before = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + before // _FILE_BYTES
        before += tensor.numel() * tensor.element_size()
    if not dist.is_initialized():
        return numbers
    of_all: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, numbers)
    return {name: number for of_one in of_all for name, number in of_one.items()}


def _publish(unfinished: Path, path: Path, extra: dict[str, Any]) -> None:
    """The last file says how large the others are; then everything is on the disk; then it gets its name."""
    unfinished.mkdir(exist_ok=True)
    files = sorted(file for file in unfinished.rglob("*") if file.is_file())
    about = {"files": {file.relative_to(unfinished).as_posix(): file.stat().st_size for file in files}, "extra": extra}
    (unfinished / _JSON).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    for file in (*files, unfinished / _JSON, unfinished):
        _to_disk(file)
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    unfinished.rename(path)
    _to_disk(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
