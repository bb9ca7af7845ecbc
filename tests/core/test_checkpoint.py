"""Checkpoints are whole or not there: what several ranks write, what is read of it, and everything that goes wrong."""

import json
import os
import shutil
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanopar_core.testing import run

pytest.importorskip("safetensors")

from safetensors.torch import load_file

from nanopar_core import checkpoint


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def odd_tensors() -> dict[str, Tensor]:
    """Every dtype and shape that weights and optimizer states come in, and parts of larger storage."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    return {
        "matrix": large[1:3],
        "column": large[:, 3],
        "turned": large.t(),
        "half": large[0].bfloat16(),
        "all of it": large,
        "all of it again": large,
        "single": large[1].float(),
        "count": torch.tensor(7.0),
        "number": torch.tensor([3], dtype=torch.int64),
        "flags": large[0] > 0,
        "empty": torch.empty(0, 3),
        "another empty": torch.empty(2, 0),
    }


def files_of(path: Path) -> dict[str, Tensor]:
    """The tensors as safetensors' own reader finds them; a name in two files would be an error."""
    found: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert name not in found, f"{name} is in two files"
            found[name] = tensor
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


# ---------------------------------------------------------------------------------------------- what is written


def save_odd(path: str) -> None:
    checkpoint.save(path, odd_tensors(), {"step": 3, "by": rank()}, lambda folder: add_file(folder))


def add_file(folder: Path) -> None:
    assert rank() == 0
    (folder / "words.txt").write_text("hello")
    (folder / "more").mkdir()
    (folder / "more" / "deep.txt").write_text("deep")


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_what_all_ranks_have_is_written_once(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "c"
    if ranks:
        run(ranks, save_odd, str(path))
    else:
        save_odd(str(path))
    assert_same(files_of(path), odd_tensors())
    assert checkpoint.read_extra(path) == {"step": 3, "by": 0}
    assert (path / "more" / "deep.txt").read_text() == "deep"
    assert not list(tmp_path.glob("c.*")), "no leftovers"
    described = checkpoint.describe(path)
    assert {name: (t.shape, t.dtype) for name, t in described.items()} == {
        name: (t.shape, t.dtype) for name, t in odd_tensors().items()
    }
    assert all(tensor.is_meta for tensor in described.values())
    places = {name: torch.zeros_like(tensor) for name, tensor in odd_tensors().items()}
    checkpoint.load(path, places)
    assert_same(places, odd_tensors())


def own_tensors(of: int) -> dict[str, Tensor]:
    """Rank 1 has nothing of its own."""
    own = [] if of == 1 else [(f"rank {of} {n}", torch.full((n, 2), 10.0 * of + n)) for n in range(1, 4)]
    return dict([*own, ("for all", torch.arange(5))])


def save_own(path: str) -> None:
    checkpoint._FILE_BYTES = 20  # several files on each rank
    checkpoint.save(path, own_tensors(rank()))


def test_each_rank_may_have_other_tensors(tmp_path: Path) -> None:
    path = tmp_path / "c"
    run(3, save_own, str(path))
    expected = own_tensors(0) | own_tensors(1) | own_tensors(2)
    assert_same(files_of(path), expected)
    assert len(list(path.glob("*.safetensors"))) > 3
    with checkpoint.reading(path) as stored:
        assert_same({name: one.read() for name, one in stored.items()}, expected)


def resident_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def test_reading_a_part_reads_that_part(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, {"large": torch.arange(2**23)})  # 64 MiB
    before = resident_mib()
    with checkpoint.reading(path) as stored:
        part = stored["large"].read([range(1000, 2000)])
        assert checkpoint.describe(path)["large"].shape == (2**23,)
        assert resident_mib() - before < 16
    assert torch.equal(part, torch.arange(1000, 2000))


def test_values_are_converted_and_leaves_may_be_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"w": torch.tensor([1.0, 2.0, 3.0])})
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    checkpoint.load(tmp_path / "c", {"w": weight})
    assert weight.tolist() == [1.0, 2.0, 3.0]
    assert weight.is_leaf


# -------------------------------------------------------------------------------------------- what does not fit


