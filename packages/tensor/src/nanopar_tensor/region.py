"""Which part of a model works on divided sequences, worked out from its plan and the order of its modules.

    embed_tokens          before the region     all positions
    layers.0              begins here           its input is scattered
      input_layernorm     sequence_parallel     some positions
      self_attn           says head_dim         its input is gathered at its entry: it reads the sequence's length
      mlp                                       its column layers gather, its row layers reduce-scatter
    ...
    norm                  the last one          some positions
    lm_head               a column layer        gathers by itself; without one the last norm's output is gathered

A block is a member of an outermost ``ModuleList``; everything else is a place of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

COLUMN = ("colwise", "colwise_gather_output")
SEQUENCE_STYLE = "sequence_parallel"
WHOLE_STYLE = "whole_sequence"


@dataclass(frozen=True)
class Region:
    """Names, from the model's root.

    Attributes:
        styles: the plan's, with the norms that a carried plan leaves out.
        divided: planned modules in the region, without the head.
        begins_at: the module whose input is scattered.
        attentions: modules whose input is gathered at their entry, for the projections in them.
        mixtures: modules around experts, or said to be like these: all positions inside, some outside.
        ends_after: the module whose output is gathered; None where the head gathers.
        heads: column layers after the region that gather by themselves.
    """

    styles: dict[str, str]
    divided: frozenset[str]
    begins_at: str
    attentions: tuple[str, ...]
    mixtures: tuple[str, ...]
    ends_after: str | None
    heads: tuple[str, ...]


def find_region(model: nn.Module, styles: Mapping[str, str], *, is_carried: bool) -> Region:
    """The region of a plan.

    Raises:
        ValueError: no module is ``sequence_parallel``, or parameters between divided layers of which the plan does not
            say that they are.
    """
    names = [name for name, _ in model.named_modules() if name]
    block_of = {name: _block_of(model, name) for name in [*names, *styles]}
    styles = dict(styles)
    if is_carried and SEQUENCE_STYLE not in styles.values():
        styles |= dict.fromkeys(_norms(model, styles, block_of), SEQUENCE_STYLE)
    between = [name for name, style in styles.items() if style == SEQUENCE_STYLE]
    normed = [name for name in names if name in between]
    if not normed:
        raise ValueError(
            f"sequence=True, but the plan of {type(model).__name__} has no module of style {SEQUENCE_STYLE}: name the "
            "norms between the divided layers"
        )
    places = list(dict.fromkeys(block_of[name] for name in names))
    first, last = places.index(block_of[normed[0]]), places.index(block_of[normed[-1]])
    inside = set(places[first : last + 1])
    of_root = {name for name in between if "." not in name}  # a parameter of the root itself belongs to no block
    divided = frozenset(name for name in styles if block_of[name] in inside or name in of_root)

    def around(*wanted: str) -> list[str]:
        """The modules around those of the wanted styles, in the model's order."""
        found = {name.rpartition(".")[0] for name in divided if styles[name] in wanted}
        return [name for name, _ in model.named_modules() if name in found]

    attentions = tuple(name for name in around(*COLUMN) if hasattr(model.get_submodule(name), "head_dim"))
    said = {name for name in divided if styles[name] == WHOLE_STYLE}
    mixtures = tuple(name for name in names if name in {*around("moe_tp_experts"), *said})
    _check_all_said(model, styles, inside, block_of, (*attentions, *mixtures))
    heads = _heads(model, styles, places[last + 1 :], block_of)
    ends_after = None if heads else normed[-1]
    return Region(styles, divided, block_of[normed[0]], attentions, mixtures, ends_after, heads)


def _block_of(model: nn.Module, name: str) -> str:
    """The block that a module or parameter belongs to; for those that belong to none, the module."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:length])), nn.ModuleList):
            return ".".join(parts[: length + 1])
    owner = name.rpartition(".")[0]
    return owner if name in dict(model.named_parameters()) else name


def _norms(model: nn.Module, styles: Mapping[str, str], block_of: Mapping[str, str]) -> list[str]:
    """What Hugging Face's plans leave out: modules with parameters, directly in the blocks or after the last."""
    planned_blocks = {block_of[name] for name in styles if block_of[name] != name}
    found, is_after = [], False
    for name, module in model.named_modules():
        is_after = is_after or block_of.get(name) in planned_blocks
        if name in styles or not list(module.parameters(recurse=False)):
            continue
        is_direct = name.rpartition(".")[0] in planned_blocks
        if is_direct or (is_after and block_of[name] == name):
            found.append(name)
    return found


def _check_all_said(
    model: nn.Module,
    styles: Mapping[str, str],
    inside: set[str],
    block_of: Mapping[str, str],
    gathered: tuple[str, ...],
) -> None:
    """The gradient of a parameter between divided layers is partial: none may be forgotten."""
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        around = _and_its_parents(name)
        if block_of.get(owner, owner) not in inside or not parameter.requires_grad:
            continue
        if not any(one in styles or one in gathered for one in around):
            raise ValueError(
                f"{name} lies between divided layers, but the plan does not name it: under sequence parallelism its "
                f'gradient has to be summed over the ranks; give its module the style "{SEQUENCE_STYLE}"'
            )


def _and_its_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _heads(
    model: nn.Module, styles: Mapping[str, str], after: list[str], block_of: Mapping[str, str]
) -> tuple[str, ...]:
    """Column layers after the region, if the first module with parameters there is one."""
    with_parameters = (name for name, module in model.named_modules() if list(module.parameters(recurse=False)))
    there = [name for name in with_parameters if block_of.get(name, name) in after]
    if not there or styles.get(there[0]) not in COLUMN:
        return ()
    return tuple(name for name in there if styles.get(name) in COLUMN)
