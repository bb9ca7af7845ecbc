"""Tensor, sequence and context parallelism: one collective per block and direction, by any Hugging Face plan.

Example:
    >>> import torch, nanopar_core as core, nanopar_tensor as tensor
    >>> with core.launch() as world:  # under torchrun, or as one process
    ...     model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4)})
    ...     plan, axis = {"up": "colwise", "down": "rowwise"}, core.Mesh(tp=world.size).tp
    ...     specs = tensor.parallelize(model, plan, axis)  # plan None: the one that a model carries
    ...     y = model["down"](model["up"](torch.ones(3, 4)).relu())  # the same on all ranks
"""

from nanopar_core.loading import fill as fill
from nanopar_core.loading import load_parts as load_parts
from nanopar_core.recompute import keep_communicated as keep_sums
from nanopar_core.sharding import merge_state_dict as merge_state_dict
from nanopar_core.sharding import split_state_dict as split_state_dict
from nanopar_tensor.context import ContextAttention as ContextAttention
from nanopar_tensor.context import merge_sequence as merge_sequence
from nanopar_tensor.context import split_positions as split_positions
from nanopar_tensor.context import split_sequence as split_sequence
from nanopar_tensor.loss import VocabParallelLoss as VocabParallelLoss
from nanopar_tensor.loss import cross_entropy as cross_entropy
from nanopar_tensor.parallelize import parallelize as parallelize
from nanopar_tensor.plan import plan_of as plan_of
from nanopar_tensor.whole import set_sequence_length as set_sequence_length
from nanopar_tensor.whole import whole_sequences as whole_sequences

__all__ = [
    "ContextAttention",
    "VocabParallelLoss",
    "cross_entropy",
    "fill",
    "keep_sums",
    "load_parts",
    "merge_sequence",
    "merge_state_dict",
    "parallelize",
    "plan_of",
    "set_sequence_length",
    "split_positions",
    "split_sequence",
    "split_state_dict",
    "whole_sequences",
]
