"""The Phi-MoE model (Phi-3.5-MoE, GRIN arXiv 2409.12136; Phi-tiny/mini-MoE, SlimMoE arXiv 2506.18349).

    input_ids [B, S]
      model.embed_tokens                              -> hidden [B, S, D]
      model.layers.0 .. L-1:   hidden += self_attn(LayerNorm(hidden))
                               hidden += mlp(LayerNorm(hidden))      mlp = router -> experts, real tokens only
      model.norm, lm_head                             -> logits [B, S, V]
      loss                                            -> scalar

Parameter names are those of transformers' ``PhimoeForCausalLM``, so that plans in Hugging Face's vocabulary fit.
Whatever a strategy may want to replace is a sub-module: ``self_attn.core``, ``mlp.router``, ``mlp.experts``,
``model.embed_tokens``, ``lm_head``, ``loss``.

Shapes: B batch, S sequence, T real tokens, D hidden size, V vocabulary, E experts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanopar_models.attention import Attention
from nanopar_models.cache import KVCache
from nanopar_models.compiling import compile_in_place
from nanopar_models.config import PhiMoEConfig
from nanopar_models.experts import Experts
from nanopar_models.init import initial_value
from nanopar_models.layout import TokenLayout, token_layout
from nanopar_models.loss import NextTokenLoss, load_balancing_loss, next_token_labels
from nanopar_models.noise import CounterNoise, RouterNoise, TokenKeys
from nanopar_models.router import SparseMixerRouter

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class PhiMoEOutput(NamedTuple):
    """``logits`` ``[B, S, V]``; ``loss`` where labels were given; ``aux_loss`` where the config asks for it."""

    logits: Tensor
    loss: Tensor | None
    aux_loss: Tensor | None


class SparseMoe(nn.Module):
    """Router and experts over the real tokens of a batch; padding gets zeros.

    With ``router_noise`` in training mode, input and choice are randomised through ``noise``, the random numbers' seam.
    """

    def __init__(self, config: PhiMoEConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.stochastic, self.jitter = layer, config.router_noise, config.input_jitter_noise
        self.router: nn.Module = SparseMixerRouter(config)
        self.experts: nn.Module = Experts(config)
        self.noise: RouterNoise = CounterNoise()

    def forward(self, x_BSD: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """The block's output ``[B, S, D]`` and the router's logits ``[T, E]``."""
        rows = x_BSD.flatten(0, 1)
        x_TD = rows if layout.real is None else rows.index_select(0, layout.real)
        if self.stochastic and self.training:
            keys = self._keys(layout)
            if self.jitter > 0:
                x_TD = self.noise.jitter(x_TD, self.jitter, keys)
            logits, weights, indices = self.router(x_TD, self.noise, keys)
        else:
            logits, weights, indices = self.router(x_TD)
        y_TD = self.experts(x_TD, indices, weights)
        if layout.real is not None:
            y_TD = torch.zeros_like(rows).index_copy(0, layout.real, y_TD)
        return y_TD.view_as(x_BSD), logits

    def _keys(self, layout: TokenLayout) -> TokenKeys:
        if layout.sample_ids is None:
            raise ValueError(
                "router_noise needs sample_ids [B] in training mode, one number per sequence that differs between the "
                "sequences of a batch and between steps: equal ids draw equal noise"
            )
        samples, positions = layout.sample_ids.flatten(), layout.positions.flatten()
        if layout.real is not None:
            samples, positions = samples[layout.real], positions[layout.real]
        return TokenKeys(self.layer, samples, positions)


class DecoderLayer(nn.Module):
    """One layer. ``recompute``: keep only its input for the backward pass and compute the rest again."""

    def __init__(self, config: PhiMoEConfig, layer: int) -> None:
        super().__init__()
        self.config, self.recompute = config, False
        self.context_fn: ContextFn | None = None
        self.self_attn = Attention(config, layer)
        self.mlp = SparseMoe(config, layer)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        sample_ids: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        layout: TokenLayout | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """``hidden_states`` ``[B, S, D]`` through the layer.

        ``layout`` saves working it out again from the arguments before it, which a pipeline stage passes. The router's
        logits are appended to ``router_logits``.
        """
        if layout is None:
            past = cache.length if cache is not None else 0
            make_mask = self.self_attn.make_mask
            layout = token_layout(self.config, make_mask, hidden_states, position_ids, attention_mask, sample_ids, past)
        if self.recompute and torch.is_grad_enabled():
            # Random states are restored for the second pass, so it routes as the first did.
            more: dict[str, Any] = (
                {} if self.context_fn is None else {"context_fn": self.context_fn}
            )  # not known to torch.compile
            hidden, logits = checkpoint(self._compute, hidden_states, layout, cache, use_reentrant=False, **more)
        else:
            hidden, logits = self._compute(hidden_states, layout, cache)
        if router_logits is not None:
            router_logits.append(logits)
        return cast(Tensor, hidden)

    def _compute(self, x: Tensor, layout: TokenLayout, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), layout, cache)
        y, logits = self.mlp(self.post_attention_layernorm(x), layout)
        return x + y, logits


class PhiMoEBody(nn.Module):
    """Embedding, layers and final norm: everything below the head."""

    def __init__(self, config: PhiMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        sample_ids: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """Final hidden states ``[B, S, D]``; arguments as in `PhiMoE.forward`."""
        if position_ids is not None and position_ids.shape[-1] != input_ids.shape[1]:
            shape = list(input_ids.shape)
            raise ValueError(f"position_ids must be {shape} or [1, {shape[1]}], got {list(position_ids.shape)}")
        hidden: Tensor = self.embed_tokens(input_ids)
        past = cache.length if cache is not None else 0
        make_mask = cast(DecoderLayer, self.layers[0]).self_attn.make_mask  # all layers' cores are alike
        layout = token_layout(self.config, make_mask, hidden, position_ids, attention_mask, sample_ids, past)
        for layer in self.layers:
            hidden = layer(hidden, layout=layout, cache=cache, router_logits=router_logits)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        return cast(Tensor, self.norm(hidden))


class PhiMoE(nn.Module):
    """A Phi-MoE language model with fresh weights (`init_weights`); `nanopar_models.load` makes one from files.

    ``device`` and ``dtype`` as for torch's own modules; on the meta device nothing is allocated or initialised.
    """

    def __init__(
        self,
        config: PhiMoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.model = PhiMoEBody(config)
            self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.loss: nn.Module = NextTokenLoss()
        self.to(dtype=dtype)
        target = torch.device(device) if device is not None else torch.get_default_device()
        if target.type != "meta":
            self.to_empty(device=target)
            self.init_weights(seed)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        sample_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: KVCache | None = None,
    ) -> PhiMoEOutput:
        """Logits, and the loss where ``labels`` are given.

        ``input_ids``, ``labels``: int64 ``[B, S]``; position i is asked for label i + 1, -100 is not counted.
        ``position_ids``: ``[B, S]`` or ``[1, S]``, default 0, 1, ... whatever the padding.
        ``attention_mask``: ``[B, past + S]``, 0 for padding, which is neither dispatched to experts nor counted in any
        loss; numbers above 1 separate packed documents. Best left on the CPU (see `nanopar_models.layout`).
        ``sample_ids``: ``[B]`` or ``[B, S]``, needed with ``router_noise`` in training mode.
        ``num_items_in_batch``: counted tokens of the whole step; the loss is then the sum divided by it.
        ``cache``: keys and values of earlier calls; extended by this one.
        """
        router_logits: list[Tensor] | None = [] if self.config.output_router_logits else None
        hidden = self.model(
            input_ids, position_ids, attention_mask, sample_ids, cache=cache, router_logits=router_logits
        )
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            mask = None if attention_mask is None else attention_mask[:, -labels.shape[1] :]
            loss = self.loss(logits, next_token_labels(labels, mask), num_items_in_batch)
        aux_loss = None
        if router_logits is not None:
            aux_loss = load_balancing_loss(router_logits)
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss
        return PhiMoEOutput(logits, loss, aux_loss)

    def init_weights(self, seed: int = 0) -> None:
        """Fill all parameters: normal with ``initializer_range``, biases zero, norms one.

        Each parameter has its own stream, seeded by ``seed`` and its name (`nanopar_models.initial_value`), so values
        do not depend on order, device or layout.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(initial_value(name, parameter.shape, self.config, seed))

    def set_recompute(self, on: bool = True, context_fn: ContextFn | None = None) -> None:
        """Keep only each layer's input during the forward pass and recompute the layer in backward.

        ``context_fn`` as for ``torch.utils.checkpoint.checkpoint``: what else to keep, ``nanopar_tensor.keep_sums``.
        """
        for layer in self.model.layers:
            cast(DecoderLayer, layer).recompute = on
            cast(DecoderLayer, layer).context_fn = context_fn

    def compile_layers(self) -> None:
        """Have ``torch.compile`` compile the layers at their first call; see `nanopar_models.compiling`.

        Raises ``ValueError`` where no C++ compiler is found. `generate` and other code whose shapes keep changing is
        best run under ``torch.compiler.set_stance("force_eager")``.
        """
        compile_in_place(self.model.layers)

    def attention_backend(self, length: int, *, masked: bool = False) -> str:
        """The attention kernel that serves this model's sequences of ``length`` tokens (`Attention.backend`)."""
        return cast(DecoderLayer, self.model.layers[0]).self_attn.backend(length, masked=masked)

    def set_noise(self, noise: RouterNoise) -> None:
        """Take the stochastic router's random numbers from ``noise`` in every layer."""
        for layer in self.model.layers:
            cast(DecoderLayer, layer).mlp.noise = noise

    @property
    def tp_plan(self) -> dict[str, str]:
        """Tensor-parallel styles by name pattern, in Hugging Face's vocabulary, from the model's root.

        The norms' style matters under sequence parallelism only, that of the attention cores under context parallelism.
        """
        layer = "model.layers.*."
        return {
            "model.embed_tokens": "embedding_rowwise",
            layer + "input_layernorm": "sequence_parallel",
            layer + "self_attn.q_proj": "colwise",
            layer + "self_attn.k_proj": "colwise",
            layer + "self_attn.v_proj": "colwise",
            layer + "self_attn.o_proj": "rowwise",
            layer + "self_attn.core": "attention_core",
            layer + "post_attention_layernorm": "sequence_parallel",
            layer + "mlp.experts.gate_up_proj": "packed_colwise",
            layer + "mlp.experts.down_proj": "rowwise",
            layer + "mlp.experts": "moe_tp_experts",
            "model.norm": "sequence_parallel",
            "lm_head": "colwise_gather_output",
        }

    @property
    def ep_plan(self) -> dict[str, str]:
        """Expert-parallel styles by name pattern, in Hugging Face's vocabulary, from the model's root."""
        layer = "model.layers.*."
        return {
            layer + "mlp.experts.gate_up_proj": "grouped_gemm",
            layer + "mlp.experts.down_proj": "grouped_gemm",
            layer + "mlp.experts": "ep_dispatch_experts",
        }

    @property
    def pp_plan(self) -> dict[str, tuple[list[str], list[str]]]:
        """Modules in order of execution with the names of their inputs and outputs, from the model's root.

        Every module takes exactly these inputs in this order. ``position_ids``, ``attention_mask``, ``sample_ids`` and
        ``cache`` belong to the batch and may be None; positions are needed where sequences are divided.
        """
        batch = ["position_ids", "attention_mask", "sample_ids", "cache"]
        return {
            "model.embed_tokens": (["input_ids"], ["hidden_states"]),
            "model.layers": (["hidden_states", *batch], ["hidden_states"]),
            "model.norm": (["hidden_states"], ["hidden_states"]),
            "lm_head": (["hidden_states"], ["logits"]),
        }
