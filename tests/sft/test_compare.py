"""The command ``compare``: exact bytes and memory of each candidate, failures as rows, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional as F

import nanopar_models as models
from nanopar_core.testing import assert_parity
from nanopar_sft import __main__ as cli
from nanopar_sft import peers, workload

CANDIDATES = ["local", "zero0", "torch-ddp", "fsdp2-reshard", "deepspeed2"]
pytestmark = pytest.mark.timeout(600)  # six sets of processes, each of which imports torch

LENGTH, SEQUENCES = 32, 4
PARAMETER_BYTES = 4 * sum(p.numel() for p in models.PhiMoE(models.PhiMoEConfig.preset("nano")).parameters())

# Stands for a peer whose rank 1 fails; the rank that waits for it must end too.
FAULTY_DEEPSPEED = """
import os, torch
def initialize(**_):
    if os.environ["RANK"] == "1":
        raise RuntimeError("planted\\nfault")
    torch.distributed.barrier()
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One comparison on two ranks with two micro-batches, in which one peer fails."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text(FAULTY_DEEPSPEED)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH", "")]))
    arguments = (
        f"compare --model nano --seq-len {LENGTH} --batch-size {SEQUENCES} --microbatches 2 --nproc 2 --pairs 1 "
        "--strategies ddp --peers torch-ddp,fsdp2-reshard,deepspeed2 --output-dir out"
    )
    command = [sys.executable, "-m", "nanopar_sft", *arguments.split()]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=560, env=environment, check=False
    )
    return folder / "out", done


