"""nanopar_core.testing: ranks that end whatever happens, and comparisons that cannot pass by accident."""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nanopar_core as core
from nanopar_core import testing

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched through /proc")


def rank() -> int:
    return dist.get_rank()


def wait_for_peers() -> None:
    core.barrier(core.Mesh(dp=dist.get_world_size()).dp)


# --------------------------------------------------------------------------------------------------------- results


def ten_times(base: int, *, offset: int = 0) -> tuple[int, int, int]:
    time.sleep(0.05 * (dist.get_world_size() - rank()))  # the last rank is the first to answer
    return base + 10 * rank() + offset, torch.get_num_threads(), os.getpid()


def test_results_come_in_rank_order() -> None:
    results = testing.run(4, ten_times, 100)
    assert [value for value, _, _ in results] == [100, 110, 120, 130]
    assert [threads for _, threads, _ in results] == [1] * 4
    assert len({pid for _, _, pid in results} | {os.getpid()}) == 5


def large() -> torch.Tensor:
    return torch.full((1_000_000,), float(rank()))  # far more than a pipe holds


def test_results_larger_than_a_pipe() -> None:
    first, second = testing.run(2, large)
    assert torch.equal(first, torch.zeros(1_000_000))
    assert torch.equal(second, torch.ones(1_000_000))


def test_a_world_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        testing.run(0, large)


# ---------------------------------------------------------------------------------------------------------- errors


class UnreadableError(Exception):
    """Can be pickled, but not read back: the constructor wants two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class UnwritableError(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def fails(kind: str) -> Any:
    if rank() != 1:
        return wait_for_peers()
    if kind == "exit":
        sys.exit(3)
    errors = {"key": KeyError("mine"), "unreadable": UnreadableError("a", "b"), "unwritable": UnwritableError()}
    raise errors[kind]


def test_the_error_of_a_rank_is_raised_with_its_rank_and_traceback() -> None:
    with pytest.raises(KeyError, match="mine") as caught:
        testing.run(2, fails, "key")
    where_all_were, note = caught.value.__notes__
    assert where_all_were.startswith("last collective of each rank:")
    assert note.startswith("raised on rank 1 of 2:\nTraceback")
    assert "in fails" in note


@pytest.mark.parametrize(("kind", "text"), [("unreadable", "a and b"), ("unwritable", "holds a lock")])
def test_an_error_that_cannot_travel_is_told_as_text(kind: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=text) as caught:
        testing.run(2, fails, kind)
    assert "raised on rank 1 of 2" in caught.value.__notes__[0]


def test_an_exit_of_a_rank_does_not_end_the_caller() -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 3") as caught:
        testing.run(2, fails, "exit")
    assert "raised on rank 1 of 2" in caught.value.__notes__[0]


def local_function() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


def test_a_result_or_function_that_cannot_be_pickled() -> None:
    with pytest.raises(Exception, match="pickle local object") as caught:
        testing.run(2, local_function)
    assert "raised on rank" in caught.value.__notes__[0]
    with pytest.raises(Exception, match="pickle"):
        testing.run(1, lambda: None)


def fails_then_echoes() -> None:
    """Ranks 0 and 2 fail because rank 1 has."""
    if rank() == 1:
        raise ValueError("the first fault")
    wait_for_peers()


def test_the_first_failure_is_raised_not_its_echo() -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="the first fault"):
            testing.run(3, fails_then_echoes)


def fails_with_collectives_in_flight() -> None:
    """All ranks fail at the same place, between the start of several collectives and their waits."""
    axis = core.Mesh(dp=2).dp
    x, other = torch.ones(8), 1 - rank()
    handles = [
        core.reduce_scatter(x, axis, async_op=True),
        core.all_gather(x, axis, sizes=[8, 8], async_op=True),
        core.all_to_all(x, axis, async_op=True),
        core.send_recv([(x, other)], [(x * 0, other)], axis, async_op=True),
    ]
    raise ValueError(f"{len(handles)} in flight")


def test_a_failure_between_start_and_wait_is_told_at_once() -> None:
    start = time.monotonic()
    for _ in range(5):
        with pytest.raises(ValueError, match="4 in flight"):
            testing.run(2, fails_with_collectives_in_flight, timeout_s=60)
    assert time.monotonic() - start < 50


# ------------------------------------------------------------------------------------- ranks that die, stop or hang


def dies(who: int) -> None:
    wait_for_peers()
    if rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_peers()


def test_a_killed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="rank 1 died with exit code -9"):
        testing.run(2, dies, 1)

    # a slow parent finds the echo of rank 0 at the same time as the death of rank 1
    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.0)
        return multiprocessing.connection.wait(*args, **kwargs)

    monkeypatch.setattr(testing, "wait", late)
    with pytest.raises(RuntimeError, match="rank 1 died with exit code -9"):
        testing.run(2, dies, 1)


def hangs(how: str, folder: str) -> None:
    Path(folder, str(rank())).write_text(str(os.getpid()))
    wait_for_peers()
    if rank() == 1:
        if how == "sleeps in C":
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock: no other Python thread runs
        if how == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "skips a collective":
            time.sleep(60)
    wait_for_peers()


def alive(folder: Path) -> list[str]:
    """The ranks that left their process number in ``folder`` and still run."""
    running = []
    for place in folder.iterdir():
        number = place.read_text()  # empty for the moment between the creation of the file and its writing
        status = Path("/proc", number, "stat")
        if number and status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X"):
            running.append(place.name)
    return sorted(running)


@linux
@pytest.mark.parametrize("how", ["sleeps in C", "is stopped", "skips a collective"])
def test_the_time_out_is_kept_and_nobody_is_left(tmp_path: Path, how: str) -> None:
    start = time.monotonic()
    with pytest.raises((TimeoutError, RuntimeError)) as caught:
        testing.run(2, hangs, how, str(tmp_path), timeout_s=3.0)
    assert time.monotonic() - start < 3.0 + 3
    if isinstance(caught.value, TimeoutError):
        assert "did not finish within 3.0 s" in str(caught.value)
        assert "1" in str(caught.value).split("]")[0]
    else:  # rank 0's collective gave up in time to say so
        assert "raised on rank 0" in caught.value.__notes__[0]
    assert len(list(tmp_path.iterdir())) == 2
    assert alive(tmp_path) == []


def computes_on(folder: str) -> None:
    Path(folder, str(rank())).write_text(str(os.getpid()))
    if rank() == 1:
        raise ValueError("the fault")
    while True:
        sum(range(1000))


@linux
def test_a_failure_ends_ranks_that_compute(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="the fault"):
        testing.run(3, computes_on, str(tmp_path))
    assert time.monotonic() - start < 15
    assert alive(tmp_path) == []


PARENT = """
import sys, time
sys.path.insert(0, {folder!r})
import spinning
from nanopar_core import testing
if __name__ == "__main__":
    testing.run(2, spinning.spin, timeout_s=60)