def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, {"a": torch.ones(2), "b": torch.ones(3)})
    a = torch.zeros(2)
    with pytest.raises(ValueError, match="has no z"):
        checkpoint.load(path, {"a": a, "z": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"b has shape \[3\], the model needs \[2\]"):
        checkpoint.load(path, {"a": a, "b": torch.zeros(2)})
    assert a.tolist() == [0.0, 0.0]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "missing", empty):
        for read in (checkpoint.describe, checkpoint.read_extra, lambda p: checkpoint.load(p, {})):
            with pytest.raises(ValueError, match="is not a checkpoint"):
                read(path)
    for text in ("{", "[]", '{"files": {}}', '{"extra": {}}'):
        (empty / "checkpoint.json").write_text(text)
        with pytest.raises(ValueError, match="is not a checkpoint"):
            checkpoint.describe(empty)


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "header", "other file missing"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, {"a": torch.ones(100)}, None, lambda folder: add_file(folder))
    (file,) = path.glob("*.safetensors")
    if damage == "missing":
        file.unlink()
    elif damage == "other file missing":
        file = path / "more" / "deep.txt"
        file.unlink()
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "longer":
        file.write_bytes(file.read_bytes() + b"x")
    else:
        file.write_bytes(b"\xff" * file.stat().st_size)
    a = torch.zeros(100)
    with pytest.raises(ValueError, match=rf"is damaged: .*{file.name}"):
        checkpoint.load(path, {"a": a})
    with pytest.raises(ValueError, match=rf"is damaged: .*{file.name}"):
        checkpoint.describe(path)
    assert not a.any()


# --------------------------------------------------------------------------------------------- what is interrupted


def tensors_of_step(step: int) -> dict[str, Tensor]:
    return {f"of rank {r}": torch.full((1000,), float(step)) for r in range(2)}


def save_step(path: str, step: int) -> None:
    name = f"of rank {rank()}"
    checkpoint.save(path, {name: tensors_of_step(step)[name]}, {"step": step})


def interrupted(path: str, how: str) -> str:
    """Rank 1 dies, or cannot write, once it has opened its file; or rank 0 cannot add a file."""
    save_step(path, 1)
    filesystem = torch.distributed.checkpoint.filesystem.FileSystem
    real = filesystem.create_stream

    def create_stream(*args: Any) -> Any:
        if how == "killed":
            with open(args[1], "wb") as file:
                file.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "disk full":
            raise OSError(28, "No space left on device")
        return real(*args)

    def write_files(_folder: Path) -> None:
        if how == "on rank 0":
            raise OSError(28, "No space left on device")

    if rank() == 1:
        filesystem.create_stream = create_stream
    try:
        checkpoint.save(path, {f"of rank {rank()}": torch.zeros(1000)}, {"step": 2}, write_files)
    except RuntimeError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("how", ["disk full", "on rank 0"])
def test_when_one_rank_cannot_write_all_ranks_know_and_the_old_checkpoint_stays(how: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    for message in run(2, interrupted, str(path), how, timeout_s=60):
        assert f"checkpoint {path} was not written" in message
        assert "No space left on device" in message
        assert len(message) < 200, "no traceback in the message"
    assert checkpoint.read_extra(path) == {"step": 1}
    assert_same(files_of(path), tensors_of_step(1))
    run(2, save_step, str(path), 3)  # the leftovers do not disturb the next one
    assert_same(files_of(path), tensors_of_step(3))
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_rank_that_is_killed_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(RuntimeError, match="rank 1 died with exit code -9"):
        run(2, interrupted, str(path), "killed", timeout_s=60)
    assert checkpoint.read_extra(path) == {"step": 1}
    assert_same(files_of(path), tensors_of_step(1))
    with pytest.raises(ValueError, match="is not a checkpoint"):
        checkpoint.describe(path.with_name("c.saving"))
    run(2, save_step, str(path), 3)
    assert_same(files_of(path), tensors_of_step(3))


def test_the_list_of_files_is_in_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, {"a": torch.ones(2)}, {"files": "may be a key of the caller's"})
    about = json.loads((path / "checkpoint.json").read_text())
    files = list(path.glob("*.safetensors"))
    assert about["files"] == {file.name: [file.stat().st_size, zlib.crc32(file.read_bytes())] for file in files}
    assert checkpoint.read_extra(path) == {"files": "may be a key of the caller's"}
    moved = tmp_path / "moved"
    shutil.move(path, moved)
    assert checkpoint.describe(moved)["a"].shape == (2,)
