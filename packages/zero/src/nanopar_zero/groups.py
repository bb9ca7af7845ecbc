"""Optimizer parameter groups by parameter, name or pattern."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def resolve_groups(
    groups: Sequence[Mapping[str, Any]] | None, parameters: Mapping[str, nn.Parameter]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Find out which group each trainable parameter belongs to.

    Args:
        groups: torch-style groups whose ``params`` are parameters, names, or patterns like ``"*.bias"``; None means
            one group of everything.
        parameters: the model's trainable parameters by name.

    Returns:
        the groups' options without ``params``, and the group index of every parameter by name.

    Raises:
        ValueError: a name that matches nothing, a parameter in two groups, or in none.
    """
    if groups is None:
        return [{}], dict.fromkeys(parameters, 0)
    if isinstance(groups, Mapping) or not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise ValueError("groups must be a list of dictionaries, each with a key 'params'")
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    names_by_id = {id(parameter): name for name, parameter in parameters.items()}
    chosen: dict[str, int] = {}
    for index, group in enumerate(groups):
        for name in _names(group["params"], parameters, names_by_id):
            if chosen.setdefault(name, index) != index:
                raise ValueError(f"parameter {name} is in groups {chosen[name]} and {index}")
    if missing := [name for name in parameters if name not in chosen]:
        raise ValueError(
            f"{len(missing)} trainable parameters are in no group, the first is {missing[0]}: freeze or add it"
        )
    return options, chosen


def _names(params: Any, parameters: Mapping[str, nn.Parameter], names_by_id: Mapping[int, str]) -> Iterable[str]:
    for entry in [params] if isinstance(params, (str, nn.Parameter)) else params:
        if isinstance(entry, nn.Parameter):
            if entry.requires_grad and id(entry) not in names_by_id:
                raise ValueError(f"groups name a parameter of shape {list(entry.shape)} that the model does not have")
            found = [names_by_id[id(entry)]] if entry.requires_grad else []
        elif isinstance(entry, str):
            found = [name for name in parameters if fnmatchcase(name, entry)]
            if not found:
                raise ValueError(f"groups: {entry!r} matches no trainable parameter of the model")
        else:
            raise ValueError(f"groups: 'params' holds parameters, names or patterns, not {type(entry).__name__}")
        yield from found
