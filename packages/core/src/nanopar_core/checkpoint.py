"""Checkpoints of named tensors in safetensors files, written through ``torch.distributed.checkpoint``: no pickle.

    begin    what several ranks have is written by one of them; each copies what it will write    (training waits)
    write    every rank by itself, in a thread, into PATH.saving                                   (training goes on)
    finish   all succeeded? --> rank 0 renames it to PATH                                          (training waits)
    read     every rank opens all files, of which only what it uses is read from the disk

A directory with the final name is therefore whole. It holds ``rank-*.safetensors``, further files of the caller's, and
``checkpoint.json``: size and checksum of every file, and whatever the caller adds.

A tensor may lie in boxes on many ranks, however they are cut; what is read may be cut in any other way:

    saved by 2 ranks   | 0 0 0 | 1 1 1 |        a file's key of a box:   NAME@3.0of6.4
    read by 3 ranks    | 0 0 | 1 1 | 2 2 |                               first place by dim, shape of the whole
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_JSON = "checkpoint.json"
_FILE_BYTES = 2**30  # a file is put together in memory before it is written: this bounds the extra memory
_BOX = re.compile(r"(.+)@(\d+(?:\.\d+)*)of(\d+(?:\.\d+)*)")
_AT_ONCE = 2**24  # bytes, for checksums


@dataclass(frozen=True)
class Parts:
    """Some boxes of a tensor.

    Attributes:
        shape: of the whole.
        boxes: by the place of their first element.
    """

    shape: tuple[int, ...]
    boxes: Mapping[tuple[int, ...], Tensor]


class Stored:
    """A tensor of a checkpoint, mapped from its files: only what is used is read from the disk."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, torch.Size(shape), dtype
        self._boxes: list[tuple[tuple[range, ...], Tensor]] = []

    def add(self, first: tuple[int, ...], box: Tensor) -> None:
        """One more box, at this place.

        Raises:
            ValueError: it is not of this tensor.
        """
        ranges = tuple(range(start, start + length) for start, length in zip(first, box.shape, strict=True))
        fits = all(one.stop <= length for one, length in zip(ranges, self.shape, strict=True))
        if box.dtype != self.dtype or not fits:
            raise ValueError(f"{self.name}: a box {list(box.shape)} at {list(first)} is not of {list(self.shape)}")
        self._boxes.append((ranges, box))

    def read(self, ranges: Sequence[range] | None = None, *, out: Tensor | None = None) -> Tensor:
        """A copy of what lies at these places, one range of each dim (default: all of it), in ``out`` if given.

        Raises:
            ValueError: the files lack some of it.
        """
        ranges = [range(length) for length in self.shape] if ranges is None else list(ranges)
        out = torch.empty([len(one) for one in ranges], dtype=self.dtype) if out is None else out
        copied, used = 0, 0
        for places, box in self._boxes:
            common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(ranges, places, strict=True)]
            if all(common):
                here = tuple(slice(c.start - a.start, c.stop - a.start) for c, a in zip(common, ranges, strict=True))
                there = tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(common, places, strict=True))
                out[here].copy_(box[there])
                copied += prod(map(len, common))
                used += 1
        if copied < out.numel() or (used > 1 and not self._covers(ranges)):
            raise ValueError(f"the files lack a part of {self.name}")
        return out

    def _covers(self, ranges: Sequence[range]) -> bool:
        """Whether several boxes, which may overlap, leave nothing out."""
        seen = torch.zeros([len(one) for one in ranges], dtype=torch.bool)
        for places, _ in self._boxes:
            here = (
                slice(max(b.start - a.start, 0), max(b.stop - a.start, 0)) for a, b in zip(ranges, places, strict=True)
            )
            seen[tuple(here)] = True
        return bool(seen.all())


