"""Tensor parallelism: one collective per block and direction, on any Hugging Face plan.

import nanopar_core as core, nanopar_tensor as tensor

with core.launch() as world:
    axis = core.Mesh(tp=world.size).tp
    specs = tensor.parallelize(model, None, axis)  # None: the plan that the model carries
    loss = model(input_ids=ids, labels=ids).loss  # the same on all ranks, as in one process
"""

from nanopar_tensor.loss import VocabParallelLoss as VocabParallelLoss
from nanopar_tensor.loss import cross_entropy as cross_entropy
from nanopar_tensor.parallelize import parallelize as parallelize
from nanopar_tensor.plan import plan_of as plan_of
from nanopar_tensor.sharding import merge_state_dict as merge_state_dict
from nanopar_tensor.sharding import split_state_dict as split_state_dict

__all__ = ["VocabParallelLoss", "cross_entropy", "merge_state_dict", "parallelize", "plan_of", "split_state_dict"]
