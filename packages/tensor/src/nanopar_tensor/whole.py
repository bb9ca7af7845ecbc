"""Whole sequences on every rank, for a while, in a model whose training divides them; and parts of divided models.

                      in training                              within whole_sequences
    sequence          positions divided between the layers     all positions, sums are all-reduced
    context_axis      positions divided everywhere             ranks have sequences of their own, as data-parallel ones

So answers can be generated, token by token and with cached keys, from the model that is being trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from nanopar_tensor.context import ContextAttention
from nanopar_tensor.linear import ColumnLinear, RowLinear
from nanopar_tensor.sequence import DividedSequence


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` takes whole sequences, of any length, also one by one after cached ones.

    The ranks of a context axis then are independent of each other; those of the tensor axis all give the same input.
    """
    divided: list[ContextAttention | DividedSequence] = [
        module for module in model.modules() if isinstance(module, ContextAttention)
    ]
    divided += _sequences_of(model)
    for one in divided:
        one.is_whole = True
    try:
        yield
    finally:
        for one in divided:
            one.is_whole = False


def set_sequence_length(model: nn.Module, length: int) -> None:
    """Tell a part of a model in which sequences are divided, such as a pipeline's stage, how long they are as a whole.

    Only the first divided layer of a model sees that for itself.
    """
    for sequence in _sequences_of(model):
        sequence.length = length


def _sequences_of(model: nn.Module) -> list[DividedSequence]:
    found: dict[DividedSequence, None] = {}
    for module in model.modules():
        if isinstance(module, ColumnLinear):
            boundary = module.group.boundary
        elif isinstance(module, RowLinear):
            boundary = module.boundary
        else:
            continue
        if isinstance(boundary, DividedSequence):
            found[boundary] = None
    return list(found)
