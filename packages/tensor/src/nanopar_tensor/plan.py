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
attention_core                  with context_axis: replaced by attention over divided sequences; else nothing
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "packed_colwise",
    "moe_tp_experts",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
    "attention_core",
)


def plan_of(model: nn.Module) -> dict[str, str]:
    """The plan that a model carries, from its root: its ``tp_plan``, as Hugging Face's and nanopar's models have it.

    Raises:
        ValueError: it carries none.
    """
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping):
        raise ValueError(f"{type(model).__name__} carries no tensor-parallel plan: write one, {{name pattern: style}}")
    return dict(plan)


def matches(model: nn.Module, plan: Mapping[str, str], *, is_carried: bool = False) -> dict[str, str]:
    """Full names of modules and parameters with their styles, in the model's order.

    Args:
        is_carried: entries that match nothing are skipped (a model may carry entries for layers that it has not).

    Raises:
        ValueError: an unknown style, a pattern that matches nothing, or a name that two patterns match differently.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, tuple[str, str]] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ValueError(f"plan[{pattern!r}]: unknown style {style!r}; there are {', '.join(STYLES)}")
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matching = [name for name in names if expression.fullmatch(name)]
        if not matching and not is_carried:
            raise ValueError(f"plan[{pattern!r}] ({style}) matches no module or parameter of {type(model).__name__}")
        for name in matching:
            other = found.setdefault(name, (pattern, style))
            if other[1] != style:
                raise ValueError(f"{name} is {other[1]} by plan[{other[0]!r}] and {style} by plan[{pattern!r}]")
    return {name: found[name][1] for name in names if name in found}
