"""Which checkpoints of a run are kept, and which are set aside."""

from pathlib import Path

import pytest

from nanopar_sft.checkpoints import all_checkpoints, checkpoint_path, newest_checkpoint, remove_old, set_aside


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (2, 4, 6, 10):
        checkpoint_path(tmp_path, step).mkdir(parents=True)
        (checkpoint_path(tmp_path, step) / "file").write_text(str(step))
    (tmp_path / "checkpoints" / "step-000012.saving").mkdir()
    return tmp_path


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in all_checkpoints(folder)]


def test_the_newest_come_first_and_unfinished_ones_do_not_count(folder: Path) -> None:
    assert steps(folder) == [10, 6, 4, 2]
    assert newest_checkpoint(folder) == checkpoint_path(folder, 10)
    assert newest_checkpoint(folder / "nothing") is None


def test_the_one_just_written_is_kept_whatever_lies_beyond(folder: Path) -> None:
    remove_old(checkpoint_path(folder, 6), 2)
    assert steps(folder) == [10, 6, 4], "10 is of another branch, or damaged: not ours to count or remove"
    remove_old(checkpoint_path(folder, 6), None)
    assert steps(folder) == [10, 6, 4]
    remove_old(checkpoint_path(folder, 10), 1)
    assert steps(folder) == [10]


def test_what_another_branch_has_saved_is_set_aside(folder: Path) -> None:
    assert [path.name for path in set_aside(folder, 4)] == ["aside-step-000010", "aside-step-000006"]
    assert steps(folder) == [4, 2]
    checkpoint_path(folder, 6).mkdir()
    assert [path.name for path in set_aside(folder, 4)] == ["aside-step-000006"], "an older one gives way"
    assert set_aside(folder, 4) == []
