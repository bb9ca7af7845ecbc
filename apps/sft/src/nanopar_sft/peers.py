"""The peers of ``compare``: how public libraries train the same model, set up as their documentation says.

    torch-ddp         DistributedDataParallel                                               stage 0
    zero-redundancy   DistributedDataParallel and ZeroRedundancyOptimizer                   stage 1
    fsdp2-keep        fully_shard on every block, reshard_after_forward=False               stage 3, kept until backward
    fsdp2-reshard     the same, reshard_after_forward=True                                  stage 3
    deepspeed0 to 3   DeepSpeed, buckets of 4 M elements (by default they take 2 GB)        stages 0 to 3

The tensor-parallel ones are in ``peers_tensor.py``, the expert-parallel ones in ``peers_expert.py``, those of pipelines
in ``peers_pipeline.py``. torch's are always there; DeepSpeed and megatron-core are optional installs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanopar_sft import floors, peers_deepspeed, peers_expert, peers_pipeline, peers_tensor, workload
from nanopar_sft.floors import Needs
from nanopar_sft.setup import Setup, Step, train_on_parts


@dataclass(frozen=True)
class Peer:
    """See ``candidates.Candidate``."""

    build: Callable[[Setup], Step]
    needs: Needs
    package: str = "torch"
    differs: str | None = None

    def missing(self) -> str | None:
        """Why it cannot run here; None where it can."""
        module, _, install = self.package.partition("=")
        if importlib.util.find_spec(module) is None:
            return f'{module} is not installed: pip install "nanopar-sft[{install or module}]"'
        return None


def torch_ddp(setup: Setup, *, shard_optimizer: bool) -> Step:
    """DistributedDataParallel; ``shard_optimizer``: with ZeroRedundancyOptimizer."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(setup.make_model())
    optimizer: torch.optim.Optimizer
    if shard_optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        options: dict[str, Any] = workload.adamw_options(setup.fused)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = workload.adamw(model.parameters(), setup.fused)

    def step(batch: Tensor) -> Tensor:
        loss = train_on_parts(model, setup.parts(batch), model.no_sync)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fsdp2(setup: Setup, *, reshard: bool) -> Step:
    """``fully_shard`` on every block and then on the whole; gradients are reduced after every micro-batch."""
    from torch.distributed.fsdp import fully_shard

    model = setup.make_model()
    for block in blocks(model):
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer = workload.adamw(model.parameters(), setup.fused)

    def step(batch: Tensor) -> Tensor:
        loss = train_on_parts(model, setup.parts(batch))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the members of the outermost list of modules."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(next(lists, []))


DEEPSPEED = "deepspeed"
MEGATRON = "megatron=megatron-core"  # module, and how the optional install is called

PEERS: dict[str, Peer] = {
    "torch-ddp": Peer(partial(torch_ddp, shard_optimizer=False), floors.STAGES[0]),
    "zero-redundancy": Peer(partial(torch_ddp, shard_optimizer=True), floors.STAGES[1]),
    "fsdp2-keep": Peer(partial(fsdp2, reshard=False), floors.STAGE_3_KEPT),
    "fsdp2-reshard": Peer(partial(fsdp2, reshard=True), floors.STAGES[3]),
    **{
        f"deepspeed{stage}": Peer(partial(peers_deepspeed.zero, stage=stage), floors.STAGES[stage], DEEPSPEED)
        for stage in range(4)
    },
    **{
        f"torch-pp-{name}": Peer(partial(peers_pipeline.torch_pipeline, name=name), floors.PIPELINE[chunks])
        for name, (_, chunks) in peers_pipeline.KINDS.items()
    },
    "torch-tp": Peer(partial(peers_tensor.torch_tensor, sequence=False), floors.TENSOR),
    "torch-tp-sp": Peer(partial(peers_tensor.torch_tensor, sequence=True), floors.SEQUENCE),
    "megatron-tp": Peer(partial(peers_tensor.megatron, sequence=False), floors.TENSOR, MEGATRON),
    "megatron-tp-sp": Peer(partial(peers_tensor.megatron, sequence=True), floors.SEQUENCE, MEGATRON),
    "megatron-ep": Peer(peers_expert.megatron, floors.EXPERT, MEGATRON, peers_expert.OWN_ROUTER),
    "deepspeed-moe": Peer(peers_expert.deepspeed, floors.EXPERT, DEEPSPEED, peers_expert.OWN_ROUTER),
}
