"""The expert-parallel peers of ``compare``: the mixtures of Phi-MoE given to public libraries, experts over all ranks.

    megatron-ep      megatron-core's MoELayer: all-to-all dispatcher, softmax over the best two, no token left out
    deepspeed-moe    DeepSpeed's MoE: gate of GShard, best two; an expert takes 1.25 times an even share and no more

    every rank: its own sequences -> attention, norms, head as they are (whole on every rank)
                                  -> router, dispatch, experts / N, combine (the library's)
    gradients:  of experts complete where they are, as all tokens came there; all others summed over the ranks

Both start from the same weights as everybody else and have no balancing loss, as Phi-MoE has none here. But their
routers are not Phi-MoE's sparsemixer, so they train another model, with other losses: ``OWN_ROUTER``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanopar_models import PhiMoE
from nanopar_sft import megatron_core, peers_deepspeed, workload
from nanopar_sft.errors import InputError
from nanopar_sft.peers_tensor import sum_together
from nanopar_sft.setup import Setup, Step, train_on_parts

OWN_ROUTER = "own router"
CAPACITY = 1.25


class _Weights(NamedTuple):
    """Of a mixture, with this rank's experts only: ``[E, D]``, ``[E / N, 2 I, D]`` and ``[E / N, D, I]``."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


class _Mixture(nn.Module):
    """A library's layer in place of ``nanopar_models.phi_moe.SparseMoe``; it gives the output first."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x_BSD: Tensor, _layout: object) -> tuple[Tensor, Tensor]:
        """The block's output ``[B, S, D]``, and no router logits: nobody asks for them."""
        output: Tensor = self.moe(x_BSD)[0]
        return output, output.new_empty(0)


def megatron(setup: Setup) -> Step:
    """megatron-core; its experts run one after the other, as its grouped ones need CUDA and bf16."""
    model = _phi_moe(setup)
    shape = model.config
    megatron_core.initialize(setup, expert_model_parallel_size=setup.axis.size)
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    _mend_megatron()
    config = megatron_core.config_of(
        shape,
        perform_initialization=False,
        expert_model_parallel_size=setup.axis.size,
        num_moe_experts=shape.num_local_experts,
        moe_ffn_hidden_size=shape.intermediate_size,
        moe_router_topk=shape.num_experts_per_tok,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=shape.num_local_experts, moe_grouped_gemm=False)

    def layer(weights: _Weights) -> nn.Module:
        moe: Any = build_module(spec, config=config)
        experts = moe.experts.local_experts
        _fill(moe.router.weight, weights.router)
        for expert, gate_up, down in zip(experts, weights.gate_up, weights.down, strict=True):
            _fill(expert.linear_fc1.weight, gate_up)
            _fill(expert.linear_fc2.weight, down)
        return cast(nn.Module, moe)

    _replace_mixtures(model, setup, layer)
    model.to(setup.device)
    optimizer = workload.adamw(model.parameters(), setup.fused)
    on_all_ranks = [p for p in model.parameters() if getattr(p, "allreduce", True)]  # its mark of what is no expert

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        """This rank's part of the mean over all of them, so that gradients need only be summed."""
        return workload.loss_of(model, ids) / setup.axis.size

    def step(batch: Tensor) -> Tensor:
        part = train_on_parts(model, setup.parts(batch), loss_of=loss_of)
        sum_together(on_all_ranks, setup)
        optimizer.step()
        optimizer.zero_grad()
        return part * setup.axis.size

    return step


def _mend_megatron() -> None:
    """What megatron-core 0.16 stumbles over without TransformerEngine or without CUDA, replaced for this process."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):  # the router asks whether it is None, but it is only there with TE
        moe_utils.te_general_gemm = None
    token_dispatcher.all_to_all = _all_to_all


def _all_to_all(group: Any, rows: Tensor, received: Any, sent: Any) -> Tensor:
    """Its differentiable all-to-all, with numbers of rows as torch wants them, where it has tensors or arrays."""
    from megatron.core.tensor_parallel.mappings import all_to_all

    result: Tensor = all_to_all(group, rows, *(None if sizes is None else sizes.tolist() for sizes in (received, sent)))
    return result


# ------------------------------------------------------------------------------------------------------- DeepSpeed-MoE


class _Expert(nn.Module):
    """One expert, which DeepSpeed copies for each that a rank has: ``[.., D] -> [.., D]``."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


def deepspeed(setup: Setup) -> Step:
    """DeepSpeed; without sampling of the second expert, so that two runs are the same."""
    model = _phi_moe(setup)
    shape = model.config
    peers_deepspeed.choose_accelerator(setup)
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    def layer(weights: _Weights) -> nn.Module:
        moe: Any = MoE(
            hidden_size=shape.hidden_size,
            expert=_Expert(shape.hidden_size, shape.intermediate_size),
            num_experts=shape.num_local_experts,
            ep_size=setup.axis.size,
            k=shape.num_experts_per_tok,
            capacity_factor=CAPACITY,
            top2_2nd_expert_sampling=False,
        )
        experts = moe.deepspeed_moe.experts.deepspeed_experts
        _fill(moe.deepspeed_moe.gate.wg.weight, weights.router)
        for expert, gate_up, down in zip(experts, weights.gate_up, weights.down, strict=True):
            _fill(expert.gate_up.weight, gate_up)
            _fill(expert.down.weight, down)
        return cast(nn.Module, moe)

    _replace_mixtures(model, setup, layer)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    return peers_deepspeed.through_engine(setup, model, groups, stage=0)


# ---------------------------------------------------------------------------------------------------------------- both


def _phi_moe(setup: Setup) -> PhiMoE:
    """The model, before anything is replaced.

    Raises:
        InputError: it is another one, its router's logits are asked for, or ranks would have no equal part of experts.
    """
    model = setup.make_model()
    if not isinstance(model, PhiMoE) or model.config.output_router_logits:
        raise InputError(f"model={setup.model}: this peer is set up for Phi-MoE without auxiliary loss: --model moe")
    if model.config.num_local_experts % setup.axis.size:
        raise InputError(
            f"model={setup.model}: its {model.config.num_local_experts} experts are not divisible by "
            f"nproc={setup.axis.size}"
        )
    return model


def _replace_mixtures(model: PhiMoE, setup: Setup, layer: Callable[[_Weights], nn.Module]) -> None:
    """Put ``layer(weights)`` in place of every mixture of the model."""
    ranks, rank = setup.axis.size, setup.axis.rank
    for block in cast(Iterable[Any], model.model.layers):
        experts = block.mlp.experts
        gate_up, down = (weight.chunk(ranks)[rank] for weight in (experts.gate_up_proj, experts.down_proj))
        block.mlp = _Mixture(layer(_Weights(block.mlp.router.weight, gate_up, down)))


def _fill(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
