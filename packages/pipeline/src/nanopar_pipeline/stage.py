"""A stage: some modules of a model, in order, whose parameters keep the names that they have in the whole model.

    plan of a model                                        on a rank
    "embed":  (["ids"], ["hidden"])                        stage 0: embed, layers.0
    "layers": (["hidden", "mask"], ["hidden"])             stage 1: layers.1, layers.2, norm, head
    "norm":   (["hidden"], ["hidden"])
    "head":   (["hidden"], ["output"])

A name that an earlier module gives is a value of the model, and is sent where stages part; every other name belongs to
the batch, which every rank has (``ids``, ``mask``); what a batch lacks is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Item:
    """A module of the plan.

    Attributes:
        name: from the model's root; a member of a list has its number.
        takes, gives: names of its inputs, in its order, and of its outputs.
    """

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class Stage(nn.Module):
    """``stage(tensors from the stage before, micro-batch) -> tuple of tensors``, or the model's output.

    Args:
        number: of the stage.
        items: in order, with their modules.
        takes: names of the values that come from the stage before.
        gives: names of the values that the next stage gets; empty: the last item's output is the model's.
        known: names that any module of the whole plan takes.
    """

    def __init__(
        self,
        number: int,
        items: Sequence[tuple[Item, nn.Module]],
        takes: tuple[str, ...],
        gives: tuple[str, ...],
        known: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.known = known
        self.number, self.takes, self.gives = number, takes, gives
        self.items = [item for item, _ in items]
        for item, module in items:
            place(self, item.name, module)

    def forward(self, taken: Sequence[Tensor], batch: Any) -> Any:
        """Run all modules."""
        values: dict[str, Any] = dict(batch) if isinstance(batch, Mapping) else {}
        if unknown := sorted(set(values) - self.known):
            known = ", ".join(sorted(self.known))
            raise ValueError(f"the batch has {unknown[0]!r}, which no module of the plan takes; they take {known}")
        if not isinstance(batch, Mapping) and self.number == 0:
            first, parts = self.items[0].takes, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
            if isinstance(batch, (tuple, list)) and len(parts) != len(first):
                raise ValueError(
                    f"{len(parts)} inputs were given, but {self.items[0].name} takes {list(first)}: give a dictionary "
                    "by the names of the plan"
                )
            values = dict(zip(first, parts, strict=False))
        values |= dict(zip(self.takes, taken, strict=True))
        output: Any = tuple(taken)
        for item in self.items:
            output = self.get_submodule(item.name)(*(values.get(name) for name in item.takes))
            outputs = output if isinstance(output, tuple) and len(item.gives) > 1 else (output,)
            values |= dict(zip(item.gives, outputs, strict=True))
        return tuple(values[name] for name in self.gives) if self.gives else output

    def extra_repr(self) -> str:
        """What goes in and out."""
        return f"stage {self.number}, takes {list(self.takes)}, gives {list(self.gives)}"


class Stages(nn.Module):
    """The stages of a rank as one module, whose parameters have the names that they have in the whole model.

    For what must see a rank's part of the model as a whole: ``nanopar_zero.shard``, one optimizer, a checkpoint. A
    ``Runner`` takes it in place of the list.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts: dict[int, Stage] = {}  # no sub-modules: their own are placed below, under full names
        for stage in stages:
            if not isinstance(stage, Stage):
                raise ValueError(f"Stages are made of what split returns, not of a {type(stage).__name__}")
            self.parts[stage.number] = stage
            for item in stage.items:
                place(self, item.name, stage.get_submodule(item.name))

    def forward(self, number: int, taken: Sequence[Tensor], batch: Any) -> Any:
        """Run one stage."""
        return self.parts[number](taken, batch)

    def train(self, mode: bool = True) -> Stages:
        """Set the mode of the stages too."""
        for stage in self.parts.values():
            stage.train(mode)
        return super().train(mode)


def place(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module where its name says, below containers that have nothing of their own."""
    parts = name.split(".")
    last = parts[-1]
    for part, child in pairwise(parts):
        if not hasattr(root, part):
            root.add_module(part, nn.ModuleDict() if child.isdigit() else nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