def save(
    path: str | Path,
    tensors: Mapping[str, Tensor | Parts],
    extra: Mapping[str, Any] | None = None,
    write_files: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint; called on all ranks of the world.

    Args:
        path: the directory to make; one that exists is replaced once the new one is whole.
        tensors: what this rank has, other tensors or boxes than other ranks or the same. What several ranks have must
            be alike on these, and is written by one of them.
        extra: JSON values to keep with them; those of rank 0 count.
        write_files: called on rank 0 with the unfinished directory, to add files.

    Raises:
        RuntimeError: on every rank, when any rank could not write; nothing is visible under ``path`` then.
    """
    Saving(path, tensors, extra, write_files, in_background=False).finish()


class Saving:
    """A checkpoint that is being written while training goes on; made on all ranks, arguments as of ``save``.

    Tensors are copied before this returns. The directory appears in ``finish``, not before.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, Tensor | Parts],
        extra: Mapping[str, Any] | None = None,
        write_files: Callable[[Path], None] | None = None,
        *,
        in_background: bool = True,
    ) -> None:
        _need_safetensors()
        self.path = Path(path)
        self._unfinished = self.path.with_name(self.path.name + ".saving")
        self._extra, self._write_files = dict(extra or {}), write_files
        self._problem = ""
        self._files: dict[str, tuple[int, int]] = {}
        rank = dist.get_rank() if dist.is_initialized() else 0
        if not rank:
            shutil.rmtree(self._unfinished, ignore_errors=True)
        own = _share_out(dict(_keyed(tensors)), rank)  # nobody writes before the leftovers are gone: ranks meet here
        if in_background:
            own = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in own.items()}
        self._thread = threading.Thread(target=self._write, args=(own, rank), daemon=True) if in_background else None
        if self._thread is None:
            self._write(own, rank)
        else:
            self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part, or has failed to."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for all ranks' parts, and give the directory its name; called on all ranks.

        Raises:
            RuntimeError: on every rank, when any rank could not write; nothing is visible under ``path`` then.
        """
        if self._thread is not None:
            self._thread.join()
        of_all = _gathered((self._problem, self._files))
        told = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(of_all) if problem]
        problem, first = "; ".join(told), not dist.is_initialized() or dist.get_rank() == 0
        if not problem and first:
            try:
                if self._write_files is not None:
                    self._write_files(self._unfinished)
                files = {name: about for _, of_rank in of_all for name, about in of_rank.items()}
                _publish(self._unfinished, self.path, files, self._extra)
            except Exception as error:  # the other ranks wait for word
                problem = str(error) or type(error).__name__
        problem = _gathered(problem)[0]
        if problem:
            if first:
                shutil.rmtree(self._unfinished, ignore_errors=True)  # on a full disk the next one needs the room
            raise RuntimeError(f"checkpoint {self.path} was not written: {problem}")

    def _write(self, own: Mapping[str, Tensor], rank: int) -> None:
        dcp = _distributed_checkpoint()
        folder = self._unfinished / f"rank-{rank:05d}"
        try:
            folder.mkdir(parents=True)
            if own:
                writer = dcp.HuggingFaceStorageWriter(str(folder), _file_numbers(own), save_distributed=True)
                with _single_process_allowed():
                    dcp.save(_writable(own), storage_writer=writer, no_dist=True)
            for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
                final = self._unfinished / f"{folder.name}-{number:05d}.safetensors"
                file.rename(final)
                _to_disk(final)
                self._files[final.name] = final.stat().st_size, _checksum(final)
            shutil.rmtree(folder)
        except dcp.api.CheckpointException as error:  # which is no Exception by its class
            self._problem = "; ".join(str(failure) for failure, _ in error.failures.values())
        except Exception as error:
            self._problem = str(error) or type(error).__name__


@contextmanager
def reading(path: str | Path) -> Iterator[dict[str, Stored]]:
    """The tensors of a checkpoint by name, valid inside the block. No communication: each rank reads what it needs.

    Raises:
        ValueError: no whole checkpoint at ``path``, or a file that is missing or damaged, by name.
    """
    _need_safetensors()
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    _check_files(path)
    tensors: dict[str, Stored] = {}
    with ExitStack() as stack:
        for file in sorted(path.glob("*.safetensors")):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
                for key in handle.keys():  # noqa: SIM118 - no mapping
                    name, first, shape, box = _unkeyed(key, handle.get_tensor(key))
                    stored = tensors.setdefault(name, Stored(name, shape, box.dtype))
                    if stored.shape != shape:
                        raise ValueError(f"{name} is {list(shape)} here, {list(stored.shape)} elsewhere")
                    stored.add(first, box)
            except (SafetensorError, ValueError) as error:
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
            stored[name].read(out=tensor.detach())


def describe(path: str | Path) -> dict[str, Tensor]:
    """Names, shapes and dtypes of a checkpoint, as tensors on the meta device.

    Raises:
        ValueError: no whole checkpoint at ``path``, or a damaged file.
    """
    with reading(path) as stored:
        return {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in stored.items()}


def verify(path: str | Path) -> None:
    """Read all files and compare their checksums; called on all ranks of the world, of which each reads some files.

    Raises:
        ValueError: on every rank: no whole checkpoint at ``path``, or a damaged file, by name.
    """
    path, problem = Path(path), ""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        _check_files(path)
        for name, (_, checksum) in sorted(_read_json(path)["files"].items())[rank::ranks]:
            if _checksum(path / name) != checksum:
                problem = f"checkpoint {path} is damaged: {name} is not what was written"
    except (OSError, ValueError) as error:
        problem = str(error)
    refuse_together(problem)


def refuse_together(problem: str) -> None:
    """Called on all ranks of the world before any of them changes something: raise if one has a problem.

    Raises:
        ValueError: on every rank, what the first that has one says.
    """
    if first := next(filter(None, _gathered(problem)), ""):
        raise ValueError(first)


def read_extra(path: str | Path) -> dict[str, Any]:
    """The JSON values that ``save`` was given as ``extra``.

    Raises:
        ValueError: no whole checkpoint at ``path``.
    """
    extra: dict[str, Any] = _read_json(Path(path))["extra"]
    return extra


# ---------------------------------------------------------------------------------------------- tensors and their keys


def _keyed(tensors: Mapping[str, Tensor | Parts]) -> Iterator[tuple[str, Tensor]]:
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            yield name, value
            continue
        for first, box in value.boxes.items():
            is_whole = tuple(box.shape) == tuple(value.shape)
            yield name if is_whole else f"{name}@{'.'.join(map(str, first))}of{'.'.join(map(str, value.shape))}", box


def _unkeyed(key: str, tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], Tensor]:
    """Name, place and shape of the whole."""
    found = _BOX.fullmatch(key)
    if found is None:
        return key, (0,) * tensor.dim(), tuple(tensor.shape), tensor
    first, shape = (tuple(map(int, text.split("."))) for text in found.groups()[1:])
    if not len(first) == len(shape) == tensor.dim():
        raise ValueError(f"the key {key} does not fit a tensor {list(tensor.shape)}")
    return found[1], first, shape, tensor


def _share_out(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What this rank writes: of what several have, one, so that all write about equally much."""
    of_all = _gathered({key: tensor.nbytes for key, tensor in tensors.items()})
    holders: dict[str, list[int]] = {}
    for number, keys in enumerate(of_all):
        for key in keys:
            holders.setdefault(key, []).append(number)
    written = [0] * len(of_all)
    own = {}
    for key, ranks in sorted(holders.items(), key=lambda item: len(item[1])):  # first what only one rank has
        writer = min(ranks, key=written.__getitem__)
        written[writer] += of_all[writer][key]
        if writer == rank:
            own[key] = tensors[key]
    return own


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
    """Which of its files (from 1) a rank puts a tensor into, so that none is much larger than ``_FILE_BYTES``."""
    numbers, before = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + before // _FILE_BYTES
        before += tensor.nbytes
    return numbers


