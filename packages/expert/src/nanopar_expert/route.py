"""Where every token of a call goes: worked out once, from the router's choice, before anything is sent.

    indices [T, k] --sort by expert--> rows in the order of experts, which is the order of ranks too
                   --count-->          rows for each expert [E]
                   --all_to_all of counts--> rows that each rank sends here, by expert of this rank [N, E/N]
                   --one copy to the host--> how many rows to send to, and to receive from, each rank

The counts are exchanged while the rows are gathered: ``Route`` begins that, ``finish`` waits for it.

With a capacity C an expert takes no more than C rows from a rank; what is over is left out, later tokens first. With
``pads`` it takes exactly C, some of them zeros: then every size is known, nothing is counted and nothing copied to the
host. ("GShard", Lepikhin et al. 2020, section 2.2; capacity as there: factor * k * T / E.)

Shapes: T tokens of a chunk, k experts per token, E experts, N ranks, P rows sent, R rows received, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from nanopar_core import Axis, Pending, all_to_all
from nanopar_core.recompute import is_second_pass, once
from nanopar_expert.permute import Order, counts_of, sort_by_expert


@dataclass
class Chunk:
    """The way of some tokens, which lie one after the other in the call.

    ``tokens``, ``pairs`` ``[P]``: the token, and the (token, expert) pair, of each row sent, both numbered within the
    chunk; ``places`` ``[T, k]``: the row of a pair, P for one that is left out; ``is_padding`` ``[P]``, or None;
    ``send``, ``receive``: rows by rank; ``experts`` ``[R, 1]``: the expert of this rank that a received row is for.

    Before ``Route.finish`` the sizes are empty, and the rows of pairs that are left out are still there, at the end.
    """

    tokens: Tensor
    pairs: Tensor
    places: Tensor
    is_padding: Tensor | None = None
    send: list[int] = field(default_factory=list)
    receive: list[int] = field(default_factory=list)
    experts: Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.int64))


@dataclass(frozen=True)
class Capacity:
    """How many rows an expert takes from a rank.

    Attributes:
        factor: times what it would get if all experts got the same.
        pads: exactly as many.
    """

    factor: float
    pads: bool = False

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"capacity_factor must be above 0, not {self.factor}")

    def rows(self, pairs: int, num_experts: int) -> int:
        """C, of so many (token, expert) pairs; at least 1."""
        return max(1, ceil(self.factor * pairs / num_experts))


Counts = list[list[list[int]]]  # by chunk, rank and expert of a rank


class Route:
    """The way of all tokens of a call. Collective, unless the capacity pads.

    Args:
        indices: ``[T, k]``, the router's choice; an index of ``num_experts`` or above stands for no expert.
        chunks: in how many parts the tokens go.
        most_tokens: that any rank has, for a capacity that pads: T, or more where a call's tokens are shared out.
        label: of the collective.

    Attributes:
        chunks: one after the other.
        dropped: by expert ``[E]`` how many of this rank's pairs a capacity leaves out; None without one.
    """

    def __init__(
        self,
        indices: Tensor,
        num_experts: int,
        axis: Axis,
        *,
        chunks: int,
        capacity: Capacity | None,
        most_tokens: int,
        label: str,
    ) -> None:
        parts = indices.tensor_split(chunks)
        orders = once(lambda: [sort_by_expert(part, num_experts) for part in parts])
        load = torch.stack([counts_of(order.ends) for order in orders])
        self.dropped: Tensor | None = None
        self._counts: Tensor | None = None
        if capacity is not None:
            limits = [capacity.rows(part.numel(), num_experts) for part in parts]
            if capacity.pads:
                limits = [capacity.rows(-(-most_tokens // chunks) * indices.shape[1], num_experts)] * chunks
            taken = torch.stack([of_chunk.clamp(max=limit) for of_chunk, limit in zip(load, limits, strict=True)])
            self.dropped, load = (load - taken).sum(0), taken
            if capacity.pads:
                self.chunks = [
                    _padded(order, limit, axis, num_experts) for order, limit in zip(orders, limits, strict=True)
                ]
                return
            orders = [_within(*one, num_experts) for one in zip(parts, orders, limits, strict=True)]
        self.chunks = [
            Chunk(order.pairs // max(1, order.places.shape[1]), order.pairs, order.places) for order in orders
        ]
        self._counts = load.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()  # to each rank [chunks, E/N]
        self._arriving: Pending[Tensor] | None = None
        if not is_second_pass():
            ones = [1] * axis.size
            self._arriving = all_to_all(
                self._counts, axis, send_sizes=ones, receive_sizes=ones, label=f"{label} counts", async_op=True
            )

    def finish(self) -> None:
        """Wait for the counts of other ranks: now the sizes are known."""
        if self._counts is None:
            return
        sent, received, arriving = once(self._on_the_host)
        for number, chunk in enumerate(self.chunks):
            chunk.send, chunk.receive = ([sum(of_rank) for of_rank in counts[number]] for counts in (sent, received))
            count = sum(chunk.send)
            chunk.tokens, chunk.pairs = chunk.tokens[:count], chunk.pairs[:count]
            chunk.places = chunk.places.clamp(max=count)
            chunk.experts = _experts_of(arriving[:, number], sum(chunk.receive))
        self._counts = None

    def _on_the_host(self) -> tuple[Counts, Counts, Tensor]:
        """Rows sent and rows received, and the latter ``[N, chunks, E/N]`` on the device."""
        assert self._arriving is not None
        assert self._counts is not None
        arriving = self._arriving.wait()
        sent, received = torch.stack([self._counts, arriving]).transpose(1, 2).tolist()
        return sent, received, arriving


def _experts_of(arriving: Tensor, rows: int) -> Tensor:
    """``[R, 1]``: the expert of each row that comes, rank by rank, expert by expert, ``arriving`` ``[N, E/N]``."""
    ranks, experts = arriving.shape
    numbers = torch.arange(experts, device=arriving.device).repeat(ranks)
    return torch.repeat_interleave(numbers, arriving.flatten(), output_size=rows)[:, None]


def _ranked(order: Order, num_experts: int) -> tuple[Tensor, Tensor]:
    """For each row its expert (``num_experts`` for none) and which of the expert's rows it is."""
    rows = torch.arange(order.pairs.numel(), device=order.pairs.device)
    experts = torch.searchsorted(order.ends.long(), rows, right=True)
    starts = torch.cat([order.ends.new_zeros(1), order.ends]).long()
    return experts, rows - starts[experts.clamp(max=num_experts)]


