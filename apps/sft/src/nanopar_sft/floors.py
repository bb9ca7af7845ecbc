"""What no implementation of a strategy can do without: bytes, memory and time, in closed form.

P: bytes of the parameters, N: ranks, M: micro-batches, 1/N: the part of one rank. fp32, AdamW.

    stage                    collectives of P bytes a step     sent by a rank     weights  moments  gradients
    0  DDP                   1 all_reduce                      2 P (N-1)/N        P        2P       P
    1  optimizer sharded     1 reduce_scatter, 1 all_gather    2 P (N-1)/N        P        2P/N     P
    2  gradients too         M reduce_scatter, 1 all_gather    (M+1) P (N-1)/N    P        2P/N     P/N
    3  parameters too        M reduce_scatter, 2M all_gather   3M P (N-1)/N       P/N      2P/N     P/N
    3  kept until backward   M reduce_scatter, M all_gather    2M P (N-1)/N       P        2P/N     P/N

A reduce_scatter or an all_gather of P bytes sends P (N-1)/N from every rank, an all_reduce twice that.

Memory: weights and moments, and beside them the larger of the activations and the gradients, which need not exist at
the same time: the peak comes where backward begins, when no gradient exists yet, or at the update, when all do.
Stage 3 is counted without any gathered parameters, which every implementation has some of.

Time: a plain local step, plus these collectives at the cost measured beside it, nothing hidden behind computation. An
implementation that hides some, or saves time by updating only its shard, can do better: then its ratio lies above.
"""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZER_STATES = 2  # AdamW's moments, each as large as the parameters


@dataclass(frozen=True)
class Needs:
    """One row of the table above.

    Attributes:
        per_step: collectives of all parameters, once a step: {op: number}.
        per_microbatch: those repeated for every micro-batch.
        whole_weights: every rank holds all weights through backward.
        whole_gradients: every rank holds all gradients at the update.
        whole_moments: every rank holds all of AdamW's moments.
    """

    per_step: dict[str, int]
    per_microbatch: dict[str, int]
    whole_weights: bool
    whole_gradients: bool
    whole_moments: bool

    def collectives(self, microbatches: int) -> dict[str, int]:
        """Collectives of P bytes in a step of ``microbatches``: {op: number}."""
        counts = dict(self.per_step)
        for op, number in self.per_microbatch.items():
            counts[op] = counts.get(op, 0) + number * microbatches
        return counts

    def bytes_sent(self, parameter_bytes: int, ranks: int, microbatches: int) -> int:
        """Bytes that one rank sends in a step."""
        passes = sum(number * (2 if op == "all_reduce" else 1) for op, number in self.collectives(microbatches).items())
        return passes * parameter_bytes * (ranks - 1) // ranks

    def memory_bytes(self, parameter_bytes: int, ranks: int, activation_bytes: int) -> int:
        """Bytes of tensors on one rank where the most exist."""

        def held(whole: bool) -> int:
            return parameter_bytes if whole else parameter_bytes // ranks

        state = held(self.whole_weights) + OPTIMIZER_STATES * held(self.whole_moments)
        return state + max(activation_bytes, held(self.whole_gradients))


NOTHING = Needs({}, {}, True, True, True)
STAGES = {
    0: Needs({"all_reduce": 1}, {}, True, True, True),
    1: Needs({"reduce_scatter": 1, "all_gather": 1}, {}, True, True, False),
    2: Needs({"all_gather": 1}, {"reduce_scatter": 1}, True, False, False),
    3: Needs({}, {"reduce_scatter": 1, "all_gather": 2}, False, False, False),
}
STAGE_3_KEPT = Needs({}, {"reduce_scatter": 1, "all_gather": 1}, True, False, False)
