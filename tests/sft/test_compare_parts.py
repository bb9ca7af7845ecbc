"""The parts of ``compare`` by themselves: floors against hand-made numbers, the memory counter, rows, and hanging."""

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from nanopar_sft import floors, tables, trial
from nanopar_sft.candidates import CANDIDATES, Candidate
from nanopar_sft.compare import Comparison
from nanopar_sft.config import Config
from nanopar_sft.figures import Row, row_of
from nanopar_sft.measure import Clock, Report
from nanopar_sft.memory import MemoryCounter, Moment, Window, between
from nanopar_sft.torch_private import every_allocation_noted

MIB = 2**20


# P = 120, by hand: (stage, N, M) -> sent
@pytest.mark.parametrize(
    ("needs", "ranks", "microbatches", "sent"),
    [
        (floors.STAGES[0], 1, 1, 0),
        (floors.STAGES[0], 2, 1, 120),
        (floors.STAGES[0], 4, 3, 180),
        (floors.STAGES[1], 4, 3, 180),
        (floors.STAGES[2], 2, 1, 120),
        (floors.STAGES[2], 2, 3, 240),
        (floors.STAGES[3], 2, 1, 180),
        (floors.STAGES[3], 4, 2, 540),
        (floors.STAGE_3_KEPT, 2, 1, 120),
        (floors.STAGE_3_KEPT, 4, 2, 360),
        (floors.NOTHING, 4, 2, 0),
    ],
)
def test_bytes_floor(needs: floors.Needs, ranks: int, microbatches: int, sent: int) -> None:
    assert needs.bytes_sent(floors.Sizes(120, 7, 3), ranks, microbatches) == sent


def test_bytes_floor_of_tensor_parallelism() -> None:
    sizes = floors.Sizes(parameters=7, hidden=100, layers=3)
    assert floors.TENSOR.bytes_sent(sizes, 2, 1) == floors.SEQUENCE.bytes_sent(sizes, 2, 5) == (4 * 3 + 2) * 100
    assert floors.TENSOR.bytes_sent(sizes, 4, 1) == (4 * 3 + 2) * 150


def test_floors_of_expert_parallelism() -> None:
    sizes = floors.Sizes(parameters=120, hidden=7, layers=3, experts=80, routed=16)
    # all_reduce of the 40 bytes that are not experts; 4 times in 3 layers the rows of a rank, of which part is its own
    assert floors.EXPERT.bytes_sent(sizes, 2, 1) == 40 + 4 * 3 * 16 // 4
    assert floors.EXPERT.bytes_sent(sizes, 4, 1) == 60 + 4 * 3 * 16 * 3 // 16
    assert floors.EXPERT.memory_bytes(sizes, 4, 30) == 3 * (40 + 20) + 60


def test_floors_of_pipelines() -> None:
    sizes = floors.Sizes(parameters=120, hidden=8, layers=3)
    assert floors.PIPELINE[1].bytes_sent(sizes, 2, 4) == 8  # rank 0 activations, rank 1 their gradients
    assert floors.PIPELINE[2].bytes_sent(sizes, 2, 4) == 24  # rank 0 there twice and back once
    assert floors.PIPELINE[1].memory_bytes(sizes, 2, 300) == 60 + 120 + 150


# P = 120, N = 4: weights + moments + the larger of activations and gradients
@pytest.mark.parametrize(
    ("needs", "activations", "memory"),
    [
        (floors.STAGES[0], 0, 120 + 240 + 120),
        (floors.STAGES[0], 500, 120 + 240 + 500),
        (floors.STAGES[1], 50, 120 + 60 + 120),
        (floors.STAGES[2], 50, 120 + 60 + 50),
        (floors.STAGES[2], 0, 120 + 60 + 30),
        (floors.STAGES[3], 50, 30 + 60 + 50),
        (floors.STAGE_3_KEPT, 50, 120 + 60 + 50),
    ],
)
def test_memory_floor(needs: floors.Needs, activations: int, memory: int) -> None:
    assert needs.memory_bytes(floors.Sizes(120, 7, 3), 4, activations) == memory


def test_every_candidate_has_the_floor_of_its_stage() -> None:
    expected = {"torch-ddp": 0, "zero-redundancy": 1, "fsdp2-reshard": 3}
    expected |= {f"{library}{stage}": stage for library in ("zero", "deepspeed") for stage in range(4)}
    for name, stage in expected.items():
        assert CANDIDATES[name].needs is floors.STAGES[stage], name
    for name in ("zero3-keep", "fsdp2-keep"):
        assert CANDIDATES[name].needs is floors.STAGE_3_KEPT
    for library in ("", "torch-", "megatron-"):
        assert CANDIDATES[library + "tp"].needs is floors.TENSOR
        assert CANDIDATES[library + "tp-sp"].needs is floors.SEQUENCE


