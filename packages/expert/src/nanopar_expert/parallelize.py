"""``parallelize``: divide the experts of a model's mixtures over an axis, by a plan.

style                what becomes of it
ep_dispatch_experts  a module ``experts(hidden [T, D], indices [T, k], weights [T, k]) -> [T, D]``: is called with the
                     tokens of all ranks that chose this rank's experts
grouped_gemm         a parameter of such a module ``[E, ..]``: this rank has E/N of them

Everything else stays as it is: routers, shared experts, and the names of all parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nanopar_core import Axis, ParamSpec, Shard, as_axis
from nanopar_core.plan import carried_plan, matches
from nanopar_core.sharding import part_of
from nanopar_expert.dispatch import Dispatcher
from nanopar_expert.moe import MoE
from nanopar_expert.route import Capacity
from nanopar_expert.torch_private import hooks_on

DISPATCHED, STACKED = "ep_dispatch_experts", "grouped_gemm"
ROUTER_NAMES = ("router", "gate")
NUMBER = "num_experts"  # how Hugging Face's experts call the number of those that they have
AnyAxis = Axis | DeviceMesh | ProcessGroup


def parallelize(
    model: nn.Module,
    plan: Mapping[str, str] | None,
    axis: AnyAxis,
    *,
    data_axis: AnyAxis | None = None,
    tensor_axis: AnyAxis | None = None,
    token_axis: AnyAxis | None = None,
    capacity_factor: float | None = None,
    pads: bool = False,
    chunks: int = 1,
) -> dict[str, ParamSpec]:
    """Divide the experts of ``model`` over the ranks of ``axis``, in place; all ranks hold the same whole model before.

    Afterwards every rank gives the model tokens of its own; ranks may have different numbers of them, or none.

    Args:
        model: any module with stacked experts: nanopar's Phi-MoE, Hugging Face's mixtures, ``MoE``.
        plan: styles by name pattern from the model's root; None: the ``ep_plan`` that the model carries, or that of its
            ``MoE`` modules.
        axis: of the ranks that each have some of the experts (``mesh.ep``).
        data_axis: of the ranks that have the same experts (``mesh.edp``), over which their gradients are summed. Needed
            unless ``axis`` has all ranks of the job.
        tensor_axis: of ranks that are called with the same tokens and each have a part of the width of every expert
            (``mesh.etp``).
        token_axis: of ranks that are called with the same tokens, of which each sends a share to the experts
            (``mesh.tp`` where ``etp`` is 1).
        capacity_factor: an expert takes from each rank at most this times what it would get if all got the same; other
            tokens are left out, later ones first. None: no token is left out.
        pads: take exactly as many, so that no sizes have to be exchanged; all ranks then need equally many tokens.
        chunks: send, compute and send back tokens in so many parts, which overlap.

    Returns:
        The specs of the experts' parameters, for ``nanopar_zero.shard``, clipping and checkpoints.

    Raises:
        ValueError: before anything is touched: an unknown style, a pattern that matches nothing, experts that the ranks
            do not divide, parameters of an experts module that are not ``grouped_gemm``, experts that are tied or
            divided already, axes that do not go together, or no ``data_axis`` where others have the same experts.
    """
    axis = as_axis(axis, "ep")
    data = None if data_axis is None else as_axis(data_axis, "edp")
    tensor = None if tensor_axis is None else as_axis(tensor_axis, "etp")
    tokens = None if token_axis is None else as_axis(token_axis, "tp")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, not {chunks}")
    if _if_any(tensor) is not None and _if_any(tokens) is not None:
        raise ValueError(
            "tensor_axis and token_axis: ranks that are called with the same tokens either each have a part of every "
            "expert's width, or each send a share of the tokens; give one of them"
        )
    if pads and capacity_factor is None:
        raise ValueError("pads=True needs a capacity_factor, which says how many rows an expert takes")
    capacity = None if capacity_factor is None else Capacity(capacity_factor, pads)
    styles = _styles(model, plan)
    blocks = {name: _Block(model, name, styles) for name, style in styles.items() if style == DISPATCHED}
    _check_owned(styles, blocks)
    if not blocks:
        raise ValueError(f"the plan names no module of style {DISPATCHED} in {type(model).__name__}")
    _check_not_tied(model, blocks)
    if data is None:
        data = _no_copies(axis, tensor)
    elif data.size > 1 and len(set(data.ranks) & set(axis.ranks)) != 1:
        raise ValueError(
            f"data_axis {data.name} has several ranks of axis {axis.name}, whose experts differ: give the axis of the "
            "ranks with the same experts (mesh.edp)"
        )
    for name, block in blocks.items() if chunks > 1 else ():
        if hooks_on(block.module):
            raise ValueError(
                f"{name} has hooks, which with chunks would run for the last one only: register them later"
            )
    specs: dict[str, ParamSpec] = {}
    for block in blocks.values():
        specs |= block.specs(axis, data, tensor)
    communicates = any(one is not None and (one.size > 1 or one.communicates) for one in (axis, tensor, tokens))
    if not communicates and capacity is None:
        return specs
    for name, block in blocks.items():
        block.divide(specs, axis)
        dispatcher = Dispatcher(
            block.count,
            axis,
            tensor_axis=_if_any(tensor),
            token_axis=_if_any(tokens),
            chunks=chunks,
            capacity=capacity,
            label=name or "experts",
        )
        dispatcher.attach(block.module)
    return specs


def routers_of(model: nn.Module, plan: Mapping[str, str] | None = None) -> dict[str, nn.Module]:
    """The routers by name: modules called ``router`` or ``gate`` beside the experts that the plan names.

    Raises:
        ValueError: experts with no such module beside them.
    """
    styles = _styles(model, plan)
    found = {}
    for name in (name for name, style in styles.items() if style == DISPATCHED):
        parent = name.rpartition(".")[0]
        beside = dict(model.get_submodule(parent).named_children())
        names = [child for child in ROUTER_NAMES if child in beside]
        if not names:
            raise ValueError(f"{name} has no module called {' or '.join(ROUTER_NAMES)} beside it")
        found[f"{parent}.{names[0]}".lstrip(".")] = beside[names[0]]
    return found


def dispatchers_of(model: nn.Module) -> dict[str, Dispatcher]:
    """The dispatchers by the names of the experts' modules: after ``parallelize``, to read what was left out."""
    found = {}
    for name, module in model.named_modules():
        for hook in module._forward_hooks.values():
            if isinstance(owner := getattr(hook, "__self__", None), Dispatcher):
                found[name] = owner
    return found