@pytest.fixture(scope="module")
def report(output: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    folder, done = output
    assert (folder / "compare.json").exists(), done.stderr
    report: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return report


def row(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in report["rows"] if row["strategy"] == name)


def test_all_candidates_have_a_row(report: dict[str, Any]) -> None:
    assert [row["strategy"] for row in report["rows"]] == CANDIDATES
    assert [row["kind"] for row in report["rows"]] == ["local", "nanopar", *["peer"] * 3]
    assert list(report) == ["command", "versions", "machine", "protocol", "rows"]
    assert report["protocol"]["parameter_bytes"] == PARAMETER_BYTES
    assert report["command"] == (
        "nanopar-sft compare --model nano --seq_len 32 --microbatches 2 --nproc 2 --pairs 1 --strategies ddp "
        "--peers torch-ddp,fsdp2-reshard,deepspeed2"
    )


# Name, sent a step in P, its floor. Two micro-batches: FSDP2 gathers and reduces in both, and gloo's reduce_scatter
# sends twice what it must.
@pytest.mark.parametrize(
    ("name", "sent", "floor"),
    [("local", 0, 0), ("zero0", 1, 1), ("torch-ddp", 1, 1), ("fsdp2-reshard", 4, 3)],
)
def test_bytes_sent(report: dict[str, Any], name: str, sent: float, floor: float) -> None:
    found = row(report, name)
    assert found["bytes_sent"] == pytest.approx(sent * PARAMETER_BYTES, rel=0.02)
    assert found["bytes_sent_floor"] == floor * PARAMETER_BYTES


def test_the_ledger_models_what_is_sent(report: dict[str, Any]) -> None:
    for name in ("local", "zero0"):
        found = row(report, name)
        assert found["bytes_modelled"] == pytest.approx(found["bytes_sent"], rel=0.02)
    assert row(report, "zero0")["bytes_modelled"] == pytest.approx(PARAMETER_BYTES, rel=0.001)  # padding
    assert row(report, "torch-ddp")["bytes_modelled"] is None


# Weights, gradients where they stay, moments; in P.
@pytest.mark.parametrize(
    ("name", "live", "slack"),
    [
        ("local", 3, 0.01),
        ("zero0", 3, 0.01),
        ("torch-ddp", 4, 0.01),
        ("fsdp2-reshard", 1.5, 0.05),
    ],
)
def test_live_memory(report: dict[str, Any], name: str, live: float, slack: float) -> None:
    assert row(report, name)["live_memory_bytes"] == pytest.approx(live * PARAMETER_BYTES, rel=slack)


def test_peak_memory(report: dict[str, Any]) -> None:
    local, ddp = row(report, "local"), row(report, "torch-ddp")
    # Few tokens: most is in use at the update, when there are all gradients.
    assert 4 * PARAMETER_BYTES <= local["peak_memory_bytes"] <= 4.5 * PARAMETER_BYTES
    assert local["peak_memory_bytes_floor"] == 4 * PARAMETER_BYTES
    assert 0 < local["reports"][0]["activation_bytes"] < PARAMETER_BYTES
    assert ddp["peak_memory_bytes"] >= 5 * PARAMETER_BYTES  # gradients and their copies in buckets
    assert row(report, "fsdp2-reshard")["peak_memory_bytes_floor"] == 2 * PARAMETER_BYTES
    for found in report["rows"][:-1]:
        assert found["peak_memory_bytes"] >= found["peak_memory_bytes_floor"]
        assert found["peak_memory_bytes"] >= found["live_memory_bytes"]


def test_calls(report: dict[str, Any]) -> None:
    assert row(report, "local")["calls"] == {}
    assert row(report, "zero0")["calls"] == {"all_reduce": 1}
    assert row(report, "torch-ddp")["calls"] == {"all_reduce": 2}  # a first bucket of 1 MiB, and the rest
    # three blocks and the rest, two micro-batches; gathered for forward and again for backward, but for the last one
    assert row(report, "fsdp2-reshard")["calls"]["reduce_scatter"] == 8


def test_losses_are_those_of_plain_training(report: dict[str, Any]) -> None:
    for found in report["rows"][1:-1]:
        assert found["loss_difference"] < 1e-5
        assert found["loss_difference_floor"] == 0
    assert row(report, "local")["loss_difference"] is None  # every rank trains a model of its own
    model = workload.build_model("nano")
    ids = workload.batch(0, SEQUENCES, LENGTH, workload.vocabulary(model))
    for part, rank in zip(ids.chunk(2), row(report, "torch-ddp")["reports"], strict=True):
        logits = model(input_ids=part).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        assert_parity({"loss": loss}, {"loss": rank["losses"][0]}, rtol=1e-5)


def test_ratios_and_raw_times(report: dict[str, Any]) -> None:
    for found in report["rows"][:-1]:
        for rank in found["reports"]:
            for clock in ("candidate", "local", "collectives"):
                assert [len(seconds) for seconds in rank[clock].values()] == [1, 1]
        walls = [max(rank[clock]["wall"][0] for rank in found["reports"]) for clock in ("candidate", "local")]
        cpus = [sum(rank[clock]["cpu"][0] for rank in found["reports"]) for clock in ("candidate", "local")]
        assert found["wall_ratio"] == pytest.approx(walls[1] / walls[0])
        assert found["cpu_ratio"] == pytest.approx(cpus[1] / cpus[0])
        assert found["wall_ratio_range"] == [found["wall_ratio"]] * 2
        assert found["tokens_per_second"] == pytest.approx(SEQUENCES * LENGTH / walls[0])
        assert 0 < found["wall_ratio_floor"] <= 1
        assert 0 < found["cpu_ratio_floor"] <= 1


def test_a_failure_is_a_row(report: dict[str, Any], output: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = output
    failed = row(report, "deepspeed2")
    assert failed["failed"] is True
    assert failed["problem"] == "rank 1: RuntimeError: planted fault"
    assert failed["bytes_sent"] is None
    assert 'RuntimeError("planted' in (folder / "deepspeed2.log").read_text()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "nanopar-sft: failed: deepspeed2; see out/*.log"
    assert "Traceback" not in done.stderr
    assert [path.name for path in sorted(folder.iterdir())] == ["compare.json", "compare.md", "deepspeed2.log"]


def test_table(output: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    for name in CANDIDATES:
        assert any(line.split()[:1] == [name] for line in lines)
    assert "deepspeed2: rank 1: RuntimeError: planted fault" in lines
    text = (folder / "compare.md").read_text()
    assert "| torch-ddp " in text
    assert "- deepspeed2: rank 1: RuntimeError: planted fault" in text
    assert [line.split(" (")[0] for line in done.stderr.splitlines()[:2]] == ["reference", "local"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--strategies", "zero9"],
            "strategies=zero9: no such name; did you mean zero3? There are local, zero0, zero1, ",
        ),
        (["--strategies", "torch-ddp"], "strategies=torch-ddp: torch-ddp belongs to peers: --peers torch-ddp"),
        (["--peers", "fsdp"], "peers=fsdp: no such name; did you mean fsdp2-keep? There are torch-ddp, "),
        (["--peers", "torch-ddp,zero0"], "peers=zero0: zero0 belongs to strategies: --strategies zero0"),
        (["--model", "dense", "--seq_len", "1024"], "seq_len=1024 is longer than the 512 positions of model=dense"),
        (["--model", "sparse"], "model=sparse: neither a preset ("),
        (["--nproc", "3"], "batch_size=4 is not divisible by nproc=3 x microbatches=1 = 3: "),
        (["--pairs", "0"], "pairs=0: must be greater than or equal to 1"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], expected: str) -> None:
    assert cli.main(["compare", *arguments, "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nanopar-sft: error: {expected}")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_one_of_several_ranks_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("nanopar_sft.launcher.end_with_launcher", lambda: None)
    assert cli.main(["compare"]) == 2
    assert capsys.readouterr().err == "nanopar-sft: error: compare runs in one process, not in 2 ranks\n"


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.PEERS["torch-ddp"].missing() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert peers.PEERS["deepspeed3"].missing() == ('deepspeed is not installed: pip install "nanopar-sft[deepspeed]"')


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_generated_models(name: str) -> None:
    model, again = workload.build_model(name), workload.build_model(name)
    dense_layer = 4 * 384 * 384 + 3 * 384 * 1536 + 2 * 384 + 2 * 64
    moe_layer = 4 * (256 * 256 + 256) + 8 * 3 * 256 * 512 + 8 * 256 + 4 * 256
    sizes = {
        "dense": 2 * 8192 * 384 + 8 * dense_layer + 384,
        "moe": 2 * 4096 * 256 + 4096 + 6 * moe_layer + 2 * 256,
    }
    assert sum(p.numel() for p in model.parameters()) == sizes[name]
    assert_parity({"weights": model.state_dict()}, {"weights": again.state_dict()}, rtol=0.0)
    assert model.training
