"""From deviations to their probable cause: the sentences of a ``verify`` report.

A step's faults show in its own order, and what comes later in it follows from what came before. So causes are looked
for in this order, and only the first one found is told:

    ranks that disagree on gradients, norm, weights -> data -> outputs -> gradients -> norm -> loss -> the update
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import prod

import torch

from nanopar_core.evidence import Evidence, constant_ratio, largest
from nanopar_core.grid import RankLists

NO_RATIO = "no constant ratio"
COPIES = "copies counted as parts of the norm"
SHARD = "norm of the local shard used as the global norm"
REORDERED = "the same values in another order: shards put together wrongly"


def diagnose(e: Evidence) -> Iterator[str]:
    """Sentences for people, the earliest cause first."""
    yield from _names_and_shapes(e)
    yield from _rounding(e)
    apart = (_gradients_apart, _norm_apart, _weights_apart)
    for cause in (_infinite, *apart, _data, _outputs, _gradients, _norm, _loss, _update):
        if sentences := cause(e):
            yield from sentences
            return


def _names_and_shapes(e: Evidence) -> Iterator[str]:
    missing = [name for name in e.names("gradients", e.expected) if f"gradients.{name}" not in e.ranks[0]]
    if missing:
        yield f"no gradient for {_listed(missing)}: detached, frozen, not used, or of another name"
    shapes = [name for name, difference in e.wrong.items() if difference.kind == "shape"]
    for name in shapes[:1]:
        named = _name(e, e.ranks[0][name].numel() / max(1, e.expected[name].numel()), name)
        yield f"{name} has another shape" + (
            f", {named[0]} of the elements: a shard, not put together" if named else ""
        )


def _rounding(e: Evidence) -> Iterator[str]:
    """Replicas that all agree with the reference within the tolerance: said once and set aside."""
    near = [n for n in e.apart if n in e.expected and all(e.deviation(n, rank[n]) is None for rank in e.ranks)]
    if near:
        yield f"{_replicas(e, near[0])} differ by rounding: not every rank did the same arithmetic: {_listed(near)}"
    for name in near:
        del e.apart[name]


def _infinite(e: Evidence) -> list[str]:
    for name in e.wrong:
        for side, values in (("reference", e.expected), ("candidate", e.ranks[0])):
            if not values[name].isfinite().all():
                return [f"first value that is not finite: {name} of the {side}"]
    return []


# ------------------------------------------------------------------------------------------------ ranks that disagree


def _gradients_apart(e: Evidence) -> list[str]:
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name in e.names("gradients", e.apart):
        by_axes.setdefault(e.apart[f"gradients.{name}"], []).append(name)
    sentences = []
    for names in by_axes.values():
        leaf = f"gradients.{names[0]}"
        which = "all parameters" if len(names) == len(e.names("gradients", e.expected)) else _listed(names)
        sentences += [f"{_replicas(e, leaf)} differ: gradient not reduced: {which}{_sum_is_right(e, leaf)}"]
        sentences += _in_common(e, names)
    return sentences


def _norm_apart(e: Evidence) -> list[str]:
    leaf = e.first("norm")
    if leaf not in e.apart:
        return []
    if e.deviation(leaf, torch.stack(e.replicas(leaf)).square().sum().sqrt()) is None:
        why = f"{SHARD} (their squares add up to the right one)"
    else:
        why = "norm of gradients before their reduction, or of a part of them"
    return [f"{_replicas(e, leaf)} differ in {leaf}, gradients do not: {why}"]


def _weights_apart(e: Evidence) -> list[str]:
    """Weights of their own, from the start or from one rank's step; or the loss alone, where nothing else differs."""
    names = e.names("weights", e.apart)
    if not names:
        leaf = e.first("loss")
        return (
            [f"{_replicas(e, leaf)} differ in {leaf}: not reduced{_sum_is_right(e, leaf)}"] if leaf in e.apart else []
        )
    differ = f"{_replicas(e, f'weights.{names[0]}')} differ in weights"
    differ += ", gradients do not" if e.names("gradients", e.expected) else ""
    if not e.starts_right:
        return [f"{differ}: initial weights not broadcast: {_listed(names)}"]
    leaves = [f"weights.{name}" for name in names if f"weights.{name}" in e.expected]
    right = [all(e.deviation(leaf, rank[leaf]) is None for leaf in leaves) for rank in e.ranks]
    if not any(right) and all(_right_in_parts(e, leaf) for leaf in leaves):
        return [f"{differ}: every element is right on one of the ranks: parts not gathered: {_listed(names)}"]
    wrong = ", ".join(str(rank) for rank, agrees in enumerate(right) if not agrees)
    where = f"on rank {wrong} (the others agree with the reference)" if any(right) else "on some ranks"
    return [f"{differ}: optimizer step skipped or done differently {where}: {_listed(names)}"]


