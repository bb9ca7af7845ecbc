"""What no implementation of a strategy can do without: bytes, memory and time, in closed form.

P: bytes of the parameters, H: of the whole batch's hidden states, L: layers, N: ranks, M: micro-batches, 1/N: the part
of one rank. fp32, AdamW.

    stage                    collectives of P bytes a step     sent by a rank     weights  moments  gradients
    0  DDP                   1 all_reduce                      2 P (N-1)/N        P        2P       P
    1  optimizer sharded     1 reduce_scatter, 1 all_gather    2 P (N-1)/N        P        2P/N     P
    2  gradients too         M reduce_scatter, 1 all_gather    (M+1) P (N-1)/N    P        2P/N     P/N
    3  parameters too        M reduce_scatter, 2M all_gather   3M P (N-1)/N       P/N      2P/N     P/N
    3  kept until backward   M reduce_scatter, M all_gather    2M P (N-1)/N       P        2P/N     P/N

    tensor parallel          collectives of H bytes a step     sent by a rank     weights  moments  gradients
    tp                       4 L + 2 all_reduce                2 H (4 L + 2)(N-1)/N   P/N  2P/N     P/N
    tp-sp                    4 L + 1 all_gather and            2 H (4 L + 2)(N-1)/N   P/N  2P/N     P/N
                             reduce_scatter, 1 all_reduce

(A layer's two blocks, forward and backward; the embedding and the head. Two numbers a token for the loss are not
counted, nor that tp-sp gathers each block's input again in backward, which sends 2 L H (N-1)/N more.)

    expert parallel          E: bytes of the experts, K: of the tokens' rows, one for each expert that they visit
    ep                       1 all_reduce of P - E,            2 (P - E)(N-1)/N   P - E + E/N, moments twice that,
                             4 L all_to_all of K/N             + 4 L K (N-1)/N^2  gradients as much

    pipeline of two ranks    H at every boundary there,        (2 v - 1) H         P/N, as if stages were even
    with v stages on each    and its gradient back

(With a routing that is even. The counts and the routing weights beside the rows are not counted.)

A reduce_scatter or an all_gather of P bytes sends P (N-1)/N from every rank, an all_reduce twice that.

Memory: weights and moments, and beside them the larger of the activations and the gradients, which need not exist at
the same time: the peak comes where backward begins, when no gradient exists yet, or at the update, when all do.
Stage 3 is counted without any gathered parameters, which every implementation has some of, tensor parallelism with
activations that are divided everywhere.

Time: a plain local step, plus these collectives at the cost measured beside it, nothing hidden behind computation. An
implementation that hides some, or saves time by updating only its shard, can do better: then its ratio lies above.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

OPTIMIZER_STATES = 2  # AdamW's moments, each as large as the parameters


class Message(NamedTuple):
    """A collective of ``size`` bytes, ``number`` times a step."""

    op: str
    size: int
    number: int


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch, in bytes: P, H, E and K of the tables above; and the number of layers."""

    parameters: int
    hidden: int
    layers: int
    experts: int = 0
    routed: int = 0


@dataclass(frozen=True)
class Needs:
    """One row of the tables above.

    Attributes:
        per_step: collectives of all parameters, once a step: {op: number}.
        per_microbatch: those repeated for every micro-batch.
        whole_weights: every rank holds all weights through backward.
        whole_gradients: every rank holds all gradients at the update.
        whole_moments: every rank holds all of AdamW's moments.
        per_layer: collectives of the hidden states, in every layer.
        beside_layers: collectives of the hidden states before and after the layers.
        per_mixture: collectives of the tokens' rows, in every layer; the experts are divided then.
        chunks: stages of a pipeline on every rank; 0: no pipeline. Each boundary then costs two messages of the hidden
            states, and a rank has its part of the activations.
    """

    per_step: dict[str, int]
    per_microbatch: dict[str, int]
    whole_weights: bool
    whole_gradients: bool
    whole_moments: bool
    per_layer: dict[str, int] = field(default_factory=dict)
    beside_layers: dict[str, int] = field(default_factory=dict)
    per_mixture: dict[str, int] = field(default_factory=dict)
    chunks: int = 0

    def collectives(self, sizes: Sizes, microbatches: int) -> list[Message]:
        """Collectives of a step, in which ``microbatches`` share the batch among them."""
        shared = sizes.parameters - (sizes.experts if self.per_mixture else 0)
        counts = [
            *((op, shared, number) for op, number in self.per_step.items()),
            *((op, shared, number * microbatches) for op, number in self.per_microbatch.items()),
            *((op, sizes.routed, number * sizes.layers) for op, number in self.per_mixture.items()),
            *((op, sizes.hidden, number * sizes.layers) for op, number in self.per_layer.items()),
            *((op, sizes.hidden, number) for op, number in self.beside_layers.items()),
            *([("send_recv", sizes.hidden, 2 * self.chunks - 1)] if self.chunks else []),
        ]
        return [Message(*count) for count in counts]

    def bytes_sent(self, sizes: Sizes, ranks: int, microbatches: int) -> int:
        """Bytes that one rank sends in a step."""
        total = 0
        for op, size, number in self.collectives(sizes, microbatches):
            if op == "send_recv":
                total += size * number
            else:
                passes = {"all_reduce": 2 * ranks, "all_to_all": 1}.get(op, ranks)
                total += passes * size * number * (ranks - 1) // ranks**2
        return total

    def memory_bytes(self, sizes: Sizes, ranks: int, activation_bytes: int) -> int:
        """Bytes of tensors on one rank where the most exist."""
        divided = sizes.experts if self.per_mixture else 0

        def held(whole: bool) -> int:
            here = sizes.parameters - divided
            return (here if whole else here // ranks) + divided // ranks

        if self.chunks:
            activation_bytes //= ranks
        state = held(self.whole_weights) + OPTIMIZER_STATES * held(self.whole_moments)
        return state + max(activation_bytes, held(self.whole_gradients))


NOTHING = Needs({}, {}, True, True, True)
STAGES = {
    0: Needs({"all_reduce": 1}, {}, True, True, True),
    1: Needs({"reduce_scatter": 1, "all_gather": 1}, {}, True, True, False),
    2: Needs({"all_gather": 1}, {"reduce_scatter": 1}, True, False, False),
    3: Needs({}, {"reduce_scatter": 1, "all_gather": 2}, False, False, False),
}
_BLOCKS = 2 * 2  # attention and MLP, or there and back; forward and backward
TENSOR = Needs({}, {}, False, False, False, {"all_reduce": _BLOCKS}, {"all_reduce": 2})
SEQUENCE = Needs(
    {},
    {},
    False,
    False,
    False,
    {"all_gather": _BLOCKS, "reduce_scatter": _BLOCKS},
    {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1},
)
EXPERT = Needs({"all_reduce": 1}, {}, True, True, True, per_mixture={"all_to_all": _BLOCKS})
PIPELINE = {chunks: Needs({}, {}, False, False, False, chunks=chunks) for chunks in (1, 2)}
STAGE_3_KEPT = Needs({}, {"reduce_scatter": 1, "all_gather": 1}, True, False, False)
