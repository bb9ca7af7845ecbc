"""A model of somebody else's: a small Qwen3 of transformers, trained for three steps, recomputed, saved."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run, train_plainly

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

STEPS, ROWS, LENGTH, VOCABULARY = 3, 4, 9, 53


def make_model(recompute: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = Qwen3ForCausalLM(config).double().train()
    if recompute:
        model.activation_checkpointing_enable()
    return model


def tokens(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]  # its own loss is computed in fp32
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def on_this_rank(recompute: bool, path: str) -> dict[str, Any]:
    axis = core.Mesh(dp=2).dp
    model = make_model(recompute)
    optimizer = zero.shard(model, adamw, axis=axis, stage=0, bucket_bytes=20_000)
    assert len(optimizer.reducer.buckets) > 3
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(step).chunk(axis.size)[axis.rank])
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
        losses.append(core.all_reduce(loss.detach(), axis).item() / axis.size)
    if axis.rank == 0:
        model.save_pretrained(path)
        (whole,) = (file for file in Path(path).glob("*.safetensors"))
        elements = sum(p.numel() for p in model.parameters())
        assert whole.stat().st_size < 8 * elements + 20_000, "a weight must not bring its bucket along"
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"loss": losses, "norm": norms, "gradients": gradients, "weights": weights}


@pytest.mark.parametrize("recompute", [False, True])
def test_qwen3_trains_as_in_plain_torch_and_saves_itself(recompute: bool, tmp_path: Path) -> None:
    steps = [[(tokens(step),)] for step in range(STEPS)]
    reference = train_plainly(make_model(False), steps, loss_of, adamw, max_norm=1.0)
    assert_parity(reference, run(2, on_this_rank, recompute, str(tmp_path)))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_parity({"weights": reference["weights"]}, {"weights": dict(saved.named_parameters())})
