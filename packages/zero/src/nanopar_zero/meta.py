"""A model on the meta device gets storage and values module by module, so that no rank ever holds all of it.

modules in model order   embed    layers.0.attn   layers.0.mlp    layers.1.attn  ...
                         storage  storage         storage
                         init     init            init
                                                  `-- the bucket of layers.0 is complete: flat, broadcast, divided;
                                                      then its storage is given back (stage 3) or is the bucket's
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn


def home(tensor: Tensor) -> torch.device:
    """Where a tensor is, or will be: torch's default device for one on the meta device.

    Raises:
        ValueError: that is the meta device too.
    """
    device = torch.get_default_device() if tensor.is_meta else tensor.device
    if device.type == "meta":
        raise ValueError("shard makes storage on torch's default device, which is meta here: call it outside of that")
    return device


def filled(
    model: nn.Module, init: Callable[[nn.Module], object] | None, *, is_first: bool
) -> Iterator[dict[str, nn.Parameter]]:
    """Give parameters and buffers that are on the meta device storage, and have ``init`` fill them.

    Yields:
        the parameters whose values are there from now on, by name: first those that always had storage, then module by
        module (a tied one when ``init`` has seen all its modules).

    Raises:
        ValueError: ``init`` left a value unfilled (on the first rank, whose values count), or put a parameter, or a
            buffer of another shape or dtype, in the place of one.
    """
    named = dict(model.named_parameters())
    yield {name: parameter for name, parameter in named.items() if not parameter.is_meta}
    modules = [(module, own) for module in model.modules() if (own := _on_meta(module))]
    names = {id(parameter): name for name, parameter in named.items()}
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # of each tensor: a tied one has several
    for module, own in modules:
        for key, tensor in own.items():
            places.setdefault(id(tensor), []).append((module, key))
    to_come = Counter(id(tensor) for _, own in modules for tensor in own.values())
    for module, own in modules:
        for key, tensor in own.items():
            if getattr(module, key) is tensor:  # not yet, by a module that it is tied to
                _give_storage(tensor, places[id(tensor)])
        parameters = {key: getattr(module, key) for key, tensor in own.items() if id(tensor) in names}
        with torch.no_grad():
            if init is not None:
                init(module)
        _check_filled(module, own, parameters, is_first)
        to_come.subtract(id(tensor) for tensor in own.values())
        yield {names[id(own[key])]: p for key, p in parameters.items() if not to_come[id(own[key])]}


def _on_meta(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers without storage."""
    own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
    buffers = [*module.named_buffers(recurse=False, remove_duplicate=False)]
    return {key: tensor for key, tensor in [*own, *buffers] if tensor.is_meta}


def _give_storage(tensor: Tensor, places: Sequence[tuple[nn.Module, str]]) -> None:
    """NaN (or zeros, where there is no NaN) in all places of a tensor: what ``init`` forgets shall be seen."""
    value = float("nan") if tensor.is_floating_point() else 0
    real = torch.full_like(tensor, value, device=home(tensor), requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)  # what the model's author has noted on it
    for module, key in places:
        setattr(module, key, real)


def _check_filled(
    module: nn.Module, own: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], is_first: bool
) -> None:
    where = type(module).__name__
    for key, before in own.items():
        tensor = getattr(module, key)
        if key in parameters and tensor is not parameters[key]:
            raise ValueError(f"init put another parameter in the place of {where}.{key}: write it in place instead")
        if (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
            raise ValueError(
                f"init made {where}.{key} {tensor.dtype} {list(tensor.shape)}, "
                f"it was {before.dtype} {list(before.shape)}"
            )
        if is_first and tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(f"init left {where}.{key} {list(tensor.shape)} without values, or NaN in it")
