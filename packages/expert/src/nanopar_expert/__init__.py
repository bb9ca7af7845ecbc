"""Expert parallelism: all-to-all dispatch of tokens to the ranks that have their experts, balancing, never a hang.

Example:
    >>> import torch, nanopar_core as core, nanopar_expert as expert
    >>> with core.launch() as world:  # under torchrun, or as one process
    ...     moe = expert.MoE(expert.TopKRouter(8, 4, top_k=2), expert.Experts(4, 8, 16))
    ...     specs = expert.parallelize(moe, None, core.Mesh(dp=world.size, ep=world.size).ep)
    ...     y = moe(torch.ones(3, 8))  # tokens of this rank, experts of all
"""

from nanopar_expert.balance import BalancingLoss as BalancingLoss
from nanopar_expert.balance import BiasBalancer as BiasBalancer
from nanopar_expert.balance import ExpertLoad as ExpertLoad
from nanopar_expert.experts import Experts as Experts
from nanopar_expert.moe import MoE as MoE
from nanopar_expert.parallelize import dispatchers_of as dispatchers_of
from nanopar_expert.parallelize import parallelize as parallelize
from nanopar_expert.parallelize import routers_of as routers_of
from nanopar_expert.router import TopKRouter as TopKRouter

__all__ = [
    "BalancingLoss",
    "BiasBalancer",
    "ExpertLoad",
    "Experts",
    "MoE",
    "TopKRouter",
    "dispatchers_of",
    "parallelize",
    "routers_of",
]
