"""``gathered``: parameters are whole inside a block, to be read, or written by the first rank.

before   stage 3: |part|part|part|part|         stages 0-2: whole on every rank
inside   whole on every rank; here they may be written in place
at exit  did any rank write?  --> the first rank's weights to all, and into the masters that each rank keeps
         stage 3: freed again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from nanopar_core import Axis, all_reduce, broadcast
from nanopar_zero.buckets import Bucket, Reduction
from nanopar_zero.reducer import hooks_on
from nanopar_zero.replicas import copy_from_first
from nanopar_zero.windows import ModuleHook, Windows

UNTOUCHED, TOUCHED, WRITTEN = range(3)  # by nobody, by another rank than the first, by the first


@contextmanager
def gathered(model: nn.Module, names: str | Sequence[str] | None = None) -> Iterator[None]:
    """Within the block the named parameters are whole on every rank; called on all ranks alike.

    They may be read, used by the model's forward, and written in place under ``torch.no_grad()``. At the end the
    weights that the first rank has written go to all ranks, also when the block ends in an exception; what other ranks
    have written is lost. A whole weight has the compute dtype: under a ``PrecisionPolicy`` the masters of what was
    written become these rounded values, others keep theirs. No optimizer step belongs inside.

    Args:
        model: what was given to ``shard``, a module above it, or one below it with trained parameters.
        names: names of parameters below ``model``, or patterns such as ``"layers.0.*"``; None means all. In stage 3 the
            units that hold them are gathered.

    Raises:
        ValueError: a name that matches no parameter, or a model that no ``ZeroOptimizer`` has in hands.
    """
    parameters = _matching(model, names)
    with ExitStack() as stack:
        for windows in _windows_of(model):
            stack.enter_context(_whole(windows, parameters))
        yield


def _matching(model: nn.Module, names: str | Sequence[str] | None) -> list[nn.Parameter]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if names is None:
        return list(parameters.values())
    found: dict[str, nn.Parameter] = {}
    for pattern in [names] if isinstance(names, str) else names:
        matching = {name: p for name, p in parameters.items() if fnmatchcase(name, pattern)}
        if not matching:
            raise ValueError(f"gathered: {pattern!r} matches no parameter of the {type(model).__name__}")
        found |= matching
    return list(found.values())


def _windows_of(model: nn.Module) -> list[Windows]:
    """Those whose hooks are on the model's parameters, or on modules in it; in model order."""
    windows = [hook.windows for parameter in model.parameters() for hook in hooks_on(parameter)]
    on_modules = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    windows += [hook.windows for hook in on_modules if isinstance(hook, ModuleHook)]
    found = list(dict.fromkeys(each for each in windows if each is not None))
    if not found:
        raise ValueError(
            f"gathered: no ZeroOptimizer has this {type(model).__name__} in hands: pass the model that was given to "
            "shard, and is not yet closed"
        )
    return found


@contextmanager
def _whole(windows: Windows, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    buckets = windows.buckets_of(parameters)
    wanted = {id(parameter) for parameter in parameters}
    loose = [(parameter, reduction) for parameter, reduction in windows.loose if id(parameter) in wanted]
    windows.keep(buckets)
    marks = [[member._version for member in bucket.members] for bucket in buckets]
    marks_of_loose = [(parameter._version, parameter.data_ptr()) for parameter, _ in loose]
    try:
        yield
    finally:
        with torch.no_grad():
            _settle_buckets(buckets, marks)
            _settle_loose(loose, marks_of_loose)
        windows.let_go(buckets)


def _settle_buckets(buckets: Sequence[Bucket], marks: Sequence[Sequence[int]]) -> None:
    """What the first rank wrote reaches the weights and masters of all."""
    touched = [
        [
            bucket.is_whole and (bucket.put_back(i) or bucket.members[i]._version != mark)
            for i, mark in enumerate(before)
        ]
        for bucket, before in zip(buckets, marks, strict=True)
    ]
    answers = _agree([(bucket.reduction, bucket.masters.device, t) for bucket, t in zip(buckets, touched, strict=True)])
    for bucket, answer in zip(buckets, answers, strict=True):
        if not any(answer):
            continue
        for axis in bucket.reduction.axes:
            broadcast(bucket.parameters, axis, label="written weights")
        increment_version([member for member, what in zip(bucket.members, answer, strict=True) if what != UNTOUCHED])
        bucket.versions = [member._version for member in bucket.members]
        for index, what in enumerate(answer):
            if what == WRITTEN:
                bucket.take_in(index)


def _settle_loose(loose: Sequence[tuple[nn.Parameter, Reduction]], marks: Sequence[tuple[int, int]]) -> None:
    """Parameters outside of the buckets: frozen ones in stages 0 to 2."""
    touched = [
        [(parameter._version, parameter.data_ptr()) != mark] for (parameter, _), mark in zip(loose, marks, strict=True)
    ]
    answers = _agree([(reduction, p.device, t) for (p, reduction), t in zip(loose, touched, strict=True)])
    for (parameter, reduction), [what] in zip(loose, answers, strict=True):
        if what != UNTOUCHED:
            copy_from_first(parameter.data, reduction.axes, label="written weights")


def _agree(touched: Sequence[tuple[Reduction, torch.device, Sequence[bool]]]) -> list[list[int]]:
    """For each list of parameters what happened to them on any rank: one small collective per kind of axes."""
    kinds: dict[tuple[tuple[Axis, ...], torch.device], list[int]] = {}
    for number, (reduction, device, _) in enumerate(touched):
        kinds.setdefault((reduction.axes, device), []).append(number)
    answers: list[list[int]] = [[] for _ in touched]
    for (axes, device), numbers in kinds.items():
        flags: list[int] = []
        for number in numbers:
            reduction, _, here = touched[number]
            flags += [(WRITTEN if reduction.leads else TOUCHED) if flag else UNTOUCHED for flag in here]
        agreed: Tensor = torch.tensor(flags, dtype=torch.int32, device=device)
        for axis in axes:
            agreed = all_reduce(agreed, axis, op="max", label="written?")
        rest = agreed.tolist()
        for number in numbers:
            count = len(touched[number][2])
            answers[number], rest = rest[:count], rest[count:]
    return answers
