"""Data parallelism and ZeRO for any PyTorch module, on any ``torch.distributed`` group.

Example:
    >>> import torch, nanopar_core as core, nanopar_zero as zero
    >>> with core.launch() as world:  # under torchrun, or as one process
    ...     model, mesh = torch.nn.Linear(4, 2), core.Mesh(dp=world.size)
    ...     optimizer = zero.shard(model, lambda groups: torch.optim.AdamW(groups, lr=1e-3), axis=mesh.dp, stage=0)
    ...     model(torch.ones(3, 4)).sum().backward()
    ...     norm = optimizer.clip_grad_norm_(1.0)
    ...     optimizer.step()
"""

from nanopar_zero.api import shard
from nanopar_zero.gathered import gathered
from nanopar_zero.loss_scale import LossScale
from nanopar_zero.optimizer import ZeroOptimizer
from nanopar_zero.precision import PrecisionPolicy
from nanopar_zero.saved import load, save, save_in_background
from nanopar_zero.state import full_gradients, full_state_dict, load_full_state_dict

__all__ = [
    "LossScale",
    "PrecisionPolicy",
    "ZeroOptimizer",
    "full_gradients",
    "full_state_dict",
    "gathered",
    "load",
    "load_full_state_dict",
    "save",
    "save_in_background",
    "shard",
]
