"""Plans: which module or parameter is divided how, by name pattern, in the vocabulary of Hugging Face's models.

{"model.layers.*.self_attn.q_proj": "colwise", ...}   * stands for one part of a name (a layer's number)

style                           what becomes of it
colwise                         a Linear: output features are divided; outputs stay divided
colwise_gather_output           likewise, and the outputs are put together
rowwise                         a Linear: input features are divided, outputs summed; of stacked experts ``[E, D, I]``
                                the last dim is divided
packed_colwise                  stacked experts ``[E, 2I, D]``: gate and up are divided one by one
moe_tp_experts                  the module of stacked experts: its outputs are summed
embedding_rowwise               an Embedding: the vocabulary is divided
replicated_with_grad_allreduce  a module that every rank has whole but uses on its own heads: its gradients are
                                summed (by zero, since the spec says so)
sequence_parallel               with sequence=True: runs on this rank's positions, gradients are summed; else nothing
whole_sequence                  with sequence=True: a module that runs on all positions, on every rank alike, as a
                                mixture whose experts another strategy has; else nothing
attention_core                  with context_axis: replaced by attention over divided sequences; else nothing
"""

from __future__ import annotations

from torch import nn

from nanopar_core.plan import carried_plan

STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "packed_colwise",
    "moe_tp_experts",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
    "whole_sequence",
    "attention_core",
)


def plan_of(model: nn.Module) -> dict[str, str]:
    """The plan that a model carries, from its root: its ``tp_plan``, as Hugging Face's and nanopar's models have it.

    Raises:
        ValueError: it carries none.
    """
    return carried_plan(model, "tp_plan", "tensor-parallel")