# ------------------------------------------------------------------------------------------------- files and directory


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads((path / _JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a checkpoint: {error}") from error
    if not (isinstance(values, dict) and all(isinstance(values.get(key), dict) for key in ("files", "extra"))):
        raise ValueError(f"{path} is not a checkpoint: {_JSON} does not name its files")
    for name, about in values["files"].items():
        numbers = about if isinstance(about, list) and len(about) == 2 else [None]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError(f"{path} is not a checkpoint: {_JSON} says no size and checksum of {name}")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} is not a checkpoint: {_JSON} points outside of it: {name!r}")
    return values


def _check_files(path: Path) -> None:
    for name, (size, _) in _read_json(path)["files"].items():
        if not (path / name).is_file():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
        if (found := (path / name).stat().st_size) != size:
            raise ValueError(f"checkpoint {path} is damaged: {name} has {found} bytes, it was written with {size}")


def _publish(unfinished: Path, path: Path, written: Mapping[str, tuple[int, int]], extra: dict[str, Any]) -> None:
    """The last file says what the others are; then everything is on the disk; then it gets its name."""
    unfinished.mkdir(exist_ok=True)
    added = [file for file in sorted(unfinished.rglob("*")) if file.is_file() and file.name not in written]
    files = {name: list(about) for name, about in written.items()}
    for file in added:
        files[file.relative_to(unfinished).as_posix()] = [file.stat().st_size, _checksum(file)]
    about = {"files": files, "extra": extra}
    (unfinished / _JSON).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    for file in (*added, unfinished / _JSON, unfinished):
        _to_disk(file)
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    unfinished.rename(path)
    _to_disk(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _checksum(path: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_AT_ONCE):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------- helpers


def _need_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("checkpoints need the package safetensors: pip install nanopar-core[checkpoint]")


def _distributed_checkpoint() -> Any:
    """torch's package, imported when it is needed: that takes about a second."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


@contextmanager
def _single_process_allowed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _gathered(value: Any) -> list[Any]:
    """The values of all ranks of the world, in their order."""
    of_all = [value]
    if dist.is_initialized():
        of_all = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, value)
    return of_all
