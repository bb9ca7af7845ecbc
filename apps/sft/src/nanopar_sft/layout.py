"""The layout of a job: how many ranks along which axis, and whether a model and a batch can be divided so.

    ranks = pp x dp_replicate x dp x cp x tp        the same ranks for the experts: pp x dp_replicate x edp x ep x etp

Pure arithmetic, done before any rank is started. What is impossible is refused with the reason, and with the layouts
next to it that are possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log2, prod

from nanopar_core.grid import expert_sizes
from nanopar_models.config import PhiMoEConfig

AXES = ("pp", "dp_replicate", "dp", "cp", "tp", "ep")
SHOWN = 3


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and how pipeline, sequences and experts use them.

    Attributes:
        pp, dp_replicate, dp, cp, tp: sizes of the dense axes, outer to inner.
        ep: ranks that each have some of the experts.
        etp: 1: an expert is whole on one rank; tp: each rank of the tensor axis has a part of its width.
        sp: whether the ranks of the tensor axis divide sequences between their layers.
        cp_method: how attention reaches the positions of other ranks.
        chunks: stages on each rank of a pipeline.
        microbatches: parts of each data-parallel rank's batch.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    cp_method: str = "all_gather"
    chunks: int = 1
    microbatches: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Ranks of a stage and replica that have the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def batches(self) -> int:
        """Ranks that have sequences of their own."""
        return self.dp_replicate * self.dp

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in AXES}
        shown = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        if self.tp > 1 and self.etp != self.tp:
            shown.append(f"etp={self.etp}")
        return " ".join([*shown, *(["sp=true"] if self.sp else [])]) or "one rank"


def problem(layout: Layout, shape: PhiMoEConfig, batch_size: int, seq_len: int) -> str | None:
    """Why this model cannot be trained so, in one line; None if it can."""
    heads, kv = shape.num_attention_heads, shape.num_key_value_heads
    try:
        dense = {name: getattr(layout, name) for name in AXES[:-1]}
        expert_sizes(dense, layout.ep, layout.etp)
    except ValueError as error:
        return str(error)
    if heads % layout.tp:
        return f"tp={layout.tp} does not divide the model's {heads} attention heads"
    if kv % layout.tp and layout.tp % kv:
        return f"tp={layout.tp} neither divides the model's {kv} key and value heads nor is a multiple of them"
    if shape.num_local_experts % layout.ep:
        return f"ep={layout.ep} does not divide the model's {shape.num_local_experts} experts"
    if shape.intermediate_size % layout.etp:
        return f"etp={layout.etp} does not divide the width of the model's experts, {shape.intermediate_size}"
    if shape.vocab_size < layout.tp:
        return f"tp={layout.tp} is more than the model's {shape.vocab_size} tokens"
    if layout.sp and seq_len < layout.tp:
        return f"sp=true needs sequences of at least tp={layout.tp} tokens, seq_len is {seq_len}"
    stages, modules = layout.pp * layout.chunks, shape.num_hidden_layers + 3
    if stages > modules:
        return (
            f"pp={layout.pp} x {layout.chunks} stages on a rank need {stages} modules, the model has {modules}: "
            f"{shape.num_hidden_layers} layers, embedding, last norm and head"
        )
    if layout.cp > 1 and shape.rope_scaling is not None:
        original = shape.rope_scaling.original_max_position_embeddings
        if seq_len > original:
            return (
                f"cp={layout.cp}: beyond {original} positions LongRoPE depends on the longest sequence of a batch, of "
                f"which each rank knows only its own part; seq_len is {seq_len}"
            )
    if layout.cp_method == "ulysses" and heads // layout.tp % layout.cp:
        return (
            f"cp={layout.cp} does not divide the {heads // layout.tp} attention heads of a rank, as cp_method=ulysses "
            "needs; take all_gather or ring"
        )
    parts = layout.batches * layout.microbatches
    if batch_size % parts:
        return (
            f"batch_size={batch_size} is not divisible by dp={layout.dp} x dp_replicate={layout.dp_replicate} x "
            f"microbatches={layout.microbatches} = {parts}: every micro-batch must have the same number of sequences"
        )
    return None


def nearest_layouts(layout: Layout, shape: PhiMoEConfig, batch_size: int, seq_len: int) -> list[Layout]:
    """The possible layouts of as many ranks that differ least from one: in few axes, and in these by small factors."""

    def distance(other: Layout) -> tuple[int, float]:
        sizes = [(getattr(layout, name), getattr(other, name)) for name in (*AXES, "etp")]
        return sum(a != b for a, b in sizes) + (layout.sp != other.sp), sum(abs(log2(a / b)) for a, b in sizes)

    possible = (one for one in _all(layout, layout.ranks) if problem(one, shape, batch_size, seq_len) is None)
    return sorted(possible, key=distance)[:SHOWN]


def explained(layout: Layout, shape: PhiMoEConfig, batch_size: int, seq_len: int) -> str | None:
    """``problem``, with what would be possible."""
    why = problem(layout, shape, batch_size, seq_len)
    if why is None:
        return None
    near = nearest_layouts(layout, shape, batch_size, seq_len)
    if not near:
        return f"{why}; no layout of {layout.ranks} rank(s) is possible: change the number of ranks"
    return f"{why}; possible with {layout.ranks} ranks: {', '.join(map(str, near))}"


def _all(layout: Layout, ranks: int) -> Iterator[Layout]:
    """All layouts of so many ranks."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for sizes in product(divisors, repeat=4):
        if ranks % prod(sizes):
            continue
        pp, dp_replicate, cp, tp = sizes
        dp = ranks // prod(sizes)
        for ep in (size for size in divisors if (dp * cp * tp) % size == 0):
            for etp in sorted({1, tp}):
                sp = layout.sp and tp > 1
                chunks = layout.chunks if pp > 1 else 1
                one = replace(layout, pp=pp, dp_replicate=dp_replicate, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
                yield replace(one, sp=sp, chunks=chunks)
