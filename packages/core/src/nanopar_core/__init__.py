"""What every nanopar strategy stands on: a mesh of named axes, collectives on an axis, a ledger, and a launcher.

Example:
    >>> import torch, nanopar_core as core
    >>> with core.launch() as world, core.ledger() as book:  # under torchrun, or as one process
    ...     mesh = core.Mesh(dp=world.size)
    ...     total = core.all_reduce(torch.ones(3), mesh.dp)

``nanopar_core.testing`` is a sub-module of its own that this package does not import.
"""

from nanopar_core.autograd import (
    all_gather_fwd_reduce_scatter_bwd,
    all_gather_fwd_split_bwd,
    all_reduce_fwd_all_reduce_bwd,
    all_reduce_fwd_identity_bwd,
    all_to_all_fwd_all_to_all_bwd,
    identity_fwd_all_reduce_bwd,
    reduce_scatter_fwd_all_gather_bwd,
    split_fwd_all_gather_bwd,
)
from nanopar_core.collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather_objects,
    reduce_scatter,
    send_recv,
)
from nanopar_core.grid import split_sizes
from nanopar_core.launch import World, launch
from nanopar_core.ledger import Ledger, ledger
from nanopar_core.mesh import Axis, Mesh, as_axis
from nanopar_core.recompute import keep_communicated
from nanopar_core.specs import ParamSpec, Shard, default_specs, global_norm, merge_specs

__all__ = [
    "Axis",
    "Ledger",
    "Mesh",
    "ParamSpec",
    "Pending",
    "Shard",
    "World",
    "all_gather",
    "all_gather_fwd_reduce_scatter_bwd",
    "all_gather_fwd_split_bwd",
    "all_reduce",
    "all_reduce_fwd_all_reduce_bwd",
    "all_reduce_fwd_identity_bwd",
    "all_to_all",
    "all_to_all_fwd_all_to_all_bwd",
    "as_axis",
    "barrier",
    "broadcast",
    "default_specs",
    "gather_objects",
    "global_norm",
    "identity_fwd_all_reduce_bwd",
    "keep_communicated",
    "launch",
    "ledger",
    "merge_specs",
    "reduce_scatter",
    "reduce_scatter_fwd_all_gather_bwd",
    "send_recv",
    "split_fwd_all_gather_bwd",
    "split_sizes",
]
