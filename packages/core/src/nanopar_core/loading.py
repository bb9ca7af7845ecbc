"""Weights for a divided model without any rank ever holding the whole: from a function, or from safetensors files.

    with torch.device("meta"): model = ...        nothing is allocated
    specs = parallelize(model, plan, axis)        this rank's shapes, still nothing
    fill(model, specs, value_of)                  one whole parameter at a time is made, this rank's part is kept
    load_parts(model, specs, folder)              this rank's part of each is read, and nothing else

With one stream of random numbers per parameter, seeded by its name, initial values do not depend on the layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanopar_core.sharding import part_of, places_of_part, whole_shape
from nanopar_core.specs import ParamSpec

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def fill(model: nn.Module, specs: Mapping[str, ParamSpec], value_of: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Give every parameter its part of ``value_of(name, whole shape)``; those on the meta device get storage.

    ``value_of`` must give the same on all ranks: seed its random numbers by the name. A tied parameter is filled once,
    under its first name. Buffers are left alone.
    """
    for name, parameter in list(model.named_parameters()):
        spec = specs.get(name, ParamSpec())
        shape = whole_shape(parameter, spec)
        value = value_of(name, shape)
        if value.shape != shape:
            raise ValueError(f"value_of({name!r}) gave {list(value.shape)}, not {list(shape)}")
        _give(model, parameter, part_of(value, spec))


@torch.no_grad()
def load_parts(model: nn.Module, specs: Mapping[str, ParamSpec], folder: str | Path) -> None:
    """Read this rank's part of every parameter from the safetensors files of ``folder``, and nothing else.

    Files as Hugging Face's libraries write them, one or several with an index, under the model's own names (one name of
    a tied parameter is enough). Parameters on the meta device get storage; dtypes stay. Buffers are left alone.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: no such files, a missing parameter or another shape; before anything is changed.
    """
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError('load_parts reads safetensors files: pip install "nanopar-core[checkpoint]"') from None
    files = _files(Path(folder))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in sorted(set(files.values()))}
        sources: list[tuple[nn.Parameter, Any, ParamSpec]] = []
        for parameter, all_names in names.items():
            found = next((name for name in all_names if name in files), None)
            if found is None:
                raise ValueError(f"{folder} has no {' or '.join(all_names)}")
            spec = next((specs[name] for name in all_names if name in specs), ParamSpec())
            source = opened[files[found]].get_slice(found)
            shape = whole_shape(parameter, spec)
            if tuple(source.get_shape()) != shape:
                raise ValueError(f"{found} is {list(source.get_shape())} in {folder}, but {list(shape)} in the model")
            sources.append((parameter, source, spec))
        for parameter, source, spec in sources:
            _give(model, parameter, _read_part(source, spec))


def _read_part(source: Any, spec: ParamSpec) -> Tensor:
    """This rank's part of a file's tensor, in as many reads as it has pieces there."""
    ranges = [[slice(at.start, at.stop) for at in of_dim] for of_dim in places_of_part(tuple(source.get_shape()), spec)]
    pieces: list[Tensor] = [source[place] if place else source[...] for place in product(*ranges)]
    for dim in reversed(range(len(ranges))):  # the last dim's pieces lie beside each other
        count = len(ranges[dim])
        if count > 1:
            groups = [pieces[first : first + count] for first in range(0, len(pieces), count)]
            pieces = [torch.cat(group, dim) for group in groups]
    return pieces[0]


def _files(folder: Path) -> dict[str, Path]:
    """File by name of the tensor."""
    from safetensors import safe_open

    index = folder / INDEX
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in places.items()}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    if not found:
        raise ValueError(f"{folder} holds no safetensors files")
    return found


def _give(model: nn.Module, parameter: nn.Parameter, part: Tensor) -> None:
    """Write the values; a parameter of the meta device is replaced wherever the model has it."""
    if not parameter.is_meta:
        parameter.copy_(part)
        return
    filled = nn.Parameter(part.to(parameter.dtype).clone(), requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            if own is parameter:
                setattr(module, name, filled)
