"""``split``: this rank's stages of a model, by a plan; nothing of the others is kept.

    plan, in order of execution --lists become their members--> items --costs--> stages of about equal cost

Costs are the parameters that take part in products: an embedding costs nothing, of stacked experts the share that a
token visits. A head of a small model can weigh as much as several layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from nanopar_core import Axis, ParamSpec
from nanopar_core.plan import carried_plan
from nanopar_pipeline.hugging_face import HuggingFaceStage, hugging_face_items, is_hugging_face
from nanopar_pipeline.schedules import Schedule
from nanopar_pipeline.stage import Item, Stage

Plan = Mapping[str, tuple[Sequence[str], Sequence[str]]]


def split(
    model: nn.Module,
    plan: Plan | None,
    axis: Axis,
    *,
    chunks: int = 1,
    placement: str = "loop",
    costs: Mapping[str, float] | None = None,
) -> tuple[list[nn.Module], dict[str, ParamSpec]]:
    """This rank's stages, and specs of what several stages have.

    Args:
        model: whole, on the meta device too: build it there where one rank cannot hold it, and fill the stages.
        plan: for every module, in order of execution, the names of its inputs and outputs; a list of layers stands for
            its members one after the other. None: the ``pp_plan`` that the model carries; Hugging Face's
            models run by their own code (``hugging_face.py``).
        axis: of the ranks (``mesh.pp``).
        chunks: stages on a rank.
        placement: "loop" or "v", as the schedule has it.
        costs: by name of an item (``layers.3``), where the estimate is not good enough.

    Returns:
        The stages in the order of the schedule's ``stages_of(rank)``: modules whose parameters have the names of the
        whole model. The specs of their parameters: ``axis`` is that of the stages; the gradients of a tied parameter
        that two stages have are parts of a sum.

    Raises:
        ValueError: a plan that names what the model has not, or leaves parameters out; more stages than modules.
    """
    by_its_own_code = plan is None and is_hugging_face(model)
    if by_its_own_code:
        items = hugging_face_items(model)
        _check_complete(model, items)
    else:
        carried = carried_plan(model, "pp_plan", "pipeline") if plan is None else plan
        items = _items(model, carried, is_carried=plan is None)
    count = axis.size * chunks
    if count > len(items):
        raise ValueError(f"{len(items)} modules are too few for {count} stages, {chunks} on each of {axis.size} ranks")
    if unknown := sorted(set(costs or {}) - {item.name for item in items}):
        raise ValueError(f"costs name {unknown[0]}, which is no item of the plan; there are {items[0].name}, ...")
    weights = [(costs or {}).get(item.name, cost_of(model.get_submodule(item.name), model)) for item in items]
    bounds = balanced(weights, count)
    parts = [items[first:last] for first, last in pairwise(bounds)]
    shape = Schedule([[] for _ in range(axis.size)], chunks, 0, placement)
    specs = _tied(model, parts, axis, shape)
    stages: list[nn.Module] = []
    for number in shape.stages_of(axis.rank):
        if by_its_own_code:
            stages.append(HuggingFaceStage(number, model, parts[number], number == count - 1))
            continue
        takes, gives = _crossing(parts, number), _crossing(parts, number + 1)
        own = [(item, model.get_submodule(item.name)) for item in parts[number]]
        stages.append(Stage(number, own, takes, gives, frozenset(name for item in items for name in item.takes)))
    theirs = set(model.modules())
    for stage in stages:
        for module in stage.modules():
            if module not in theirs:  # the modes of the model's own modules stay
                module.training = model.training
    here = {name: ParamSpec(stages=axis) for stage in stages for name, _ in stage.named_parameters()}
    return stages, {**here, **specs}


def cost_of(module: nn.Module, model: nn.Module) -> float:
    """The parameters of products: 2-D ones, and of stacked experts ``[E, .., ..]`` the share that a token visits."""
    config: Any = getattr(model, "config", None)
    visited = getattr(config, "num_experts_per_tok", None)
    total = 0.0
    for owner in module.modules():
        if isinstance(owner, nn.Embedding):
            continue
        for parameter in owner.parameters(recurse=False):
            if parameter.dim() == 2:
                total += parameter.numel()
            elif parameter.dim() > 2:
                total += parameter.numel() * min(1.0, (visited or parameter.shape[0]) / parameter.shape[0])
    return total


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Bounds of ``parts`` ranges, none empty, of which the most expensive one is as cheap as possible."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][i]: the least possible maximum for the first i items in k parts, and where the last part begins
    best = [[(0.0 if not i else float("inf"), 0) for i in range(len(sums))]]
    for part in range(1, parts + 1):
        row = [(float("inf"), 0)] * len(sums)
        for end in range(part, len(sums)):
            row[end] = min((max(best[-1][begin][0], sums[end] - sums[begin]), begin) for begin in range(part - 1, end))
        best.append(row)
    bounds = [len(costs)]
    for part in range(parts, 0, -1):
        bounds.insert(0, best[part][bounds[0]][1])
    return bounds


def _items(model: nn.Module, plan: Plan, *, is_carried: bool) -> list[Item]:
    names = dict(model.named_modules())
    items = []
    for name, entry in plan.items():
        takes, gives = entry
        if name not in names:
            if is_carried:
                continue
            raise ValueError(f"plan[{name!r}] is no module of {type(model).__name__}")
        module = names[name]
        is_list = isinstance(module, nn.ModuleList)
        members = [f"{name}.{number}" for number in range(len(module))] if is_list else [name]
        items += [Item(member, tuple(takes), tuple(gives)) for member in members]
        if not gives:
            raise ValueError(f"plan[{name!r}] gives nothing")
    _check_complete(model, items)
    return items


def _check_complete(model: nn.Module, items: Sequence[Item]) -> None:
    prefixes = tuple(f"{item.name}." for item in items)
    left = [name for name, _ in model.named_parameters(remove_duplicate=False) if not name.startswith(prefixes)]
    if left:
        raise ValueError(f"{left[0]} belongs to no module of the plan")


def _crossing(parts: Sequence[Sequence[Item]], number: int) -> tuple[str, ...]:
    """Names of the values that go from stage ``number - 1`` to ``number``: given before, and taken from then on."""
    if not 0 < number < len(parts):
        return ()
    given = dict.fromkeys(name for part in parts[:number] for item in part for name in item.gives)
    needed: set[str] = set()
    for item in reversed([item for part in parts[number:] for item in part]):
        needed = (needed - set(item.gives)) | set(item.takes)
    return tuple(name for name in given if name in needed)


def _tied(model: nn.Module, parts: Sequence[Sequence[Item]], axis: Axis, shape: Schedule) -> dict[str, ParamSpec]:
    """Specs of parameters that several stages have; all ranks make the axes of all of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    stage_of = {item.name: number for number, part in enumerate(parts) for item in part}

    def rank_with(name: str) -> int:
        owner = next(item for item in stage_of if name.startswith(f"{item}."))
        return shape.rank_of(stage_of[owner])

    specs: dict[str, ParamSpec] = {}
    for every in names.values():
        ranks = sorted({rank_with(name) for name in every})
        if len(ranks) > 1:
            shared = axis.subset(ranks, f"{axis.name}_tied")
            if shared is not None:
                spec = ParamSpec(grad_sum=(shared,), stages=axis)
                specs |= {name: spec for name in every if rank_with(name) == axis.rank}
    return specs
