"""torch's private names that this package needs, in one place; a test fails when torch changes them."""

from datetime import timedelta

import torch
import torch.distributed as dist

# What the first optimizer step and the first torch.testing call import; as slow as the rest of torch, so that the ranks
# of nanopar_core.testing share one import.
LAZY_AND_SLOW = "torch._dynamo"


def world_timeout(default: timedelta) -> timedelta:
    """The time-out of the world's process group: ``new_group`` does not inherit it, it would take 30 minutes."""
    world = dist.group.WORLD
    assert world is not None
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    options = world._get_backend(torch.device(device)).options
    timeout = getattr(options, "_timeout", default)
    assert isinstance(timeout, timedelta)
    return timeout
