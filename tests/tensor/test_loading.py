"""Divided models get their weights without a whole model on any rank: the same in every layout, and from files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tensor.test_parity import OWN_PLAN, Own, hugging_face
from torch import Tensor, nn

import nanopar_core as core
import nanopar_tensor as tensor
from nanopar_core.testing import run


def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random numbers of one parameter."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def filled(size: int) -> dict[str, Tensor]:
    axis = core.Mesh(tp=size).tp
    with torch.device("meta"):
        model = Own()
    specs = tensor.parallelize(model, OWN_PLAN, axis)
    tensor.fill(model, specs, value_of)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return tensor.merge_state_dict(dict(model.state_dict()), specs)


def test_initial_values_do_not_depend_on_the_layout() -> None:
    right = {name: value_of(name, tuple(p.shape)) for name, p in Own().named_parameters()}
    for size in (1, 2, 4):
        for found in run(size, filled, size):
            assert found.keys() == right.keys()
            for name, value in right.items():
                assert torch.equal(found[name], value), name


def loaded(folder: str, kind: str) -> dict[str, Tensor]:
    axis = core.Mesh(tp=2).tp
    with torch.device("meta"):
        model = build(kind)
    specs = tensor.parallelize(model, None, axis)
    tensor.load_parts(model, specs, folder)
    return tensor.merge_state_dict({n: p.detach() for n, p in model.named_parameters()}, specs)


def build(kind: str) -> nn.Module:
    return hugging_face("Qwen3", tie_word_embeddings=kind == "tied")


@pytest.mark.parametrize("kind", ["tied", "in several files"])
def test_a_rank_reads_its_parts_from_files(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    model = build(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if "several" in kind else "1GB")  # type: ignore[operator]
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("several" in kind)
    for found in run(2, loaded, str(tmp_path), kind):
        for name, parameter in model.named_parameters():
            assert torch.equal(found[name], parameter), name


class Packed(nn.Module):
    tp_plan = {"gate_up": "packed_colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(3, 8, 5)), nn.Parameter(torch.randn(3, 5, 4))


def packed_parts(folder: str) -> dict[str, Any]:
    axis = core.Mesh(tp=2).tp
    with torch.device("meta"):
        model = Packed()
    specs = tensor.parallelize(model, None, axis)
    tensor.load_parts(model, specs, folder)
    return {"shapes": [list(p.shape) for p in model.parameters()], **tensor.merge_state_dict(model.state_dict(), specs)}


def test_packed_weights_are_read_section_by_section(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    whole = Packed().state_dict()
    safetensors.save_file(whole, tmp_path / "model.safetensors")
    for found in run(2, packed_parts, str(tmp_path)):
        assert found.pop("shapes") == [[3, 4, 5], [3, 5, 2]]
        for name, value in whole.items():
            assert torch.equal(found[name], value), name


def test_errors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="holds no safetensors files"):
        tensor.load_parts(model, {}, tmp_path)
    safetensors.save_file({"weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no bias"):
        tensor.load_parts(model, {}, tmp_path)
    safetensors.save_file({"weight": torch.zeros(3, 2), "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    before = model.weight.clone()
    with pytest.raises(ValueError, match=r"bias is \[4\] in .*, but \[3\] in the model"):
        tensor.load_parts(model, {}, tmp_path)
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match=r"value_of\('weight'\) gave \[1\], not \[3, 2\]"):
        tensor.fill(model, {}, lambda _name, _shape: torch.zeros(1))
