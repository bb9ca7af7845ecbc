"""LoRA by the library peft on somebody else's model: only the adapters are trained, in every stage, and saved alone."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zero.cases import gradients_of, weights_of
from tests.zero.test_huggingface import STEPS, adamw, loss_of, make_model, tokens
from torch import nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run, train_plainly

os.environ.setdefault("HF_HUB_OFFLINE", "1")
peft = pytest.importorskip("peft")
# peft asks a model of transformers by an older name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def with_lora(seed: int = 0) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = make_model(recompute=False)
    torch.manual_seed(seed)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


def on_this_rank(stage: int, path: str) -> dict[str, Any]:
    axis = core.Mesh(dp=2).dp
    model = with_lora(seed=axis.rank)  # the adapters of the first rank count
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    optimizer = zero.shard(model, adamw, axis=axis, stage=stage, bucket_bytes=2_000)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(step).chunk(axis.size)[axis.rank])
        loss.backward()
        gradients = gradients_of(model, optimizer)
        norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
        losses.append(core.all_reduce(loss.detach(), axis).item() / axis.size)
    assert not set(frozen) & set(gradients)
    with zero.gathered(model):
        if axis.rank == 0:
            model.save_pretrained(path)
    return {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights_of(model, optimizer)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lora_trains_as_in_plain_torch_and_saves_its_adapters(stage: int, tmp_path: Path) -> None:
    steps = [[(tokens(step),)] for step in range(STEPS)]
    reference = train_plainly(with_lora(), steps, loss_of, adamw, max_norm=1.0)
    assert_parity(reference, run(2, on_this_rank, stage, str(tmp_path)))
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 50_000
    saved = peft.PeftModel.from_pretrained(make_model(recompute=False), tmp_path)
    assert_parity({"weights": reference["weights"]}, {"weights": dict(saved.named_parameters())})
