"""The names of torch that are not public: what nanopar_core.torch_private relies on."""

import importlib
from datetime import timedelta

import torch
import torch.distributed as dist

from nanopar_core import testing, torch_private


def time_outs(seconds: float) -> list[timedelta]:
    never = timedelta(days=1)
    before = torch_private.world_timeout(default=never)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=seconds))
    return [before, torch_private.world_timeout(default=never), torch_private.world_timeout(default=never)]


def test_the_time_out_of_the_world_can_be_read() -> None:
    (seen,) = testing.run(1, time_outs, 12.5, timeout_s=33.0)
    assert seen == [timedelta(seconds=33), timedelta(seconds=12.5), timedelta(seconds=12.5)]


def new_group_time_out() -> timedelta:
    group = dist.new_group([0])
    return group._get_backend(torch.device("cpu")).options._timeout


def test_torch_still_does_not_pass_it_on() -> None:
    """When this fails, new_group inherits the world's time-out and torch_private.world_timeout can go."""
    assert testing.run(1, new_group_time_out, timeout_s=33.0) == [timedelta(minutes=30)]


def test_the_slow_module_exists_and_is_still_lazy() -> None:
    assert importlib.util.find_spec(torch_private.LAZY_AND_SLOW) is not None  # type: ignore[attr-defined]
