"""When a unit's parameters are whole: the hooks on forward and backward, and the order in which units are gathered.

Stage 3, units 1 2 3 and the root 0 (o: gathering, =: whole, then freed; one unit ahead is prefetched):

    forward   0 o===================|           backward   0 o======================|
              1 o====|              |                      3 o====|
              2    o====|           |                      2    o=======|
              3       o========|    |                      1       o=========|

Stages 1 and 2 start all gathers after the optimizer's step, in the order of forward, and a unit only waits for its own;
nothing is freed. Stage 0 has nothing to do here.

Every forward and every backward of the model is a sweep that gathers each unit once, in one fixed order, whichever
units a rank's data use: a unit that was passed over is gathered when a later one is needed, and the rest at the end. In
backward the reductions of stage 3 have their fixed places between the gathers: a unit is reduced when backward reaches
one before it. So all ranks issue the same collectives in the same order ("FSDP", Zhao et al. 2023, section 3.3).

When is a unit done in backward? autograd runs the nodes of a graph in the opposite order of their making. So when the
gradient of a unit's output is there, all units that ran after this one have their gradients, if they get any at all.

What this asks of a model: a unit that runs twice in one forward does so on all ranks, and units run in the same order
on all ranks (neighbours may change places). Debug mode names the collectives of ranks that do not keep to it.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanopar_zero.buckets import Bucket, Reduction
from nanopar_zero.reducer import Reducer
from nanopar_zero.state_dicts import watch_state_dicts
from nanopar_zero.torch_private import call_at_end_of_backward, current_backward, in_backward, not_compiled
from nanopar_zero.units import ROOT

NEVER = sys.maxsize


@dataclass(eq=False)
class Unit:
    """A module, and the buckets that hold its parameters (in stages 1 and 2 also parameters of its neighbours)."""

    name: str
    module: nn.Module
    buckets: list[Bucket]
    forwards: int = 0  # in the forward of the model that is running
    first_run: int = NEVER  # all runs of units are numbered; the first one that has its backward to come
    last_run: int = NEVER
    is_watched: bool = False  # its last output has a backward; not so under reentrant recomputation
    hides_output: bool = False  # gave out something in which no tensor was found: stays whole for backward
    is_reused: bool = False  # ran twice in one forward of the model: it stays whole to the end of each sweep


class Windows:
    """Opens and closes the units of one model.

    Args:
        units: the root first, then in the order of forward.
        reducer: told when a unit's gradients are complete.
        frees: stage 3.
        prefetch: how many units are gathered ahead of the one that is needed.
        reshard_after_forward: free units after forward, to gather them again for backward.
        loose: the parameters outside of buckets, always whole, with how they would be reduced.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reducer: Reducer,
        *,
        frees: bool,
        prefetch: int,
        reshard_after_forward: bool,
        loose: Sequence[tuple[nn.Parameter, Reduction]] = (),
    ) -> None:
        self.units = list(units)
        self.reducer = reducer
        reducer.windows = weakref.ref(self)
        self.loose = list(loose)
        self.is_held = False
        self.frees, self._prefetch, self._reshards = frees, prefetch, reshard_after_forward
        self._keepers: Counter[Bucket] = Counter()
        self._opened: set[Bucket] = set()  # by ``keep``
        self._backward_order = [self.units[ROOT], *self.units[:ROOT:-1]]
        self._gathered = 0  # units of the present sweep that were gathered or passed over
        self._runs = 0
        self._reached = 0  # place in the order of backward
        self._reduced = 0  # up to which units were reduced, or left for the end
        self._run_reached = NEVER
        self._done_from = NEVER  # what began to run with this number or later has its gradients
        self._is_differentiable = False  # create_graph=True: a backward of the backward needs the parameters again
        self._forward_runs = False
        self._forwards_of_root = 0  # since the last backward
        self._backward_runs = False
        handles: list[RemovableHandle] = []
        for index, unit in enumerate(self.units):
            handles.append(unit.module.register_forward_pre_hook(ModuleHook(self, index, "begins"), prepend=True))
            handles.append(unit.module.register_forward_hook(ModuleHook(self, index, "ends")))
        handles += watch_state_dicts(self)
        self._hooks = weakref.finalize(self, _let_go_of, handles, self.buckets)
        self._hooks.atexit = False

    # ---------------------------------------------------------------------------------------------------- forward

    def forward_begins(self, index: int) -> None:
        """A unit is about to run: gather what comes next, and let its own parameters arrive."""
        unit = self.units[index]
        if in_backward():  # it is recomputed
            if self._backward_runs and index != ROOT:
                self._recompute_begins(index)
        else:
            if index == ROOT:
                self._begin_forward()
            self._runs += 1
            unit.last_run = self._runs
            unit.first_run = min(unit.first_run, self._runs)
            if self._forward_runs:
                unit.forwards += 1
                unit.is_reused |= unit.forwards > 1 and index != ROOT
                self._gather_up_to(self.units, index + self._prefetch)
        self._open(unit)

    def forward_ends(self, index: int, output: Any) -> None:
        """A unit has run: free it, and watch for the backward of what it gave out."""
        unit = self.units[index]
        given = list(tensors_in(output))
        watched = [tensor for tensor in given if tensor.grad_fn is not None]
        if index == ROOT or self.frees:
            reached = BackwardHook(self, index, unit.last_run)
            for tensor in watched:
                tensor.register_hook(reached)
                if (base := tensor._base) is not None and base.grad_fn is not None:
                    base.register_hook(reached)  # the one that counts when the view is modified in place
        if in_backward():  # of what is recomputed either the first output or this one has a backward, never both
            return
        unit.is_watched, unit.hides_output = bool(watched), torch.is_grad_enabled() and not given
        if index == ROOT:
            self._end_forward(unit.is_watched or unit.hides_output)
        elif self._reshards and not unit.is_reused:
            self._close_after_forward(unit)

    def _begin_forward(self) -> None:
        if self._forward_runs:  # an exception has ended the forward before this one
            self._close_all()
        self._forward_runs = True
        self._gathered = 0
        if not self._forwards_of_root:
            self._forget_forwards()
        for unit in self.units:
            unit.forwards = 0

    def _end_forward(self, has_backward: bool) -> None:
        self._forward_runs = False
        self._forwards_of_root += has_backward
        if self._reshards:
            for unit in self.units:
                self._close_after_forward(unit)
        while self.frees and self._gathered < len(self.units):  # passed over to the end: one by one
            unit = self.units[self._gathered]
            self._gather_up_to(self.units, self._gathered)
            if self._reshards:
                self._close(unit)

    def _close_after_forward(self, unit: Unit) -> None:
        if not unit.hides_output:
            self._close(unit)

    # --------------------------------------------------------------------------------------------------- backward

    def backward_reaches(self, index: int, run: int) -> None:
        """The gradient of a unit's output is there: units after it are done, this one's parameters are needed."""
        if not self._hooks.alive:
            return  # of a graph that was made before close
        if self.frees:
            self._begin_backward()
        self.reducer.begin_backward()
        if not self.frees:
            return
        if index != ROOT:
            if run >= self._done_from:
                return  # the base of a view that was not used
            self._run_reached, self._done_from = run, run + 1
            self._advance_backward(len(self.units) - index)
        self._open(self.units[index])

    def _recompute_begins(self, index: int) -> None:
        place = len(self.units) - index
        if self.units[index].is_watched:  # backward has reached the unit, or one after it in the same segment
            self._gather_up_to(self._backward_order, place)
        else:  # reentrant: passes over segments that ran later have ended
            self._done_from = min(self._done_from, self._run_reached)
            self._advance_backward(place)

    def _advance_backward(self, place: int) -> None:
        """Gather and reduce up to a place, one step after the other, also where this rank's data passed units over."""
        self._reduce_done()
        while self._reached < place:
            self._close_done(self._backward_order[self._reached])
            self._reached += 1
            self._gather_up_to(self._backward_order, self._reached + self._prefetch)
            self._reduce_done()

    def _reduce_done(self) -> None:
        """Reduce the units before the present place, in order; one that is not done holds back those after it."""
        while self._reduced + 1 < self._reached and self._forwards_of_root <= 1:
            unit = self._backward_order[self._reduced + 1]
            if unit.is_reused:
                pass  # its time is the end of the pass, as after several forwards that of all
            elif self._is_done(unit):
                self._close_done(unit)
                self.reducer.send(unit.buckets)
            else:
                break
            self._reduced += 1

    def _close_done(self, unit: Unit) -> None:
        if unit is not self.units[ROOT] and self._is_done(unit):
            self._close(unit)

    def _is_done(self, unit: Unit) -> bool:
        return unit.first_run >= self._done_from

    def _begin_backward(self) -> None:
        if not self._backward_runs:
            self._backward_runs = True
            self._gathered = self._reached = self._reduced = 0
            self._run_reached = self._done_from = NEVER
            self._is_differentiable = torch.is_grad_enabled()
            self._gather_up_to(self._backward_order, self._prefetch)
            self._open(self.units[ROOT])
            call_at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        """All gradients are computed; the reducer sends what is left after this."""
        self._done_from = 0
        self._advance_backward(len(self.units) - 1)
        self._backward_runs = False
        self._close_all()
        self._forget_forwards()

    # ----------------------------------------------------------------------------------------- by hand, and the end

    def hold(self) -> None:
        """From now on units stay whole once they are gathered, until ``release`` or the optimizer's step."""
        self.is_held = True

    def release(self) -> None:
        """Free what ``hold`` has kept."""
        self.is_held = False
        self._close_all()

    def keep(self, buckets: Iterable[Bucket]) -> None:
        """Make buckets whole, all ranks alike, and leave them so until ``let_go`` was called as often."""
        for bucket in buckets:
            self._keepers[bucket] += 1
            if not bucket.is_whole:
                self._opened.add(bucket)
            bucket.start_gather()
            bucket.wait_for_parameters()

    def let_go(self, buckets: Iterable[Bucket]) -> None:
        """The end of ``keep``: free what it has gathered, unless something else needs it that will free it."""
        needed = self.is_held or self._is_differentiable or self._forward_runs or self._backward_runs
        for bucket in buckets:
            self._keepers[bucket] -= 1
            if not self._keepers[bucket] and bucket in self._opened:
                self._opened.remove(bucket)
                if bucket.is_whole and not needed:
                    bucket.free()

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, each once; those of units in the order of forward."""
        of_units = [bucket for unit in self.units for bucket in unit.buckets]
        return list(dict.fromkeys([*of_units, *reversed(self.reducer.buckets)]))

    def buckets_of(self, parameters: Iterable[nn.Parameter]) -> list[Bucket]:
        """The buckets that hold any of these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        return [bucket for bucket in self.buckets if any(id(member) in wanted for member in bucket.members)]

    def wait(self) -> None:
        """Let all gathers arrive that were started."""
        for bucket in self.buckets:
            bucket.wait_for_parameters()

    @property
    def forward_runs(self) -> bool:
        """Whether the model's forward has begun and not ended: outside of it, whether an exception has ended it."""
        return self._forward_runs

    def reset(self) -> None:
        """After an exception in forward or backward: no sweep is running."""
        self._forward_runs = self._backward_runs = self._is_differentiable = False
        self._close_all()
        self._forget_forwards()

    def close(self) -> None:
        """Remove every hook; nothing is freed from now on."""
        self._hooks()
        self._opened.clear()

    # ----------------------------------------------------------------------------------------------------- parts

    def _gather_up_to(self, order: Sequence[Unit], last: int) -> None:
        """Start the gathers of a sweep up to a place in its order."""
        if self.frees:
            while self._gathered <= min(last, len(order) - 1):
                self._start(order[self._gathered])
                self._gathered += 1

    def _start(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            bucket.start_gather()

    def _open(self, unit: Unit) -> None:
        self._start(unit)  # outside of a sweep, or again in one
        for bucket in unit.buckets:
            bucket.wait_for_parameters()

    def _close(self, unit: Unit) -> None:
        if self.frees and not self.is_held and not self._is_differentiable:
            for bucket in unit.buckets:
                if bucket.is_whole and not self._keepers[bucket]:
                    bucket.free()

    def _close_all(self) -> None:
        for unit in self.units:
            self._close(unit)

    def _forget_forwards(self) -> None:
        self._forwards_of_root = 0
        for unit in self.units:
            unit.first_run = NEVER


class ModuleHook:
    """Forward hook of a unit's module.

    It holds the windows weakly: torch keeps hooks where Python's garbage collector does not look, and a cycle through
    them would keep model and buffers in memory for ever. In a copy of the model (deepcopy, pickle) it does nothing.
    """

    def __init__(self, windows: Windows | None = None, index: int = 0, moment: str = "") -> None:
        self._windows = None if windows is None else weakref.ref(windows)
        self._index, self._moment = index, moment

    @property
    def windows(self) -> Windows | None:
        """The windows, while somebody holds them."""
        return None if self._windows is None else self._windows()

    @not_compiled  # in a compiled block the hooks run between its compiled parts
    def __call__(self, _module: nn.Module, _args: Any, output: Any = None) -> None:
        """torch calls it before forward without, after forward with the output."""
        if (windows := self.windows) is None:
            return
        if self._moment == "begins":
            windows.forward_begins(self._index)
        else:
            windows.forward_ends(self._index, output)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


class BackwardHook:
    """Hook of the tensors that a unit gave out: the first of them that has its gradient counts."""

    def __init__(self, windows: Windows, index: int, run: int) -> None:
        self._windows, self._index, self._run = weakref.ref(windows), index, run
        self._last_pass = -1

    def __call__(self, _gradient: Tensor) -> None:
        """The whole gradient of the tensor is there, nothing before it was computed."""
        this_pass = current_backward()
        if this_pass != self._last_pass and (windows := self._windows()) is not None:
            self._last_pass = this_pass
            windows.backward_reaches(self._index, self._run)


def _let_go_of(handles: list[RemovableHandle], buckets: list[Bucket]) -> None:
    """No hook stays; what is on its way arrives, since a message whose handle is dropped may never be sent."""
    for handle in handles:
        handle.remove()
    for bucket in buckets:
        bucket.wait_for_parameters()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output: alone, or in tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
