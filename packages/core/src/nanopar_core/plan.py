"""Plans: dictionaries of name patterns and styles, as Hugging Face's models carry them.

    {"model.layers.*.self_attn.q_proj": "colwise", ...}     * stands for one part of a name, such as a layer's number

Which styles there are is the business of each strategy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def carried_plan(model: nn.Module, attribute: str, kind: str) -> dict[str, Any]:
    """The plan that a model carries as an attribute, from its root.

    Raises:
        ValueError: it carries none.
    """
    plan = getattr(model, attribute, None)
    if not isinstance(plan, Mapping):
        raise ValueError(f"{type(model).__name__} carries no {kind} plan: write one, {{name pattern: style}}")
    return dict(plan)


def matches(
    model: nn.Module, plan: Mapping[str, str], known: Sequence[str], *, is_carried: bool = False
) -> dict[str, str]:
    """Full names of modules and parameters with their styles, in the model's order.

    Args:
        known: the styles that there are.
        is_carried: entries that match nothing are skipped (a model may carry entries for layers that it has not).

    Raises:
        ValueError: an unknown style, a pattern that matches nothing, or a name that two patterns match differently.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, tuple[str, str]] = {}
    for pattern, style in plan.items():
        if style not in known:
            raise ValueError(f"plan[{pattern!r}]: unknown style {style!r}; there are {', '.join(known)}")
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matching = [name for name in names if expression.fullmatch(name)]
        if not matching and not is_carried:
            raise ValueError(f"plan[{pattern!r}] ({style}) matches no module or parameter of {type(model).__name__}")
        for name in matching:
            other = found.setdefault(name, (pattern, style))
            if other[1] != style:
                raise ValueError(f"{name} is {other[1]} by plan[{other[0]!r}] and {style} by plan[{pattern!r}]")
    return {name: found[name][1] for name in names if name in found}