def tensor(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


def test_memory_is_counted_exactly() -> None:
    before = tensor(7)  # not counted, nor its release
    with MemoryCounter(torch.device("cpu")) as counter:
        kept = [tensor(3)]
        del before
        with counter.window("first"):
            kept.append(tensor(2))
            passing = tensor(5)
            del passing
        with counter.window("second"):
            passing = torch.median(kept[1].float())  # a float copy of 8 MiB, and another one inside of the kernel
            kept.pop()
    assert counter.windows["first"] == Window(start=3 * MIB, end=5 * MIB, peak=10 * MIB)
    second = counter.windows["second"]
    assert second.start == 5 * MIB
    assert second.end == 3 * MIB + passing.untyped_storage().nbytes()
    assert 21 * MIB <= second.peak < 21.1 * MIB


def test_memory_released_by_a_thread_that_the_profiler_does_not_know() -> None:
    with MemoryCounter(torch.device("cpu")) as counter:
        kept = [tensor(3)]
        with counter.window("release"):
            thread = threading.Thread(target=kept.clear)
            thread.start()
            thread.join()
            other = tensor(1)
    assert counter.windows["release"] == Window(start=3 * MIB, end=MIB, peak=3 * MIB)
    del other


def test_the_switch_is_put_back() -> None:
    library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    switch = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    assert not switch.value
    with pytest.raises(ZeroDivisionError), every_allocation_noted():
        assert switch.value
        raise ZeroDivisionError
    assert not switch.value


def test_moments_of_a_window() -> None:
    moments = [Moment(1.0, 10), Moment(2.0, 4), Moment(3.0, 6), Moment(4.0, 5), Moment(5.0, 50)]
    assert between(moments, 2.5, 4.5) == Window(start=4, end=5, peak=6)
    assert between(moments, 1.5, 1.8) == Window(start=10, end=10, peak=10)
    assert between([], 0, 1) == Window(0, 0, 0)


def report(candidate: list[float], local: list[float], collectives: list[float], sent: int, peak: int) -> Report:
    clocks = [Clock(seconds, [2 * second for second in seconds]) for seconds in (candidate, local, collectives)]
    sizes = floors.Sizes(120, 7, 3)
    return Report(sizes, [5.0, 4.0], peak, peak - 1, 40, {"all_reduce": 1}, sent, [sent, sent + 2, sent], *clocks)


def test_row_of_two_ranks() -> None:
    slow = report([2.0, 4.0, 5.0], [1.0, 3.0, 4.0], [1.0, 1.0, 4.0], 100, 300)
    fast = report([1.0, 4.0, 1.0], [1.5, 1.0, 4.0], [0.5, 1.0, 4.0], 90, 310)
    fast.losses = [5.5, 4.0]
    config = Config(model="nano", seq_len=10, batch_size=4, microbatches=1)
    row = row_of("zero0", CANDIDATES["zero0"], config, [slow, fast], [5.0, 4.0], 400)
    # the slower rank counts on the wall: 1.5/2, 3/4, 4/5; floors 1.5/2.5, 3/4, 4/8
    assert (row.wall_ratio, row.wall_ratio_range, row.wall_ratio_floor) == (0.75, (0.75, 0.8), 0.6)
    # both together on the CPU: 2.5/3, 4/8, 8/6; floors 2.5/4, 4/6, 8/16
    assert row.cpu_ratio == pytest.approx(2.5 / 3)
    assert row.cpu_ratio_range == (0.5, pytest.approx(8 / 6))
    assert row.cpu_ratio_floor == pytest.approx(2.5 / 4)
    assert (row.bytes_sent, row.bytes_modelled, row.bytes_sent_floor) == (100, 100, 120)
    assert (row.peak_memory_bytes, row.live_memory_bytes, row.peak_memory_bytes_floor) == (310, 309, 360 + 400)
    assert row.loss_difference == 0.25
    assert row.tokens_per_second == 10.0


def test_rows_without_reference_or_local_run() -> None:
    config = Config(model="nano", seq_len=10, batch_size=4)
    one = report([1.0], [1.0], [0.0], 0, 300)
    row = row_of("zero0", CANDIDATES["zero0"], config, [one], None, None)
    assert (row.loss_difference, row.peak_memory_bytes_floor) == (None, None)
    assert "zero0" in tables.markdown([row], "title", "command")


def test_missing_peer_is_a_row_and_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    away = Candidate("peer", CANDIDATES["deepspeed1"].build, floors.STAGES[1], lambda: "not here")
    monkeypatch.setitem(CANDIDATES, "deepspeed1", away)
    comparison = Comparison(Config(output_dir=tmp_path))
    comparison.measure("deepspeed1", lambda _done: None)
    assert comparison.rows == [Row("deepspeed1", "peer", problem="not here", failed=False)]
    assert tables.problems(comparison.rows) == ["deepspeed1: not here"]


def test_what_does_nothing_is_ended(tmp_path: Path) -> None:
    told: list[int] = []
    progress = tmp_path / "progress"
    code = f"import time; open({str(progress)!r}, 'w').write('..'); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    started = time.monotonic()
    try:
        assert trial._watch(process, progress, 3.0, told.append)
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - started < 30
    assert told == [2]


def test_reason_of_a_failure(tmp_path: Path) -> None:
    last = "ended with status 1; the last it printed: rank 0 was killed by SIGKILL"
    assert trial._reason(tmp_path, "warning\nrank 0 was killed by SIGKILL\n\n", 1) == last
    assert trial._reason(tmp_path, "", -9) == "killed by signal 9"
    (tmp_path / "error-1.txt").write_text("ValueError: no\nsuch thing")
    assert trial._reason(tmp_path, "noise", 1) == "rank 1: ValueError: no such thing"