def _styles(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    """Names with styles; without a plan, those of the one that the model carries, or its ``MoE`` modules."""
    if plan is not None:
        return matches(model, plan, (DISPATCHED, STACKED))
    if not hasattr(model, "ep_plan"):
        mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
        plan = {f"{name}.{child}": style for name, moe in mixtures.items() for child, style in moe.ep_plan.items()}
    if not plan:
        plan = carried_plan(model, "ep_plan", "expert-parallel")
    return matches(model, plan, (DISPATCHED, STACKED), is_carried=True)


class _Block:
    """The experts of one mixture."""

    def __init__(self, model: nn.Module, name: str, styles: Mapping[str, str]) -> None:
        self.name, self.module = name, model.get_submodule(name)
        self.parameters = {
            f"{name}.{child}".lstrip("."): parameter for child, parameter in self.module.named_parameters()
        }
        for full, parameter in self.parameters.items():
            if styles.get(full) != STACKED:
                raise ValueError(f"{full} belongs to experts that are to be divided, but is not {STACKED} by plan")
            if parameter.dim() < 2:
                raise ValueError(f"{full} is {STACKED} by plan, which is for [E, ..], not {list(parameter.shape)}")
        counts = {parameter.shape[0] for parameter in self.parameters.values()}
        for child, buffer in self.module.named_buffers():
            if buffer.dim() and buffer.shape[0] in counts:
                raise ValueError(
                    f"buffer {name}.{child} seems to have a row for each expert; only parameters are divided"
                )
        if len(counts) != 1:
            raise ValueError(f"{name} must have parameters [E, ..] of one number of experts E, not {sorted(counts)}")
        if any(isinstance(getattr(hook, "__self__", None), Dispatcher) for hook in self.module._forward_hooks.values()):
            raise ValueError(f"the experts of {name} are divided already")
        [self.count] = counts

    def specs(self, axis: Axis, data: Axis, tensor: Axis | None) -> dict[str, ParamSpec]:
        """By parameter; checks that the ranks divide it."""
        if self.count % axis.size:
            raise ValueError(
                f"{self.name} has {self.count} experts, which {axis.size} ranks of axis {axis.name} do not divide"
            )
        if tensor is None or tensor.size == 1:
            return {name: ParamSpec((Shard(axis, 0),), data_axis=data) for name in self.parameters}
        shapes = {name.rpartition(".")[2]: p.shape for name, p in self.parameters.items()}
        up, down = shapes.get("gate_up_proj"), shapes.get("down_proj")
        if len(shapes) != 2 or up is None or down is None or (up[1], up[2]) != (2 * down[2], down[1]):
            shown = {name: list(shape) for name, shape in shapes.items()}
            raise ValueError(
                f"tensor_axis divides gate_up_proj [E, 2I, D] and down_proj [E, D, I], but {self.name} has {shown}"
            )
        if down[2] % tensor.size:
            raise ValueError(
                f"the experts of {self.name} are {down[2]} wide, which {tensor.size} ranks of axis {tensor.name} do "
                "not divide"
            )
        ways = {"gate_up_proj": Shard(tensor, 1, sections=(down[2], down[2])), "down_proj": Shard(tensor, 2)}
        return {
            name: ParamSpec((Shard(axis, 0), ways[name.rpartition(".")[2]]), data_axis=data) for name in self.parameters
        }

    def divide(self, specs: Mapping[str, ParamSpec], axis: Axis) -> None:
        """Keep this rank's experts."""
        for full, parameter in self.parameters.items():
            owner_name, _, child = full.removeprefix(self.name).lstrip(".").rpartition(".")
            owner = self.module.get_submodule(owner_name)
            part = nn.Parameter(part_of(parameter.detach(), specs[full]), requires_grad=parameter.requires_grad)
            part.__dict__.update(vars(parameter))
            setattr(owner, child, part)
        if getattr(self.module, NUMBER, None) == self.count:
            setattr(self.module, NUMBER, self.count // axis.size)


def _check_owned(styles: Mapping[str, str], blocks: Mapping[str, Any]) -> None:
    for name, style in styles.items():
        if style == STACKED and not any(name in block.parameters for block in blocks.values()):
            raise ValueError(f"{name} is {STACKED} by plan, but belongs to no module of style {DISPATCHED}")


def _check_not_tied(model: nn.Module, blocks: Mapping[str, _Block]) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for block in blocks.values():
        for parameter in block.parameters.values():
            if len(names[parameter]) > 1:
                raise ValueError(f"{' and '.join(names[parameter])} are one parameter: tied experts cannot be divided")


def _no_copies(axis: Axis, tensor: Axis | None) -> Axis:
    """The axis of one rank over which nothing is summed, where all ranks of the job have different experts."""
    ranks = sum(map(len, axis.siblings))
    here = 1 if tensor is None else tensor.size
    if axis.size * here != ranks:
        raise ValueError(
            f"axis {axis.name} has {axis.size} of the job's {ranks} ranks, so others have the same experts: give "
            "data_axis, the axis over which their gradients are summed (mesh.edp)"
        )
    alone = tuple((rank,) for group in axis.siblings for rank in group)
    return Axis("edp", 1, 0, None, alone, communicates=False)


def _if_any(axis: Axis | None) -> Axis | None:
    return axis if axis is not None and (axis.size > 1 or axis.communicates) else None
