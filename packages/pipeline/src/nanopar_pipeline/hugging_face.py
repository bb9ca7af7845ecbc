"""Stages of Hugging Face's models, which prepare masks and rotary positions between embedding and layers.

    plan of the model         embed_tokens, layers, norm (of its body), lm_head
    a stage                   the body itself, in which a module of another stage is an ``Elsewhere``, and the head
    forward of stage s > 0    body(inputs_embeds=what the stage before gave, attention_mask=..., position_ids=...)

So every stage runs the model's own code, and prepares for itself what its layers need; only hidden states are sent.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nanopar_pipeline.stage import Item, Stage

OF_THE_BATCH = ("attention_mask", "position_ids")


class Elsewhere(nn.Module):
    """In place of a module that another stage has: gives back what it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name in ("attention_type", "layer_type"):  # what a model's forward reads of its layers
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))

    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """``hidden``."""
        return hidden


class HuggingFaceStage(Stage):
    """``stage([hidden states], micro-batch) -> (hidden states,)``, or the head's output on the last one.

    A micro-batch is a dictionary: ``input_ids``, and ``attention_mask`` and ``position_ids`` if need be; or the ids.
    """

    def __init__(self, number: int, model: Any, own: Sequence[Item], is_last: bool) -> None:
        takes, gives = ("hidden_states",) if number else (), () if is_last else ("hidden_states",)
        super().__init__(number, [], takes, gives, frozenset(("input_ids", *OF_THE_BATCH)))
        self.items = list(own)
        names = {item.name for item in own}
        self.prefix = model.base_model_prefix
        body = model.base_model
        memo: dict[int, nn.Module] = {}
        for name in body_items(model):
            module = model.get_submodule(name)
            memo[id(module)] = module if name in names else Elsewhere(module)
        memo[id(body.config)] = body.config
        self.add_module(self.prefix, copy.deepcopy(body, memo))
        self.heads = [item.name for item in own if not item.name.startswith(f"{self.prefix}.")]
        for name in self.heads:
            self.add_module(name, model.get_submodule(name))

    def forward(self, taken: Sequence[Tensor], batch: Any) -> Any:
        """Run the body, and the head if it is here."""
        values = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        if unknown := sorted(set(values) - self.known):
            raise ValueError(f"the batch has {unknown[0]!r}, but a stage passes on {sorted(self.known)} only")
        given = {name: values[name] for name in OF_THE_BATCH if values.get(name) is not None}
        if self.number:
            given["inputs_embeds"] = taken[0]
        else:
            given["input_ids"] = values["input_ids"]
        hidden = self.get_submodule(self.prefix)(**given, use_cache=False).last_hidden_state
        if self.gives:
            return (hidden,)
        for name in self.heads:
            hidden = self.get_submodule(name)(hidden)
        return hidden


def is_hugging_face(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers' with a body that carries a plan."""
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    return hasattr(model, "base_model_prefix") and plan is not None


def body_items(model: Any) -> list[str]:
    """Names of the body's modules of the plan, in order of execution; a list's members one by one.

    Raises:
        ValueError: a bare body, without a head.
    """
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no head; split the model around it, such as a ...ForCausalLM")
    names = []
    for name in model.config.base_model_pp_plan:
        full = f"{model.base_model_prefix}.{name}"
        module = model.get_submodule(full)
        is_list = isinstance(module, nn.ModuleList)
        names += [f"{full}.{number}" for number in range(len(module))] if is_list else [full]
    return names


def hugging_face_items(model: Any) -> list[Item]:
    """All items in order of execution: the body's, then what the plan has beside it."""
    heads = [name for name in model.pp_plan if not name.startswith(f"{model.base_model_prefix}.")]
    return [Item(name, ("hidden_states",), ("hidden_states",)) for name in [*body_items(model), *heads]]
