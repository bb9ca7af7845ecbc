"""Where a run keeps its checkpoints: ``output_dir/checkpoints/step-000100``; a directory of that name is whole."""

from pathlib import Path

FOLDER = "checkpoints"


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """The checkpoint of one step."""
    return output_dir / FOLDER / f"step-{step:06d}"


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The checkpoint with the highest step."""
    found = [path for path in (output_dir / FOLDER).glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)