def _right_in_parts(e: Evidence, leaf: str) -> bool:
    """Whether the best of all ranks is right, element by element."""
    expected, copies = e.expected[leaf], [rank[leaf] for rank in e.ranks]
    if any(copy.shape != expected.shape for copy in copies):
        return False
    stacked = torch.stack(copies)
    nearest = (stacked - expected).abs().argmin(0, keepdim=True)
    return e.deviation(leaf, stacked.gather(0, nearest)[0]) is None


def _replicas(e: Evidence, leaf: str) -> str:
    return f"replicas on {' and '.join(e.apart[leaf])}"


def _sum_is_right(e: Evidence, leaf: str) -> str:
    """Whether the replicas are summands of the right value: then nothing but a reduction is missing."""
    copies = e.replicas(leaf)
    if leaf not in e.expected or len({copy.shape for copy in copies}) > 1:
        return ""
    total = torch.stack(copies).sum(0)
    for value, word in ((total, "sum"), (total / len(copies), "mean")):
        if e.deviation(leaf, value) is None:
            return f" (their {word} is right)"
    return ""


# ------------------------------------------------------------------------------------------------------ the first step


def _data(e: Evidence) -> list[str]:
    leaf = next((name for name in e.wrong if name.startswith("tokens")), None)
    if leaf is None:
        return []
    count, right = e.ranks[0][leaf].item(), e.expected[leaf].item()
    return [f"{leaf}: {count:g} instead of {right:g}: a micro-batch, or rows of one, dropped or repeated"]


def _outputs(e: Evidence) -> list[str]:
    leaf = next((name for name in e.wrong if name.startswith("outputs")), None)
    if leaf is None or (e.steps > 1 and e.starts_right):
        return []
    return [f"first deviation {leaf}: {_verdict(e, leaf)}; the forward pass has other weights, inputs or arithmetic"]


def _gradients(e: Evidence) -> list[str]:
    wrong = e.wrong_gradients
    if not wrong or (e.steps > 1 and e.starts_right):
        return []
    verdicts: dict[str, list[str]] = {}
    for name in wrong:
        verdicts.setdefault(_verdict(e, f"gradients.{name}"), []).append(name)
    if not _telling(e):
        if (ratio := _common_ratio(e, wrong)) is not None:
            return [_off_by_a_constant(e, ratio)]
        if list(verdicts) == [NO_RATIO]:
            return [_off_without_ratio(e)]
    if NO_RATIO in verdicts and e.first("loss") in e.wrong and 10 * len(_telling(e)) <= len(wrong):
        return [_off_without_ratio(e)]  # a ratio of few is chance, where nearly all deviate without one
    if e.steps > 1 and len(verdicts) > 1:
        verdicts.pop(NO_RATIO, None)  # in later steps a fault in one parameter echoes in all
    found = [f"{_listed(names)}: {what}" for what, names in verdicts.items()]
    return [f"first deviation {found[0]}", *(f"also {text}" for text in found[1:]), *_in_common(e, wrong)]


def _verdict(e: Evidence, leaf: str) -> str:
    expected, actual, ratio = e.expected[leaf], e.ranks[0][leaf], e.wrong[leaf].ratio
    if expected.shape == actual.shape and not actual.any():
        return "zero where the reference is not: detached, frozen or never written"
    meaning = "" if ratio is None else _meaning(e, ratio, leaf)
    if ratio is not None and (meaning or e.steps == 1 or abs(ratio - 1) > 0.01):  # the echo of a fault may be a ratio
        return f"constant ratio {ratio:.3f}{meaning}"
    return _misplaced(e, leaf) or NO_RATIO


def _misplaced(e: Evidence, leaf: str) -> str:
    """The right values in wrong places, or nothing."""
    if _reordered(e, leaf):
        return REORDERED
    if shift := _shift(e, leaf):
        return f"the right values {abs(shift)} elements too {'early' if shift < 0 else 'late'}: a part of another rank"
    return ""


def _telling(e: Evidence) -> list[str]:
    """Parameters whose gradient is right and large enough for a fault to show."""
    right = [name for name in e.expected if name.startswith("gradients.") and name not in e.wrong]
    return [name for name in right if largest(e.expected[name]) > e.floor * e.limits[name]]


def _common_ratio(e: Evidence, names: Sequence[str]) -> float | None:
    ratios = [e.wrong[f"gradients.{name}"].ratio for name in names]
    first = ratios[0]
    same = first and all(ratio is not None and abs(ratio / first - 1) <= 2 * e.slack for ratio in ratios)
    return first if same else None


