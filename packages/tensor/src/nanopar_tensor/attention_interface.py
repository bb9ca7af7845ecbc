"""Context parallelism in Hugging Face's models, by their own seam: an attention function that is registered by name.

    attention_mask [B, S/N] --the model's entry: gathered once--> documents of all positions [B, 1, 1, S]
                                                                      |  passed on as it is, having 4 dims
    a layer's q, k, v --attention function--> ContextAttention(q, k, v, documents and window)

Shapes: B batch, S positions of the whole padded sequence, N ranks.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from nanopar_core import Axis
from nanopar_tensor.context import ContextAttention, ContextMask
from nanopar_tensor.sequence import named_arguments


def has_attention_interface(model: nn.Module) -> bool:
    """Whether ``model`` takes its attention function from transformers' registry."""
    return callable(getattr(model, "set_attn_implementation", None))


def divide_attention(model: Any, axis: Axis, method: str) -> None:
    """Have all layers of a Hugging Face model attend to the positions of all ranks of ``axis``."""
    from transformers import AttentionInterface

    attention = ContextAttention(axis, method)

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        for option in ("dropout", "softcap", "s_aux", "head_mask"):
            if more.get(option):
                raise ValueError(f"{type(module).__name__}: context parallelism has no attention with {option}")
        if not getattr(module, "is_causal", True):
            raise ValueError(f"{type(module).__name__}: context parallelism divides causal attention only")
        window = more.get("sliding_window")
        if window is not None and window >= q.shape[2] * axis.size:
            window = None
        known = ContextMask(None if mask is None else mask[:, 0, 0], window)
        seen = None if known == (None, None) else known
        return attention(q, k, v, seen, scale=more.get("scaling")).transpose(1, 2), None

    name = f"nanopar_{method}_{id(attention):x}"  # the registry keeps what is registered
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)
    _gather_documents(model, attention)


def _gather_documents(model: nn.Module, attention: ContextAttention) -> None:
    """Have ``model`` called with the documents of all positions as its attention mask."""
    signature = inspect.signature(model.forward)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = named_arguments(signature, args, kwargs)
        asked = given.get("output_router_logits")
        if getattr(getattr(model, "config", None), "output_router_logits", False) if asked is None else asked:
            raise ValueError("output_router_logits: a balancing loss of this rank's positions is not that of all")
        mask = given.get("attention_mask")
        if mask is None:
            return args, kwargs
        ids = next(given[key] for key in ("input_ids", "inputs_embeds") if given.get(key) is not None)
        if not isinstance(mask, Tensor) or mask.shape != ids.shape[:2]:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be {list(ids.shape[:2])}, this rank's positions, not {shape}: 0 for padding, "
                "equal numbers for one document"
            )
        whole = attention.gather_documents(mask.to(ids.device))
        bound = signature.bind(*args, **kwargs)
        bound.arguments["attention_mask"] = None if whole is None else whole[:, None, None]
        return bound.args, bound.kwargs

    model.register_forward_pre_hook(before, with_kwargs=True)
