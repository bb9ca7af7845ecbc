"""A rank reads its own experts from a model directory, and nothing of the others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nanopar_core as core
import nanopar_expert as expert
from nanopar_core.loading import load_parts
from nanopar_core.sharding import merge_state_dict, places_of
from nanopar_core.testing import run

models = pytest.importorskip("nanopar_models")


def shape() -> Any:
    return models.PhiMoEConfig.preset("nano", num_hidden_layers=2, vocab_size=40)


def read_parts(folder: Path, etp: int) -> dict[str, Any]:
    mesh = core.Mesh(dp=2 // etp, tp=etp, ep=2 // etp, etp=etp)
    model = models.PhiMoE(shape(), device="meta")
    specs = expert.parallelize(model, None, mesh.ep, data_axis=mesh.edp, tensor_axis=mesh.etp)
    read: list[tuple[str, Any]] = []
    real = models.weights.safe_open

    class Recording:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = real(*args, **options)

        def __enter__(self) -> Any:
            self.file = self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.file.keys()

        def get_slice(self, name: str) -> Any:
            part = self.file.get_slice(name)

            class Slice:
                get_shape, get_dtype = part.get_shape, part.get_dtype

                def __getitem__(self, place: Any) -> torch.Tensor:
                    tensor: torch.Tensor = part[place]
                    read.append((name, tensor.numel()))
                    return tensor

            return Slice()

    models.weights.safe_open = Recording
    models.load_parts(model, folder, places_of(model, specs))
    models.weights.safe_open = real
    numbers = sum(count for _, count in read)
    whole = merge_state_dict(dict(model.named_parameters()), specs)
    return {
        "read": numbers == sum(parameter.numel() for parameter in model.parameters()),
        "experts": sorted({int(name.split(".experts.")[1].split(".")[0]) for name, _ in read if ".experts." in name}),
        "weights": {name: tensor.detach() for name, tensor in whole.items()},
    }


@pytest.mark.parametrize("etp", [1, 2])
def test_a_rank_reads_its_own_experts(tmp_path: Path, etp: int) -> None:
    model = models.PhiMoE(shape(), seed=5)
    models.save(model, tmp_path)
    count = shape().num_local_experts
    for rank, found in enumerate(run(2, read_parts, tmp_path, etp)):
        assert found["read"]
        own = range(count) if etp == 2 else range(rank * count // 2, (rank + 1) * count // 2)
        assert found["experts"] == list(own)
        for name, parameter in model.named_parameters():
            assert torch.equal(found["weights"][name], parameter), name


def test_parts_of_another_shape(tmp_path: Path) -> None:
    models.save(models.PhiMoE(shape(), seed=5), tmp_path)
    places = {"lm_head.weight": [[range(3)], [range(128)]]}
    with pytest.raises(ValueError, match=r"lm_head.weight is \[40, 128\] here, but its places make \[3, 128\]"):
        models.load_parts(models.PhiMoE(shape(), device="meta"), tmp_path, places)


def stacked_files(folder: Path) -> bool:
    """A mixture of one's own, under the model's names."""
    mesh = core.Mesh(dp=2, ep=2)
    with torch.device("meta"):
        moe = expert.MoE(expert.TopKRouter(4, 4, 2), expert.Experts(4, 4, 3))
    specs = expert.parallelize(moe, None, mesh.ep)
    load_parts(moe, specs, folder)
    whole = merge_state_dict(dict(moe.named_parameters()), specs)
    torch.manual_seed(0)
    right = expert.MoE(expert.TopKRouter(4, 4, 2), expert.Experts(4, 4, 3))
    return all(torch.equal(whole[name], parameter) for name, parameter in right.named_parameters())


def test_a_mixture_of_ones_own(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    moe = expert.MoE(expert.TopKRouter(4, 4, 2), expert.Experts(4, 4, 3))
    files.save_file(dict(moe.named_parameters()), tmp_path / "model.safetensors")
    assert run(2, stacked_files, tmp_path) == [True, True]
