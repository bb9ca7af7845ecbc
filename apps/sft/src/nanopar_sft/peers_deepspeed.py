"""DeepSpeed among the peers of ``compare``: its engine with ZeRO's stages, and the training step through it.

DeepSpeed is an optional install. Its expert-parallel layer is in ``peers_expert.py``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from nanopar_sft import workload
from nanopar_sft.setup import Setup, Step


def zero(setup: Setup, *, stage: int) -> Step:
    """The model as it is, under one of ZeRO's stages."""
    model = setup.make_model()
    return through_engine(setup, model, list(model.parameters()), stage=stage)


def choose_accelerator(setup: Setup) -> None:
    """Tell DeepSpeed what it runs on, which it reads when it is imported."""
    if setup.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def through_engine(setup: Setup, model: nn.Module, parameters: list[Any], *, stage: int) -> Step:
    """DeepSpeed's engine, with AdamW of torch; it divides the losses of micro-batches itself."""
    choose_accelerator(setup)
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=_config(setup, stage), dist_init_required=False
    )

    def step(batch: Tensor) -> Tensor:
        total = torch.zeros((), device=setup.device)
        for ids in setup.parts(batch):
            loss = workload.loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / setup.microbatches
        return total

    return step


def _config(setup: Setup, stage: int) -> dict[str, Any]:
    """The JSON configuration. Clipping is on at 1.0 unless it is switched off."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # checked against nothing when the batch does not come from its loader
        "gradient_accumulation_steps": setup.microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {**workload.adamw_options(setup.fused), "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": 4_000_000,
            "allgather_bucket_size": 4_000_000,
            "stage3_prefetch_bucket_size": 2_000_000,
            "stage3_param_persistence_threshold": 1000,
            "stage3_max_live_parameters": 4_000_000,
        },
    }