def _off_by_a_constant(e: Evidence, ratio: float) -> str:
    meaning, loss = _meaning(e, ratio), e.wrong.get(e.first("loss"))
    divisor = "loss divisor, " if loss is not None or not meaning else ""
    also = "" if loss is None else "; the loss deviates too"
    return f"off by a constant on all parameters: {divisor}ratio {ratio:.3f}{meaning}{also}"


def _off_without_ratio(e: Evidence) -> str:
    loss, norm = e.wrong.get(e.first("loss")), e.wrong.get(e.first("norm"))
    if loss is not None:
        counted = any(name.startswith("tokens") for name in e.expected)
        return (
            f"all gradients and {loss.name} deviate without a constant ratio: tokens weighted wrongly (a mean of the "
            "ranks' means instead of one divisor for all tokens), "
            f"{'' if counted else 'rows dropped or repeated, '}or other initial weights (or another forward pass)"
        )
    if e.steps > 1 and norm is not None and norm.ratio is not None and (meaning := _meaning_of_norm(e, norm.ratio)):
        return f"first deviation {norm.name}: ratio {norm.ratio:.3f}{meaning}"
    ranks = "" if len(e.ranks) > 1 else "; give the results of all ranks to see which reduction is missing"
    steps = "" if e.steps == 1 else "; compare after one step to see where it begins"
    return f"all gradients deviate without a constant ratio, the loss does not: backward or reduction{ranks}{steps}"


def _norm(e: Evidence) -> list[str]:
    """Wrong in the first step, while gradients are right or not given."""
    leaf = e.first("norm")
    ratio = e.wrong[leaf].ratio if leaf in e.wrong else None
    if ratio is None:
        return []
    if not e.names("gradients", e.expected):
        loss = e.wrong.get(e.first("loss"))
        if loss is not None and loss.ratio is not None and abs(loss.ratio / ratio - 1) <= 2 * e.slack:
            return [
                f"{loss.name} and {leaf} off by the same constant: loss divisor, ratio {ratio:.3f}{_meaning(e, ratio)}"
            ]
        return [f"first deviation {leaf}: ratio {ratio:.3f}{_meaning_of_norm(e, ratio)}"]
    root = _name(e, ratio**2)
    named = f"{leaf}: ratio {ratio:.3f}" + (f" = square root of {root[0]}" if root else "")
    return [f"{named}, gradients agree: {COPIES if ratio > 1 else SHARD}"]


def _loss(e: Evidence) -> list[str]:
    """Wrong in the first step, while gradients and norm are right."""
    leaf = e.first("loss")
    if leaf not in e.wrong:
        return []
    ratio = e.wrong[leaf].ratio
    named = "" if ratio is None else f": ratio {ratio:.3f}{_meaning(e, ratio)}"
    if not (right := _given(e, "gradients", "norm")):
        return [f"first deviation {leaf}{named}"]
    verb = "does" if right == "norm" else "do"
    return [f"{leaf} deviates, {right} {verb} not: only its report is wrong{named}"]


def _update(e: Evidence) -> list[str]:
    """Loss, gradients and norm of the first step are right: what is wrong comes with its update."""
    weights = e.names("weights", e.wrong)
    later = [name for name in e.wrong if name.startswith(("loss[", "norm["))]
    if not weights and not later:
        return []
    for name in weights[:1]:
        if where := _misplaced(e, f"weights.{name}"):
            return [f"first deviation {name}: {where}"]
    stale = "stale master weights (loaded values that never reached them)"
    if later:
        begin = f"the first step's loss and norm agree, {later[0]} does not"
        return [f"{begin}: the optimizer step: {stale}, the clipping factor, or the optimizer's options and states"]
    if not (right := _given(e, "loss", "gradients", "norm")):
        return [f"weights deviate ({_listed(weights)}): compare loss, gradients and norm too to see where it begins"]
    begin = f"{right} agree, weights do not ({_listed(weights)})"
    if _along_gradients(e, weights):
        return [f"{begin} and differ along the gradients: clipping factor or learning rate"]
    return [f"{begin}: the optimizer step: {stale}, the clipping factor, or the optimizer's options and states"]


def _given(e: Evidence, *keys: str) -> str:
    """Those of the keys that there are, as words."""
    return ", ".join(key for key in keys if any(name.startswith(key) for name in e.expected))


def _along_gradients(e: Evidence, weights: Sequence[str]) -> bool:
    """Whether the wrong weights are the right ones plus one multiple of their gradients."""
    multiples = []
    for name in weights:
        leaf, gradient = f"weights.{name}", e.expected.get(f"gradients.{name}")
        if gradient is None or gradient.shape != e.ranks[0][leaf].shape:
            return False
        multiples.append(constant_ratio(gradient, e.ranks[0][leaf].double() - e.expected[leaf].double(), 10 * e.slack))
    first = multiples[0]
    return all(first and multiple and abs(multiple / first - 1) <= 10 * e.slack for multiple in multiples)


