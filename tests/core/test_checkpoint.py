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
from nanopar_core.sharding import boxes


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


# ------------------------------------------------------------------------------------------ boxes, and the background


def boxes_of(rank_: int, ranks: int, whole: Tensor) -> checkpoint.Parts:
    """A flat share of a matrix, which cuts rows, in boxes."""
    places = [[range(length)] for length in whole.shape]
    bounds = [number * whole.numel() // ranks for number in range(ranks + 1)]
    found = boxes(places, bounds[rank_], bounds[rank_ + 1])
    at = {tuple(one.start for one in box.ranges): whole.reshape(-1)[box.start : box.stop] for box in found}
    shapes = {tuple(one.start for one in box.ranges): box.shape for box in found}
    return checkpoint.Parts(tuple(whole.shape), {first: at[first].view(shapes[first]) for first in at})


def save_boxes(path: str) -> None:
    whole = torch.arange(7 * 5 * 3.0).view(7, 5, 3)
    saving = checkpoint.Saving(
        path, {"w": boxes_of(rank(), 3, whole), "all": torch.ones(2), f"own {rank()}": torch.ones(3)}, {"step": 1}
    )
    assert not Path(path).exists(), "not before finish"
    whole.zero_()  # what is written was copied
    saving.finish()
    assert saving.is_written


def test_boxes_of_many_ranks_are_read_in_any_other_cut(tmp_path: Path) -> None:
    path = tmp_path / "c"
    run(3, save_boxes, str(path))
    whole = torch.arange(7 * 5 * 3.0).view(7, 5, 3)
    with checkpoint.reading(path) as stored:
        assert set(stored) == {"w", "all", "own 0", "own 1", "own 2"}
        assert torch.equal(stored["w"].read(), whole)
        for ranges in ([range(2, 5), range(1, 4), range(3)], [range(6, 7), range(5), range(1, 2)], [range(7)] * 0):
            places = tuple(slice(one.start, one.stop) for one in ranges)
            assert torch.equal(stored["w"].read(ranges or None), whole[places])
        out = torch.zeros(2, 3, dtype=torch.float64)
        stored["w"].read([range(3, 5), range(2, 3), range(3)], out=out.view(2, 1, 3))
        assert torch.equal(out, whole[3:5, 2].double())
    checkpoint.verify(path)
    assert checkpoint.describe(path)["w"].shape == (7, 5, 3)


def test_boxes_that_leave_something_out_are_refused(tmp_path: Path) -> None:
    lower, upper = torch.ones(2, 3), torch.ones(1, 3)
    checkpoint.save(tmp_path / "a", {"w": checkpoint.Parts((4, 3), {(0, 0): lower, (3, 0): upper})})
    checkpoint.save(tmp_path / "b", {"w": checkpoint.Parts((3, 3), {(0, 0): lower, (1, 0): lower})})  # overlap, whole
    checkpoint.save(tmp_path / "c", {"w": checkpoint.Parts((4, 3), {(0, 0): lower, (0, 1): torch.ones(3, 2)})})
    with checkpoint.reading(tmp_path / "a") as stored:
        assert stored["w"].read([range(2), range(3)]).sum() == 6
        with pytest.raises(ValueError, match="the files lack a part of w"):
            stored["w"].read()
    with checkpoint.reading(tmp_path / "b") as stored:
        assert stored["w"].read().sum() == 9
    with checkpoint.reading(tmp_path / "c") as stored, pytest.raises(ValueError, match="the files lack a part of w"):
        stored["w"].read()


def test_a_box_outside_of_its_tensor_is_damage(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"w": checkpoint.Parts((4, 3), {(3, 0): torch.ones(2, 3)})})
    with pytest.raises(ValueError, match=r"is damaged: rank-00000.*: w: a box \[2, 3\] at \[3, 0\] is not of \[4, 3\]"):
        checkpoint.describe(tmp_path / "c")


def test_one_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"w": torch.ones(100)})
    [file] = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"is damaged: {file.name} is not what was written"):
        checkpoint.verify(tmp_path / "c")


def test_a_list_of_files_cannot_point_outside(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, {"a": torch.ones(2)})
    about = json.loads((path / "checkpoint.json").read_text())
    for name in ("../secret", "/etc/passwd", "a/../../b"):
        (path / "checkpoint.json").write_text(json.dumps({**about, "files": {name: [1, 1]}}))
        with pytest.raises(ValueError, match="points outside of it"):
            checkpoint.verify(path)


def failing_in_background(path: str) -> str:
    import torch.distributed.checkpoint

    if rank() == 1:
        torch.distributed.checkpoint.filesystem.FileSystem.create_stream = full
    saving = checkpoint.Saving(path, {f"of {rank()}": torch.ones(10)})
    with pytest.raises(RuntimeError, match=r"was not written: rank 1: .*No space left") as caught:
        saving.finish()
    return str(caught.value)


def full(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_failure_in_the_background_is_told_to_all_ranks(tmp_path: Path) -> None:
    assert len(set(run(2, failing_in_background, str(tmp_path / "c"), timeout_s=60))) == 1
    assert not (tmp_path / "c").exists()
