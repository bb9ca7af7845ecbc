"""``parallelize``: divide a model's weights over an axis, by a plan.

    plan --matches--> names and styles --checks--> one ValueError, or nothing was touched yet
         --each style--> this rank's part of the weights, in modules that communicate --> specs

Heads are never cut: where the module around a projection says ``head_dim``, whole heads are divided. With fewer key and
value heads than ranks each is held by several ranks, whose gradients of it are then partial sums:

    2 kv heads, 4 ranks    q heads  0 1 | 2 3 | 4 5 | 6 7        axis.split(2): tp_outer divides the kv heads,
                           kv head    0 |   0 |   1 |   1        tp_inner sums the gradients of the copies
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nanopar_core import Axis, ParamSpec, Shard, as_axis
from nanopar_core.grid import split_sizes
from nanopar_core.plan import matches
from nanopar_core.sharding import part_of
from nanopar_tensor.attention_interface import divide_attention, has_attention_interface
from nanopar_tensor.context import ContextAttention, give_positions
from nanopar_tensor.embedding import VocabParallelEmbedding
from nanopar_tensor.experts import sum_over_ranks
from nanopar_tensor.linear import ColumnGroup, ColumnLinear, RowLinear, forget_outputs
from nanopar_tensor.plan import STYLES, plan_of
from nanopar_tensor.region import COLUMN, SEQUENCE_STYLE, Region, find_region
from nanopar_tensor.sequence import (
    Boundary,
    DividedSequence,
    WholeSequence,
    change_input,
    change_output,
    refuse_partial_outputs,
)
from nanopar_tensor.torch_private import hooks_on

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
M = TypeVar("M", bound=nn.Module)
CORE_STYLE = "attention_core"
BY_LONGEST_POSITION = ("longrope", "LongRope", "dynamic")  # kinds of rotary positions
GROUPS_ATTRIBUTE = "num_key_value_groups"  # how Hugging Face's attention modules call query heads per kv head


def parallelize(
    model: nn.Module,
    plan: Mapping[str, str] | None,
    axis: Axis | DeviceMesh | ProcessGroup,
    *,
    sequence: bool = False,
    context_axis: Axis | DeviceMesh | ProcessGroup | None = None,
    context_method: str = "all_gather",
    longest: int | None = None,
) -> dict[str, ParamSpec]:
    """Divide ``model`` over the ranks of ``axis``, in place; all ranks hold the same whole model before.

    Afterwards the model computes on every rank what it did before, from the same input: give all ranks of the axis
    equal batches. Names of parameters stay.

    Args:
        model: any module. Its dropout must be 0 where activations are divided.
        plan: styles by name pattern from the model's root (see ``nanopar_tensor.plan``); None: what the model carries.
        axis: of the tensor-parallel ranks.
        sequence: between the divided layers every rank has some positions of the sequences only: less memory for
            activations, the same number of bytes (see ``nanopar_tensor.sequence``). Modules of style
            ``sequence_parallel`` run on these; of a plan that a model carries without such modules (Hugging Face's),
            norms in and after the repeated blocks are taken for them. Inputs and outputs of the model stay whole.
        context_axis: of the ranks that each have some positions through the whole model; give it inputs that
            ``split_sequence`` has split. Modules of style ``attention_core`` are replaced by ``ContextAttention``;
            a Hugging Face model takes it as its attention function.
        context_method: "all_gather", "ulysses" or "ring" (see ``nanopar_tensor.context``).
        longest: no sequence that the model will be given has more positions. With ``context_axis``, needed where rotary
            positions depend on the longest one (LongRoPE), which they do beyond the original length only.

    Returns:
        The specs of the parameters that the plan names, for ``nanopar_zero.shard``, clipping and checkpoints; of a tied
        weight under all its names. Divided weights are new parameters: make the optimizer afterwards. The
        context axis is a data axis, and not in them: shard over ``mesh.flatten("dp", "cp")``.

    Raises:
        ValueError: before anything is touched: an unknown style, a pattern that matches nothing, a size or a number of
            heads that the ranks do not divide, a module of a kind that the style does not fit, hooks on what is
            replaced, tied weights that only one of their modules divides; with ``sequence`` no ``sequence_parallel``
            module, or parameters beside these that the plan does not name; with ``context_axis`` no
            ``attention_core`` in a model that is not Hugging Face's, or rotary positions that may depend on the longest
            one.
    """
    axis = as_axis(axis, "tp")
    context = None if context_axis is None else as_axis(context_axis, "cp")
    styles = matches(model, plan_of(model) if plan is None else plan, STYLES, is_carried=plan is None)
    region = find_region(model, styles, is_carried=plan is None) if sequence else None
    styles = styles if region is None else region.styles
    planner = _Planner(model, styles, axis, frozenset() if region is None else region.divided)
    pieces = [planner.piece(name, style) for name, style in styles.items()]
    _check_ties(model, pieces)
    _check_dropout(model)
    cores = [name for name, style in styles.items() if style == CORE_STYLE]
    if context is not None:
        _check_context(model, cores, context, context_method, longest)
        if context.size > 1 or context.communicates:
            _divide_context(model, cores, context, context_method)
    if axis.size == 1 and not axis.communicates:
        return {}
    specs = _Division(model, axis, region).apply(pieces)
    return {name: specs[name] for name, _ in model.named_parameters(remove_duplicate=False) if name in specs}


def _check_context(model: nn.Module, cores: list[str], axis: Axis, method: str, longest: int | None) -> None:
    ContextAttention(axis, method)  # an unknown method is its error
    if not cores and not has_attention_interface(model):
        raise ValueError(
            f"context_axis: the plan of {type(model).__name__} names no module of style {CORE_STYLE}, "
            "core(q, k, v, mask), to replace, nor is it a Hugging Face model with set_attn_implementation"
        )
    config = getattr(model, "config", None)
    scaling = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else type(scaling).__name__
    if scaling is not None and kind in BY_LONGEST_POSITION:
        name = "original_max_position_embeddings"
        stored = scaling.get(name) if isinstance(scaling, Mapping) else getattr(scaling, name, None)
        original = stored or getattr(config, name, None)
        if longest is None or original is None or longest > original:
            raise ValueError(
                f"context_axis: rotary positions of type {kind} depend on the longest position in a batch, of which "
                f"each rank knows only its own part; give longest, of at most {original} positions, if no sequence has "
                "more"
            )


def _divide_context(model: nn.Module, cores: list[str], axis: Axis, method: str) -> None:
    for name in cores:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, ContextAttention(axis, method, label=name, core=getattr(owner, child)))
    if not cores:
        divide_attention(model, axis, method)
    give_positions(model, axis)


@dataclass
class _Piece:
    """One entry of the plan: a module or a parameter, and the specs of its parameters."""

    name: str
    style: str
    module: nn.Module  # for a parameter, the one that owns it
    specs: dict[str, ParamSpec]
    replicas: int = 1  # ranks that hold the same key and value head
    queries: int = 0  # query heads of the same attention, where there are replicas


class _Planner:
    """Checks the entries of a plan one by one, and works out their specs."""

    def __init__(self, model: nn.Module, styles: Mapping[str, str], axis: Axis, on_parts: frozenset[str]) -> None:
        self.model, self.styles, self.axis = model, styles, axis
        self.on_parts = on_parts  # names of what works on some positions only
        self.vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        self.split_axes: dict[int, tuple[Axis, Axis]] = {}  # by number of kv heads

    def piece(self, name: str, style: str) -> _Piece:
        """One entry; raises ``ValueError`` where style, module and sizes do not fit."""
        if style == "packed_colwise":
            return self._stacked(name, style, dim=1, sections=2)
        if style == "rowwise" and self._is_parameter(name):
            return self._stacked(name, style, dim=2)
        if style == SEQUENCE_STYLE:
            return self._between(name, style)
        if self._is_parameter(name):
            raise ValueError(f"{name} is {style} by plan, which is for modules, but it is a parameter")
        module = self.model.get_submodule(name)
        if style in COLUMN:
            return self._column(name, style, self._of_kind(nn.Linear, name, style))
        if style == "rowwise":
            features = self._of_kind(nn.Linear, name, style).in_features
            self._check_heads(name, features)
            self._check_divisible(name, "input features", features)
            bias = ParamSpec(grad_sum=(self.axis,)) if name in self.on_parts else ParamSpec()
            specs = self._specs(name, module, weight=ParamSpec((Shard(self.axis, 1),)), bias=bias)
            return _Piece(name, style, module, specs)
        if style == "embedding_rowwise":
            self._check_embedding(name)
            spec = self._of_vocabulary(self._of_kind(nn.Embedding, name, style).num_embeddings)
            return _Piece(name, style, module, {f"{name}.weight": spec})
        if style == "replicated_with_grad_allreduce":
            own = {f"{name}.{n}": ParamSpec(grad_sum=(self.axis,)) for n, _ in module.named_parameters()}
            return _Piece(name, style, module, own)
        return _Piece(name, style, module, {})

    def _between(self, name: str, style: str) -> _Piece:
        """Whole on every rank; on some positions only where sequences are divided."""
        owner = name.rpartition(".")[0]
        module = self.model.get_submodule(owner if self._is_parameter(name) else name)
        names = [name] if self._is_parameter(name) else [f"{name}.{child}" for child, _ in module.named_parameters()]
        spec = ParamSpec(grad_sum=(self.axis,)) if name in self.on_parts else ParamSpec()
        return _Piece(name, style, module, dict.fromkeys(names, spec))

    def _of_kind(self, kind: type[M], name: str, style: str) -> M:
        module = self.model.get_submodule(name)
        if type(module) is not kind:
            raise ValueError(f"{name} is {style} by plan, which is for {kind.__name__}, not {type(module).__name__}")
        if hooks_on(module):
            raise ValueError(f"{name} has hooks, which would be lost, since it is replaced: register them afterwards")
        return module

    def _check_embedding(self, name: str) -> None:
        module = self.model.get_submodule(name)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option, None):
                raise ValueError(
                    f"{name} has {option}={getattr(module, option)}, which a divided embedding cannot follow: leave it "
                    "out of the plan"
                )

    def _column(self, name: str, style: str, module: nn.Linear) -> _Piece:
        features = module.out_features
        heads = self._heads(name, features)
        if style == "colwise_gather_output" or (not heads and features in self.vocabularies):
            spec = self._of_vocabulary(features)
            return _Piece(name, style, module, self._specs(name, module, weight=spec, bias=spec))
        size = self.axis.size
        if heads and heads < size and size % heads == 0:
            if heads not in self.split_axes:
                self.split_axes[heads] = self.axis.split(heads)
            outer, inner = self.split_axes[heads]
            spec = ParamSpec((Shard(outer, 0),), grad_sum=(inner,))
            specs = self._specs(name, module, weight=spec, bias=spec)
            return _Piece(name, style, module, specs, replicas=inner.size, queries=self._query_heads(name))
        self._check_heads(name, features)
        self._check_divisible(name, "output features", features)
        spec = ParamSpec((Shard(self.axis, 0),))
        return _Piece(name, style, module, self._specs(name, module, weight=spec, bias=spec))

    def _stacked(self, name: str, style: str, *, dim: int, sections: int = 1) -> _Piece:
        if not self._is_parameter(name):
            raise ValueError(f"{name} is {style} by plan, which is for a parameter of stacked experts")
        parameter = self.model.get_parameter(name)
        if parameter.dim() != 3:
            raise ValueError(f"{name} is {style} by plan, which is for [E, .., ..], not {list(parameter.shape)}")
        width = parameter.shape[dim] // sections
        self._check_divisible(name, f"dim {dim}", width)
        parts = (width,) * sections if sections > 1 else None
        owner = self.model.get_submodule(name.rpartition(".")[0])
        return _Piece(name, style, owner, {name: ParamSpec((Shard(self.axis, dim, sections=parts),))})

    def _of_vocabulary(self, entries: int) -> ParamSpec:
        """Uneven where the ranks do not divide it: the first ones have one more."""
        sizes = split_sizes(entries, self.axis.size)
        return ParamSpec((Shard(self.axis, 0, sizes=sizes if len(set(sizes)) > 1 else None),))

    def _specs(self, name: str, module: nn.Module, **specs: ParamSpec) -> dict[str, ParamSpec]:
        return {f"{name}.{child}": specs.get(child, ParamSpec()) for child, _ in module.named_parameters(recurse=False)}

    def _is_parameter(self, name: str) -> bool:
        owner, _, child = name.rpartition(".")
        return child in dict(self.model.get_submodule(owner).named_parameters(recurse=False))

    def _heads(self, name: str, features: int) -> int:
        """The number of heads of a projection; 0 where the module around it says no ``head_dim``."""
        head_dim = getattr(self.model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        return features // head_dim if isinstance(head_dim, int) and features % head_dim == 0 else 0

    def _query_heads(self, name: str) -> int:
        """Those of the widest projection beside this one."""
        parent = name.rpartition(".")[0]
        beside = [other for other in self.styles if self.styles[other] == "colwise" and other.startswith(f"{parent}.")]
        return max(self._heads(other, self._of_kind(nn.Linear, other, "colwise").out_features) for other in beside)

    def _check_heads(self, name: str, features: int) -> None:
        heads = self._heads(name, features)
        if heads and heads % self.axis.size:
            raise ValueError(
                f"{name} has {heads} heads, which {self.axis.size} ranks of axis {self.axis.name} do not divide; use a "
                f"number of ranks that divides {heads} (of key and value heads also a multiple of it)"
            )

    def _check_divisible(self, name: str, what: str, size: int) -> None:
        if size % self.axis.size:
            raise ValueError(
                f"{name} has {size} {what}, which {self.axis.size} ranks of axis {self.axis.name} do not divide"
            )


def _check_ties(model: nn.Module, pieces: list[_Piece]) -> None:
    """A weight that several modules share must be divided alike by all of them."""
    specs = {name: spec for piece in pieces for name, spec in piece.specs.items()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        for other in others:
            one, two = (specs.get(name, ParamSpec()) for name in (first, other))
            if one != two:
                divided, left = (first, other) if first in specs else (other, first)
                raise ValueError(
                    f"{first} and {other} are one weight, and the plan divides {divided} in another way than {left}: "
                    'divide both alike, such as "embedding_rowwise" for an embedding tied to a divided head'
                )


def _check_dropout(model: nn.Module) -> None:
    """Random numbers of a divided tensor would depend on the number of ranks."""
    for name, module in model.named_modules():
        chances = {"dropout": module.p} if isinstance(module, DROPOUTS) else {}
        chances |= {key: value for key, value in vars(module).items() if "drop" in key}  # for F.dropout
        for key, p in chances.items():
            if isinstance(p, float) and p > 0:
                raise ValueError(f"{name} has {key} {p:g}: its random numbers would depend on the ranks; set it to 0")


class _Division:
    """Carries out a checked plan; weights that several modules share stay shared."""

    def __init__(self, model: nn.Module, axis: Axis, region: Region | None) -> None:
        self.model, self.axis, self.region = model, axis, region
        self.done: dict[nn.Parameter, nn.Parameter] = {}  # this rank's part of each whole weight
        self.groups: dict[tuple[str, int, Boundary], ColumnGroup] = {}
        self.whole, self.divided = WholeSequence(axis), DividedSequence(axis)

    def apply(self, pieces: list[_Piece]) -> dict[str, ParamSpec]:
        """Replace modules and weights; the specs of all."""
        specs: dict[str, ParamSpec] = {}
        for piece in pieces:
            specs |= piece.specs
            if piece.style in COLUMN:
                self._column(piece)
            elif piece.style == "rowwise" and isinstance(piece.module, nn.Linear):
                self._row(piece)
            elif piece.style in ("rowwise", "packed_colwise"):
                self._parameter(piece)
            elif piece.style == "embedding_rowwise":
                self._embedding(piece)
            elif piece.style == "moe_tp_experts":
                sum_over_ranks(piece.module, self.axis, piece.name)
        if self.region is not None:
            self._divide_sequences(self.region)
        return specs

    def _divide_sequences(self, region: Region) -> None:
        """Where the region begins and ends, and where it is left for a while: hooks at the borders of modules."""
        divided, module = self.divided, self.model.get_submodule
        # What is registered first runs first: a block's input is scattered before anything in it is gathered.
        change_input(module(region.begins_at), divided.scatter, region.begins_at)
        for name in region.attentions:
            change_input(module(name), divided.enter, name)
        for name in region.mixtures:
            change_input(module(name), divided.collect_once, name)
            change_output(module(name), divided.split, name)
        if region.ends_after is not None:
            change_output(module(region.ends_after), divided.collect, region.ends_after)
        refuse_partial_outputs(self.model)

    def _boundary(self, name: str) -> Boundary:
        region = self.region
        if region is None or name not in (*region.divided, *region.heads):
            return self.whole
        return self.divided

    def _part(self, owner: nn.Module, name: str, spec: ParamSpec) -> nn.Parameter | None:
        whole: nn.Parameter | None = getattr(owner, name, None)
        if whole is None or not spec.shards:
            return whole
        if whole not in self.done:
            part = nn.Parameter(part_of(whole.detach(), spec), requires_grad=whole.requires_grad)
            part.__dict__.update(vars(whole))  # what a user has hung on it
            self.done[whole] = part
        return self.done[whole]

    def _replace(self, piece: _Piece, module: nn.Module) -> None:
        parent, _, child = piece.name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module.train(piece.module.training))

    def _parts(self, piece: _Piece) -> tuple[nn.Parameter, nn.Parameter | None]:
        spec_of = {name.rpartition(".")[2]: spec for name, spec in piece.specs.items()}
        weight = self._part(piece.module, "weight", spec_of["weight"])
        assert weight is not None
        return weight, self._part(piece.module, "bias", spec_of.get("bias", ParamSpec()))

    def _column(self, piece: _Piece) -> None:
        assert isinstance(piece.module, nn.Linear)
        weight, bias = self._parts(piece)
        parent = piece.name.rpartition(".")[0]
        boundary = self._boundary(piece.name)
        key = (parent, piece.module.in_features, boundary)
        if key not in self.groups:
            is_head = self.region is not None and piece.name in self.region.heads  # the first that backward needs
            in_attention = self.region is not None and parent in self.region.attentions
            self.groups[key] = ColumnGroup(
                boundary,
                parent or piece.name,
                keeps_whole=is_head,
                enters=self.divided if in_attention and boundary is self.divided else None,
            )
            self.model.get_submodule(parent).register_forward_hook(forget_outputs, always_call=True)
        group = self.groups[key]
        gathers = piece.style == "colwise_gather_output"
        features = piece.module.out_features
        self._replace(piece, ColumnLinear(weight, bias, group, features=features, gathers=gathers))
        if piece.replicas > 1:
            owner = self.model.get_submodule(parent)
            if hasattr(owner, GROUPS_ATTRIBUTE):  # this rank has one kv head for its query heads
                setattr(owner, GROUPS_ATTRIBUTE, piece.queries // self.axis.size)

    def _row(self, piece: _Piece) -> None:
        weight, bias = self._parts(piece)
        self._replace(piece, RowLinear(weight, bias, self._boundary(piece.name), piece.name))

    def _parameter(self, piece: _Piece) -> None:
        [(name, spec)] = piece.specs.items()
        child = name.rpartition(".")[2]
        setattr(piece.module, child, self._part(piece.module, child, spec))

    def _embedding(self, piece: _Piece) -> None:
        assert isinstance(piece.module, nn.Embedding)
        weight, _ = self._parts(piece)
        first = sum(split_sizes(piece.module.num_embeddings, self.axis.size)[: self.axis.rank])
        embedding = VocabParallelEmbedding(weight, first, piece.module.padding_idx, self.axis, piece.name)
        self._replace(piece, embedding)
