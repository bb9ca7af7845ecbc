"""Checkpoints move between layouts: saved in one, continued in another, as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core import checkpoint
from nanopar_core.testing import assert_parity, run
from nanopar_sft import assemble, export, verify
from nanopar_sft.config import Config

pytest.importorskip("safetensors")
pytestmark = pytest.mark.long

SAVED_AT, STEPS = 2, 5
LAYOUTS = {
    "one": "--zero 0",
    "dp2": "--dp 2 --zero 1",
    "dp2 zero3": "--dp 2 --zero 3",
    "tp2": "--tp 2 --zero 0",
    "tp2 sp dp2": "--dp 2 --tp 2 --sp true --zero 2",
    "pp2": "--pp 2 --microbatches 2",
    "pp2 zbv dp2": "--pp 2 --schedule zbv --dp 2 --microbatches 4 --zero 1",
    "ep2": "--dp 2 --ep 2 --zero 3",
    "dp2 tp2 ep4": "--dp 2 --tp 2 --ep 4 --etp 1 --zero 2",
    "cp2": "--cp 2 --zero 1",
    "hsdp": "--dp 2 --dp_replicate 2 --zero 3",
    "pp2 tp2": "--pp 2 --tp 2 --microbatches 2 --zero 3",
}
PAIRS = [
    ("one", "pp2"), ("one", "ep2"), ("dp2", "tp2"), ("dp2 zero3", "one"), ("dp2 zero3", "dp2 tp2 ep4"),
    ("tp2", "dp2 zero3"), ("tp2 sp dp2", "pp2 zbv dp2"), ("pp2", "one"), ("pp2", "ep2"), ("pp2 zbv dp2", "tp2 sp dp2"),
    ("pp2 zbv dp2", "pp2"), ("ep2", "one"), ("ep2", "pp2 tp2"), ("dp2 tp2 ep4", "dp2"), ("cp2", "hsdp"),
    ("hsdp", "cp2"), ("pp2 tp2", "ep2"),
]  # fmt: skip


def config_for(name: str) -> Config:
    arguments = ["--model", "tiny-0", "--seq-len", "20", "--batch-size", "8", "--steps", str(STEPS), "--lr", "0.01"]
    config = Config.parse([*arguments, "--timeout-s", "60", *LAYOUTS[name].split()])
    return config.resolve("verify", config.ranks("verify"))


def train(name: str, first: int, last: int, load: str | None, save: str | None) -> list[float]:
    """Losses of some steps, on this rank; begins from a checkpoint, and leaves one."""
    config = config_for(name)
    shape = verify.shape_of(config)
    model = verify.models.PhiMoE(shape, device="meta", dtype=torch.float64)
    groups = assemble.parameter_groups(model, 0.1)
    parallel = assemble.build_parallel(config, model)
    with verify._values(config, shape) as value_of:
        optimizer = parallel.shard(
            lambda groups: torch.optim.AdamW(groups, lr=config.lr, foreach=False),
            value_of,
            stage=config.zero,
            groups=groups,
            device=torch.device("cpu"),
        )
    if load is not None:
        zero.load(load, parallel.part, optimizer)
    batches = verify.batches_of(config, shape)
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        micro_batches = parallel.micro_batches(batches, step)
        share = parallel.forward_backward(micro_batches, batches.label_count(step), torch.device("cpu"))
        optimizer.clip_grad_norm_(1.0)
        losses.append(core.all_reduce(share.double(), parallel.axes.everyone_with_data).item())
        optimizer.step()
    if save is not None:
        about = {"step": last, "model_config": shape.to_dict(), "dtype": "float64"}
        zero.save_in_background(save, parallel.part, optimizer, extra=about).finish()
    return losses


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    """Losses in one process, from which every run is a part."""
    [losses] = run(1, train, "one", 0, STEPS, None, None)
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the checkpoint of a layout when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("checkpoints"), {}

    def path_of(name: str) -> Path:
        if name not in made:
            made[name] = folder / name.replace(" ", "-")
            run(config_for(name).layout().ranks, train, name, 0, SAVED_AT, None, str(made[name]), timeout_s=60)
        return made[name]

    return path_of


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_a_run_continues_in_another_layout(before: str, after: str, saved: Any, uninterrupted: list[float]) -> None:
    path = saved(before)
    checkpoint.verify(path)
    ranks = config_for(after).layout().ranks
    for losses in run(ranks, train, after, SAVED_AT, STEPS, str(path), None, timeout_s=60):
        assert_parity({"loss": uninterrupted[SAVED_AT:]}, {"loss": losses}, rtol=1e-9)


@pytest.mark.parametrize("name", ["pp2 zbv dp2", "dp2 tp2 ep4"])
def test_in_the_same_layout_it_continues_bit_for_bit(name: str, saved: Any) -> None:
    ranks = config_for(name).layout().ranks
    straight = run(ranks, train, name, 0, STEPS, None, None, timeout_s=60)
    resumed = run(ranks, train, name, SAVED_AT, STEPS, str(saved(name)), None, timeout_s=60)
    assert [losses[SAVED_AT:] for losses in straight] == resumed


def test_an_export_is_the_same_from_every_layout(saved: Any, tmp_path: Path) -> None:
    """Whole weights, without a process group; transformers reads them."""
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(12)[None] % 37
    logits = []
    for number, name in enumerate(("one", "pp2 zbv dp2", "dp2 tp2 ep4", "hsdp")):
        folder = tmp_path / str(number)
        assert export.write_model(saved(name), folder) == SAVED_AT
        ours = verify.models.load(folder, dtype=torch.float64).eval()
        logits.append(ours(ids).logits.detach())
    for other in logits[1:]:
        assert_parity({"logits": logits[0]}, {"logits": other}, rtol=1e-9)
    theirs = transformers.PhimoeForCausalLM.from_pretrained(tmp_path / "1", dtype=torch.float32).eval()
    assert_parity({"logits": theirs(ids).logits.detach()}, {"logits": logits[1].float()}, rtol=1e-5)


def test_a_checkpoint_with_another_stages_names_only_is_refused(saved: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    for file in saved("pp2").iterdir():  # the second rank's file is lost, and nobody says so
        if not file.name.startswith("rank-00001"):
            (path / file.name).write_bytes(file.read_bytes())
    about = json.loads((path / "checkpoint.json").read_text())
    about["files"] = {name: size for name, size in about["files"].items() if not name.startswith("rank-00001")}
    (path / "checkpoint.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"checkpoint .* has no model\."):
        run(1, train, "one", SAVED_AT, STEPS, str(path), None, timeout_s=60)
