"""The tensor-parallel peers of ``compare``: torch's DTensor styles and megatron-core on the dense model.

    torch-tp, torch-tp-sp          parallelize_module, loss_parallel; SequenceParallel with -sp
    megatron-tp, megatron-tp-sp    megatron-core's GPTModel with the same weights; sequence_parallel with -sp

megatron-core is an optional install; ``megatron_core.py`` sets it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanopar_models.loss import next_token_labels
from nanopar_sft import megatron_core, workload
from nanopar_sft.errors import InputError
from nanopar_sft.setup import Setup, Step, train_on_parts


def torch_tensor(setup: Setup, *, sequence: bool) -> Step:
    """torch.distributed.tensor.parallel, as its tutorial has it, on Hugging Face's Qwen3."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    _need_dense(setup)
    model = setup.make_model()
    assert setup.axis.group is not None
    mesh = DeviceMesh.from_group(setup.axis.group, setup.device.type)
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(_layers(model)):
        layer = f"model.layers.{number}."
        plan |= {f"{layer}self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{layer}mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {
            f"{layer}{name}": RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        if sequence:
            plan |= {f"{layer}{name}_layernorm": SequenceParallel() for name in ("input", "post_attention")}
            plan[f"{layer}self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[f"{layer}mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if sequence:
        plan["model.norm"] = SequenceParallel()
        # The model reads the sequence's length from the embeddings, so it is divided where the layers begin.
        plan["model.layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    parallelize_module(model, mesh, plan)
    divided = [p for p in model.parameters() if hasattr(p, "placements")]
    plain = [p for p in model.parameters() if not hasattr(p, "placements")]  # fused AdamW takes no mixture
    groups: list[dict[str, object]] = [{"params": group} for group in (divided, plain) if group]
    optimizer = workload.adamw(groups, setup.fused)
    of_heads = [p for name, p in model.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight"))]

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        loss: Any = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), next_token_labels(ids).flatten())
        whole: Tensor = loss.to_local()
        return whole

    return _step(setup, model, optimizer, loss_of, of_heads, loss_parallel)


def _layers(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.num_hidden_layers)


def _need_dense(setup: Setup) -> None:
    if setup.model != "dense":
        raise InputError(f"model={setup.model}: this peer is set up for --model dense only")


def _step(
    setup: Setup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    partial_sums: list[nn.Parameter],
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """Forward and backward in ``context()`` on the whole batch, gradients of ``partial_sums`` summed, update."""

    def step(batch: Tensor) -> Tensor:
        with context():
            total = train_on_parts(model, setup.whole_parts(batch), loss_of=loss_of)
        sum_together(partial_sums, setup)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def sum_together(parameters: Iterable[nn.Parameter], setup: Setup) -> None:
    """One all-reduce of gradients that are partial sums."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat, group=setup.axis.group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


# ------------------------------------------------------------------------------------------------------ megatron-core


def megatron(setup: Setup, *, sequence: bool) -> Step:
    """GPTModel of megatron-core with the weights of the dense model."""
    _need_dense(setup)
    megatron_core.initialize(setup, tensor_model_parallel_size=setup.axis.size)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    source = setup.make_model()
    shape: Any = source.config
    config = megatron_core.config_of(
        shape, qk_layernorm=True, tensor_model_parallel_size=setup.axis.size, sequence_parallel=sequence
    )
    if sequence:  # its wrapper of torch's norm refuses it; the norm itself is right, once its gradients are summed
        from megatron.core.transformer import torch_norm

        torch_norm.WrappedTorchNorm.__new__ = _plain_norm
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=shape.vocab_size,
        max_sequence_length=workload.MOST_POSITIONS,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=shape.rope_parameters["rope_theta"],
    )
    _copy_weights(dict(source.named_parameters()), model, shape, setup)
    del source
    optimizer = workload.adamw(model.parameters(), setup.fused)
    partial = ("q_layernorm", "k_layernorm", *(("layernorm",) if sequence else ()))
    norms = [p for name, p in model.named_parameters() if any(part in name for part in partial)]

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        positions = torch.arange(length, device=ids.device).expand(rows, length)
        hidden = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)[None, None]
        losses: Tensor = model(ids, positions, hidden, labels=ids.roll(-1, 1))
        return losses[:, :-1].mean()

    return _step(setup, model, optimizer, loss_of, norms)


def _plain_norm(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_more: Any) -> nn.Module:
    del config
    return nn.RMSNorm(hidden_size, eps=eps)


def _copy_weights(source: dict[str, nn.Parameter], model: nn.Module, shape: Any, setup: Setup) -> None:
    """Ours by megatron-core's names; q, k and v of a head lie beside each other there, gate and up one by one."""
    ranks, rank = setup.axis.size, setup.axis.rank

    def rows(weight: Tensor) -> Tensor:
        return weight.chunk(ranks, 0)[rank]

    def columns(weight: Tensor) -> Tensor:
        return weight.chunk(ranks, 1)[rank]

    weights = {
        "embedding.word_embeddings.weight": rows(source["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": source["model.norm.weight"],
        "output_layer.weight": rows(source["lm_head.weight"]),
    }
    for number in range(shape.num_hidden_layers):
        ours, theirs = f"model.layers.{number}.", f"decoder.layers.{number}."
        heads = [source[f"{ours}self_attn.{name}_proj.weight"].unflatten(0, (-1, shape.head_dim)) for name in "qkv"]
        weights |= {
            theirs + "input_layernorm.weight": source[ours + "input_layernorm.weight"],
            theirs + "self_attention.linear_qkv.weight": rows(torch.stack(heads, 1).flatten(0, 2)),
            theirs + "self_attention.q_layernorm.weight": source[ours + "self_attn.q_norm.weight"],
            theirs + "self_attention.k_layernorm.weight": source[ours + "self_attn.k_norm.weight"],
            theirs + "self_attention.linear_proj.weight": columns(source[ours + "self_attn.o_proj.weight"]),
            theirs + "pre_mlp_layernorm.weight": source[ours + "post_attention_layernorm.weight"],
            theirs + "mlp.linear_fc1.weight": torch.cat(
                [rows(source[f"{ours}mlp.{name}_proj.weight"]) for name in ("gate", "up")]
            ),
            theirs + "mlp.linear_fc2.weight": columns(source[ours + "mlp.down_proj.weight"]),
        }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights, list(weights)
