"""What the peers from megatron-core share: its groups, its configuration, and answers for a machine without CUDA.

megatron-core is an optional install that is made for CUDA; where there is none, what it asks torch.cuda for in a
training step is answered for this process.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanopar_sft.setup import Setup


def initialize(setup: Setup, **sizes: int) -> None:
    """Its groups, such as ``tensor_model_parallel_size=2``; must come before its models. A second time does nothing."""
    if setup.device.type == "cpu":
        _answer_for_cuda()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes)


def config_of(shape: Any, **more: Any) -> Any:
    """Its TransformerConfig for a gated model of this shape, in fp32, without the kernels that need CUDA."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=False,
        **more,
    )


class _Anything:
    """Stands for a stream or an event: every method does nothing, and it is a context."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *_args: object) -> None: ...

    def __getattr__(self, _name: str) -> Any:
        return _Anything


def _answer_for_cuda() -> None:
    """megatron-core asks torch.cuda without looking whether there is any."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.stream = _Anything
    tensor: Any = Tensor
    tensor.cuda = lambda self, *_args, **_kwargs: self
    tensor.record_stream = lambda _self, _stream: None
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda _self, _name=None: nullcontext()