def _reordered(e: Evidence, leaf: str) -> bool:
    """Whether sorting leaves nothing of the difference."""
    one, other = (values[leaf].double().flatten().sort().values for values in (e.expected, e.ranks[0]))
    explained = min(1e-6 * largest(one), 1e-3 * e.wrong[leaf].deviation)
    return one.shape == other.shape and largest(one - other) <= explained


def _shift(e: Evidence, leaf: str) -> int:
    """By how many elements all that overlaps of the right values is displaced; 0 where it is not."""
    one, other = (values[leaf].double().flatten() for values in (e.expected, e.ranks[0]))
    if one.shape != other.shape:
        return 0
    quarter = -(-len(one) // 4)
    for start in range(0, len(one), quarter or 1):  # a large value of each quarter: some may have gone elsewhere
        place = start + int(one[start : start + quarter].abs().argmax())
        shift = int((other - one[place]).abs().argmin()) - place
        left, right = max(0, -shift), max(0, shift)
        difference = one[left : len(one) - right] - other[right : len(one) - left]
        if shift and len(difference) >= max(4, quarter) and largest(difference) <= 1e-3 * e.wrong[leaf].deviation:
            return shift
    return 0


# -------------------------------------------------------------------------------------------------------------- naming


def _meaning(e: Evidence, ratio: float, name: str = "") -> str:
    """`` = size of axis tp: summed where it should be averaged``, or nothing for a ratio that has no such name."""
    if named := _name(e, ratio, name):
        return f" = {': '.join(named)}"
    divisor = round(e.micro_batches / ratio) if e.micro_batches > 1 and ratio > 0.01 else 0
    if divisor and abs(e.micro_batches / ratio - divisor) <= e.slack * divisor:
        return (
            f" = {e.micro_batches}/{divisor}: divided by {divisor} where the step has {e.micro_batches} micro-batches"
        )
    return ": wrong sign" if abs(ratio + 1) <= e.slack else ""


def _meaning_of_norm(e: Evidence, ratio: float) -> str:
    """The norm takes part in what its gradients suffer, and can suffer from its own sum of squares."""
    root = _name(e, ratio**2)
    return _meaning(e, ratio) or (f" = square root of {root[0]}: {COPIES if ratio > 1 else SHARD}" if root else "")


def _name(e: Evidence, ratio: float, name: str = "") -> tuple[str, str] | None:
    """The sizes of which the ratio is one, the inverse, or a product of two, and what that means."""
    for places in [axes for axes in (e.own_axes(name), e.view(name)) if axes] + [e.places]:
        axes: dict[RankLists, str] = {}
        for axis, ranks in places.items():
            axes.setdefault(ranks, axis)  # of two names for the same ranks the first
        sizes = {f"size of axis {axis}": len(ranks[0]) for ranks, axis in axes.items()}
        if e.micro_batches > 1:
            sizes["number of micro-batches"] = e.micro_batches
        for count in (1, 2):
            products = {" x ".join(names): prod(sizes[n] for n in names) for names in combinations(sizes, count)}
            if fits := [names for names, size in products.items() if abs(ratio / size - 1) <= e.slack]:
                return " or ".join(fits), "summed where it should be averaged"
            if fits := [
                f"1/({names})" if count > 1 else f"1/{names}"
                for names, size in products.items()
                if abs(ratio * size - 1) <= e.slack
            ]:
                return " or ".join(fits), "averaged where it should be summed"
    return None


def _in_common(e: Evidence, wrong: Sequence[str]) -> list[str]:
    """What the wrong parameters have in common and the others have not, by their specs."""
    names = e.names("gradients", e.expected)
    kinds: dict[str, set[str]] = {}
    for name in names:
        spec = e.spec(name)
        for axis in (axis.name for axis in spec.grad_sum):
            kinds.setdefault(f"with grad_sum over {axis} deviate: missing reduction over {axis}", set()).add(name)
        if spec.data_axis is not None:
            axis = spec.data_axis.name
            kinds.setdefault(f"with data_axis {axis} deviate: divisor or reduction of its group", set()).add(name)
        for axis in (shard.axis.name for shard in spec.shards):
            kinds.setdefault(f"divided over {axis} deviate", set()).add(name)
    for axis in dict.fromkeys(shard.axis.name for name in names for shard in e.spec(name).shards):
        whole = {name for name in names if all(shard.axis.name != axis for shard in e.spec(name).shards)}
        kinds[f"not divided over {axis} deviate: a grad_sum over {axis} may be missing"] = whole
    for what, members in kinds.items():
        if set(wrong) <= members and len(members) < len(names):
            return [f"only parameters {what}"]
    return [] if len(wrong) == len(names) else [f"{len(wrong)} of {len(names)} parameters deviate"]


def _listed(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
