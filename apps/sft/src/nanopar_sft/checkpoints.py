"""Where a run keeps its checkpoints: ``output_dir/checkpoints/step-000100``; a directory of that name is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from nanopar_core import checkpoint
from nanopar_sft.errors import InputError

FOLDER = "checkpoints"


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """The checkpoint of one step."""
    return output_dir / FOLDER / f"step-{step:06d}"


def all_checkpoints(output_dir: Path) -> list[Path]:
    """Those of a run, the newest first."""
    found = [path for path in (output_dir / FOLDER).glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=_step, reverse=True)


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The checkpoint with the highest step."""
    return next(iter(all_checkpoints(output_dir)), None)


def newest_whole_checkpoint(output_dir: Path, note: Callable[[str], None]) -> Path | None:
    """The newest one whose files are what was written; others are noted and passed over. Called on all ranks."""
    for path in all_checkpoints(output_dir):
        try:
            checkpoint.verify(path)
        except ValueError as error:
            note(f"WARNING: passed over: {error}")
        else:
            return path
    return None


def checkpoint_of(resume: str, output_dir: Path) -> Path:
    """The directory that the key ``resume`` names, by itself or as ``auto``.

    Raises:
        InputError: there is none.
    """
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise InputError(f"resume={path}: no such checkpoint directory (use 'auto' for the newest in output_dir)")
        return path
    newest = newest_checkpoint(output_dir)
    if newest is None:
        raise InputError(f"resume=auto: there is no checkpoint in {output_dir}")
    return newest


def checkpoint_to_read(resume: str, output_dir: Path, note: Callable[[str], None]) -> Path | None:
    """The one that the key ``resume`` names, read and compared once; for ``auto`` None if none is whole.

    Called on all ranks.

    Raises:
        InputError: the named one is not there, or damaged.
    """
    if resume == "auto":
        return newest_whole_checkpoint(output_dir, note)
    path = checkpoint_of(resume, output_dir)
    try:
        checkpoint.verify(path)
    except ValueError as error:
        raise InputError(f"resume={path}: {error}") from None
    return path


def remove_old(newest: Path, keep: int | None) -> None:
    """Of the checkpoint just written and those before it keep so many; None keeps all."""
    before = [path for path in all_checkpoints(newest.parent.parent) if _step(path) <= _step(newest)]
    for path in before[keep:] if keep else ():
        shutil.rmtree(path, ignore_errors=True)


def set_aside(output_dir: Path, after: int) -> list[Path]:
    """Rename what was saved after a step, from which another branch of the run begins; the new names."""
    moved = []
    for path in all_checkpoints(output_dir):
        if _step(path) > after:
            aside = path.with_name(f"aside-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            moved.append(path.rename(aside))
    return moved


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
