"""Phi-MoE in plain PyTorch, equal to transformers' to the last bits."""
