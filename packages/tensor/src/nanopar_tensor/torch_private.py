"""torch's private names that this package needs, in one place; a test fails when torch changes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_CUDA_DTYPES = (torch.float16, torch.bfloat16)


def has_flash(q: Tensor) -> bool:
    """Whether a flash kernel that gives out its log-sum-exp serves such queries."""
    return q.is_cpu or (q.is_cuda and q.dtype in _CUDA_DTYPES and q.shape[-1] <= 256 and not q.shape[-1] % 8)


def hooks_on(module: nn.Module) -> bool:
    """Whether someone watches the module or its own parameters, or has given this very module another forward."""
    of_module = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = list(module.parameters(recurse=False))
    of_parameters = [hooks for p in own for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    return any(of_module) or any(of_parameters) or "forward" in vars(module)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, C]`` and log-sum-exp ``[B, H, Q]``; as many key as query heads."""
    ops = torch.ops.aten
    if q.is_cpu:
        out, total = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        out, total, *_ = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, total


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k``, ``v``, given the output and the log-sum-exp."""
    ops, total = torch.ops.aten, total.contiguous()
    found: tuple[Tensor, Tensor, Tensor]
    if q.is_cpu:
        found = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(), q, k, v, out.contiguous(), total, 0.0, causal, scale=scale
        )
    else:
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, and of sequences of many lengths
        found = ops._scaled_dot_product_flash_attention_backward(
            grad.contiguous(), q, k, v, out.contiguous(), total, None, None, q.shape[2], k.shape[2], 0.0, causal,
            unused, unused, scale=scale,
        )  # fmt: skip
    return found