"""
SPIN = """
import os, pathlib, time
def spin():
    pathlib.Path({folder!r}, "pids", os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(50)
"""


@linux
def test_ranks_end_when_the_caller_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    (tmp_path / "parent.py").write_text(PARENT.format(folder=str(tmp_path)))
    (tmp_path / "spinning.py").write_text(SPIN.format(folder=str(tmp_path)))
    with subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stderr=subprocess.DEVNULL) as parent:
        try:
            deadline = time.monotonic() + 90
            while len(alive(folder)) < 2:
                assert parent.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            parent.kill()
    deadline = time.monotonic() + 5
    while alive(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sum_of_ranks(salt: int) -> int:
    axis = core.Mesh(dp=2).dp
    return int(core.all_reduce(torch.tensor([salt + rank()]), axis).item())


def test_runs_side_by_side() -> None:
    """As under pytest-xdist: every run has a store and ports of its own."""
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda salt=salt: results.update({salt: testing.run(2, sum_of_ranks, salt)}))
        for salt in (100, 200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {100: [201, 201], 200: [401, 401]}


# ---------------------------------------------------------------------------------------------------- assert_parity


def reference() -> dict[str, Any]:
    return {
        "loss": [2.0, 1.0],
        "norm": [5.0],
        "weights": {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(2, 3), "none": torch.zeros(0)},
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    result = reference()
    inner, *names = path.split(".")
    if names:
        result[inner][names[0]] = value
    else:
        result[inner] = value
    return result


def test_equal_results_have_parity() -> None:
    testing.assert_parity(reference(), reference())
    testing.assert_parity({}, {})
    # within 1e-5 of the largest value of the tensor, and of the floor where all values are near zero
    testing.assert_parity(reference(), changed("weights.a", torch.tensor([1.00003, -4.0])))
    testing.assert_parity(reference(), changed("weights.b", torch.full((2, 3), 0.9e-8)))
    testing.assert_parity(reference(), changed("loss", [2.00001, 1.0]))
    testing.assert_parity(reference(), changed("loss", (2.0, 1.0)))


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (changed("weights.a", torch.tensor([1.00005, -4.0])), r"weights\.a: differs by 4\.99\de-05, largest value 4"),
        (changed("weights.b", torch.full((2, 3), 1.1e-8)), r"weights\.b: differs by 1\.1\d+e-08, largest value 0"),
        (changed("loss", [2.0, 1.00002]), r"loss\[1\]: differs"),
        (changed("loss", [2.0]), r"missing: loss\[1\]"),
        (changed("loss", [2.0, 1.0, 1.0]), r"unexpected: loss\[2\]"),
        (changed("weights.c", torch.zeros(1)), r"unexpected: weights\.c"),
        ({"loss": [2.0, 1.0], "norm": [5.0]}, r"missing: weights\.a\n +missing: weights\.b\n +missing: weights\.none"),
        (changed("weights.b", torch.zeros(3, 2)), r"weights\.b: shape \[3, 2\] instead of \[2, 3\]"),
        (changed("weights.a", torch.tensor([float("nan"), -4.0])), r"weights\.a: differs by nan"),
        (changed("weights.a", torch.tensor([float("inf"), -4.0])), r"weights\.a: differs by inf"),
        (changed("norm", [float("nan")]), r"norm\[0\]: differs by nan"),
    ],
)
def test_every_difference_is_named(candidate: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        testing.assert_parity(reference(), candidate)


def test_all_differences_are_named_at_once() -> None:
    candidate = changed("weights.a", torch.zeros(2)) | {"loss": [0.0, 0.0], "extra": 1.0}
    with pytest.raises(AssertionError, match="4 differences") as caught:
        testing.assert_parity(reference(), candidate)
    for name in ("extra", "loss[0]", "loss[1]", "weights.a"):
        assert name in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_two_results_that_are_not_finite_have_no_parity(value: float) -> None:
    broken = {"weights": torch.tensor([1.0, value]), "loss": [value]}
    with pytest.raises(AssertionError, match="2 differences"):
        testing.assert_parity(broken, broken)
    with pytest.raises(AssertionError, match="2 differences"):
        testing.assert_parity(broken, {"weights": torch.zeros(2), "loss": [0.0]})


def test_float64_is_held_to_its_own_tolerance() -> None:
    exact = {"w": torch.tensor([1.0], dtype=torch.float64), "loss": [1.0]}
    testing.assert_parity(exact, {"w": exact["w"] + 5e-10, "loss": [1.0 + 5e-10]})  # type: ignore[operator]
    with pytest.raises(AssertionError, match="w: differs"):
        testing.assert_parity(exact, {"w": exact["w"] + 2e-9, "loss": [1.0]})  # type: ignore[operator]
    with pytest.raises(AssertionError, match="loss"):
        testing.assert_parity(exact, {"w": exact["w"], "loss": [1.0 + 2e-9]})
    testing.assert_parity(exact, {"w": exact["w"] + 1e-3, "loss": [1.0]}, rtol=1e-2)  # type: ignore[operator]


# ---------------------------------------------------------------------------------------------------- train_plainly


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 4)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second((self.first(x) + self.frozen(x)).tanh())


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().sum() / 8


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_train_plainly_is_the_loop_that_one_writes_by_hand(max_norm: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [
        [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(2)]
        for _ in range(3)
    ]
    result = testing.train_plainly(Small(), batches, loss_fn, adam, max_norm=max_norm)

    model = Small()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.1)
    losses, norms = [], []
    for step in batches:
        x, y = (torch.cat(parts) for parts in zip(*step, strict=True))  # accumulated halves are the whole batch
        optimizer.zero_grad()
        loss = loss_fn(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.unused.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5
        if max_norm is not None and norm > max_norm:
            for parameter in trained:
                parameter.grad.mul_(max_norm / norm)  # type: ignore[union-attr]
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    expected = {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights}
    testing.assert_parity(expected, result, rtol={"loss": 1e-6, "weights": 2e-5})
    assert min(norms) > 0.05  # so that clipping has something to do
    assert result["gradients"]["unused.weight"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert not result["weights"]["first.weight"].requires_grad
