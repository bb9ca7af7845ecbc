"""Data parallelism (DDP) and ZeRO-1/2/3 for any PyTorch module."""
