"""Which modules form a unit: what stage 3 gathers and frees at once, and what stages 1 and 2 wait for before forward.

    model                 units
    |- embed_tokens       1  a large embedding or linear layer by itself
    |- layers             2, 3, 4  each child of a list of repeated blocks
    |- norm               0  the root: small remainders, and parameters that several units share
    '- lm_head            5

A unit's parameters are whole while its module's forward runs, and again during its backward. The root's are whole
during the whole forward of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

LARGE_BYTES = 2**20  # an embedding or linear layer outside of the blocks of at least this size is a unit by itself
ROOT = 0


def find_units(model: nn.Module, units: Sequence[str | nn.Module] | None) -> list[tuple[str, nn.Module]]:
    """Names and modules of the units in the order in which forward is expected to reach them; the root comes first.

    Args:
        model: the root.
        units: names (``*`` stands for anything within one part of a name, as in ``"model.layers.*"``) or modules, in
            the order of forward; None finds the repeated blocks and large layers.

    Raises:
        ValueError: a name that matches nothing, a module that is not the model's, or a unit inside another.
    """
    if units is None:
        found = list(_automatic(model))
    else:
        found = list(dict.fromkeys(pair for unit in _checked(units) for pair in _named(model, unit)))
    names = [name for name, _ in found]
    for name in names:
        if inside := next((other for other in names if other != name and name.startswith(other + ".")), None):
            raise ValueError(f"unit {name} lies inside unit {inside}: name one of them")
    return [("", model), *found]


def unit_of_parameters(model: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> dict[str, int]:
    """The index of each parameter's unit, by name; parameters that several units share belong to the root."""
    owners: dict[int, set[int]] = {}
    starts = {name + ".": index for index, (name, _) in enumerate(units) if index != ROOT}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        prefixes = [".".join(parts[:length]) + "." for length in range(1, len(parts))]
        owner = next((starts[prefix] for prefix in prefixes if prefix in starts), ROOT)
        owners.setdefault(id(parameter), set()).add(owner)
    return {
        name: next(iter(owners[id(p)])) if len(owners[id(p)]) == 1 else ROOT for name, p in model.named_parameters()
    }


def _checked(units: Sequence[str | nn.Module]) -> Sequence[str | nn.Module]:
    if isinstance(units, (str, nn.Module)):
        raise ValueError(f"units must be a list of names or modules, not one {type(units).__name__}")
    return units


def _named(model: nn.Module, unit: str | nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(unit, (str, nn.Module)):
        raise ValueError(f"units: {unit!r} is neither a name nor a module")
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name and (module is unit if isinstance(unit, nn.Module) else _matches(name, unit))
    ]
    if not found:
        what = f"{unit!r} matches no module" if isinstance(unit, str) else f"a {type(unit).__name__} is not a module"
        raise ValueError(f"units: {what} of the model below its root")
    for name, module in found:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            kind = type(module).__name__
            raise ValueError(f"unit {name} is a {kind}, which has no forward of its own: name its children, '{name}.*'")
    yield from found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True))


def _automatic(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Blocks and large layers below ``model``, outermost first, in model order."""
    repeated = _is_list(model) and _has_repeated_children(model)
    for child_name, child in model.named_children():
        name = prefix + child_name
        if not any(True for _ in child.parameters()):
            continue
        callable_child = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if callable_child and (repeated or _is_large_layer(child)):
            yield name, child
        else:
            yield from _automatic(child, name + ".")


def _is_list(module: nn.Module) -> bool:
    """A list of modules, or some members of one by their numbers, as a pipeline's stage has."""
    some = isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module)
    return some or isinstance(module, (nn.ModuleList, nn.Sequential))


def _has_repeated_children(container: nn.Module) -> bool:
    kinds = Counter(type(child) for child in container.children() if any(True for _ in child.parameters()))
    return max(kinds.values(), default=0) > 1


def _is_large_layer(module: nn.Module) -> bool:
    if not isinstance(module, (nn.Embedding, nn.Linear)):
        return False
    return sum(p.numel() * p.element_size() for p in module.parameters()) >= LARGE_BYTES
