"""``model.state_dict()`` and ``model.load_state_dict()`` see whole weights in every stage: the hooks that see to that.

    state_dict        stages 1, 2   the parameters' gathers arrive first
                      stage 3       values are copies of whole parameters, gathered unit by unit
    load_state_dict   stages 0-2    the parameters are written; the next step takes them into the masters
                      stage 3       a unit is gathered, written, taken into the masters of its ranks, and freed again

All ranks call both alike. ``state_dict(keep_vars=True)`` gives the parameters themselves, in stage 3 without values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanopar_zero.buckets import Bucket
from nanopar_zero.units import ROOT

if TYPE_CHECKING:
    from nanopar_zero.windows import Windows


class StateDictHook:
    """One of the four hooks of a unit's module. Like forward hooks it holds the windows weakly; copies do nothing."""

    def __init__(self, windows: Windows | None = None, index: int = 0, moment: str = "") -> None:
        self._windows = None if windows is None else weakref.ref(windows)
        self._index, self._moment = index, moment

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """torch calls it with what belongs to the moment."""
        windows = None if self._windows is None else self._windows()
        if windows is None:
            return
        if self._moment == "state_dict begins":
            windows.wait()
        elif self._moment == "state_dict ends":
            state, prefix, _ = args
            fill_in(state, prefix, windows.buckets)
        elif self._moment == "load_state_dict begins":
            _, _, metadata, *_ = args
            if metadata.get("assign_to_params_buffers"):
                raise ValueError(
                    "load_state_dict(assign=True) would take the parameters away from their ZeroOptimizer: "
                    "leave assign out, or load before shard"
                )
            windows.wait()
            windows.keep(self._buckets(windows, module))
        else:
            buckets = self._buckets(windows, module)
            if windows.frees:
                for bucket in buckets:
                    bucket.adopt_edits()
            windows.let_go(buckets)

    def _buckets(self, windows: Windows, module: nn.Module) -> list[Bucket]:
        """The unit's own, and the root's if they hold parameters of it too; the root leaves units what is theirs."""
        unit = windows.units[self._index]
        if self._index == ROOT:
            return unit.buckets
        return windows.buckets_of(module.parameters())

    def __reduce__(self) -> tuple[type[StateDictHook], tuple[()]]:
        return StateDictHook, ()


def watch_state_dicts(windows: Windows) -> list[RemovableHandle]:
    """Put the hooks on the modules of all units."""
    handles: list[RemovableHandle] = []
    for index, unit in enumerate(windows.units):

        def hook(moment: str, index: int = index) -> StateDictHook:
            return StateDictHook(windows, index, moment)

        handles.append(unit.module.register_state_dict_pre_hook(hook("state_dict begins")))
        handles.append(unit.module.register_state_dict_post_hook(hook("state_dict ends")))
        handles.append(unit.module.register_load_state_dict_pre_hook(hook("load_state_dict begins")))
        handles.append(unit.module.register_load_state_dict_post_hook(hook("load_state_dict ends")))
    return handles


def fill_in(state: MutableMapping[str, Any], prefix: str, buckets: Iterable[Bucket]) -> None:
    """Put copies of the whole parameters of stage 3 in the place of what stands for them in a state dict."""
    found: dict[int, list[str]] = {}
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            found.setdefault(value.untyped_storage().data_ptr(), []).append(key)
    for bucket in buckets:
        if not bucket.frees_parameters:
            continue
        places = {view.untyped_storage().data_ptr(): index for index, view in enumerate(bucket.placeholders)}
        absent = {index: found[place] for place, index in places.items() if place in found}
        if bucket.is_whole:  # in a window, or held: copies outlive it
            bucket.wait_for_parameters()
            for key in found.get(bucket.parameters.untyped_storage().data_ptr(), ()):
                state[key] = state[key].clone()
        elif absent:
            bucket.start_gather()
            bucket.wait_for_parameters()
            for index, keys in absent.items():
                copy = bucket.weight_views[index].clone()  # one for all names of a tied weight
                state.update(dict.fromkeys(keys, copy))
            bucket.free()
