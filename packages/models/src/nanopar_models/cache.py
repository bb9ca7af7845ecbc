"""Keys and values of the tokens seen so far, for generation.

    layer 0   k, v [B, G, capacity, C]   |####filled####|....free....|
    layer 1   ...                         0            length      capacity

Storage is taken once, at a layer's first use, so decoding never copies the past.
"""

import torch
from torch import Tensor


class KVCache:
    """Room for ``capacity`` tokens per row in every layer; ``length`` of them are filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's ``k`` and ``v`` (``[B, G, S, C]``); views of all so far, ``[B, G, length + S, C]``."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens per row, {end} are needed")
        if layer not in self._layers:
            shape = (k.shape[0], k.shape[1], self.capacity, k.shape[3])
            self._layers[layer] = (torch.empty(shape, dtype=k.dtype, device=k.device), v.new_empty(shape))
        keys, values = self._layers[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` more as filled, once all layers have appended them."""
        self.length += tokens