def _within(indices: Tensor, order: Order, limit: int, num_experts: int) -> Order:
    """The order without the rows beyond an expert's limit."""
    experts, numbers = _ranked(order, num_experts)
    kept = experts.where(numbers < limit, num_experts)
    by_pair = torch.empty_like(kept).scatter_(0, order.pairs, kept)
    return sort_by_expert(by_pair.view(indices.shape), num_experts)


def _padded(order: Order, limit: int, axis: Axis, num_experts: int) -> Chunk:
    """``limit`` rows for every expert."""
    device, total = order.pairs.device, limit * num_experts
    experts, numbers = _ranked(order, num_experts)
    slots = (experts * limit + numbers).where((numbers < limit) & (experts < num_experts), total)
    pairs = torch.zeros(total + 1, dtype=order.pairs.dtype, device=device).scatter_(0, slots, order.pairs)[:total]
    is_used = torch.zeros(total + 1, dtype=torch.bool, device=device).index_fill_(0, slots, True)[:total]
    places = torch.empty_like(order.pairs).scatter_(0, order.pairs, slots).view(order.places.shape)
    sizes = [total // axis.size] * axis.size
    here = torch.arange(num_experts // axis.size, device=device).repeat_interleave(limit).repeat(axis.size)
    return Chunk(pairs // max(1, order.places.shape[1]), pairs, places, ~is_used, sizes, sizes, here[:, None])
