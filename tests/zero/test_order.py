"""Stage 3: the order of collectives never depends on a rank's data, and few units are whole at a time.

Units have different sizes, so that the ledger's records show whose collective each of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.debug import CollectiveMismatchError
from nanopar_core.testing import assert_parity, run

pytestmark = pytest.mark.long

WIDTH, HIDDEN = 8, (3, 31, 9, 20, 26, 14)
ALL = tuple(range(len(HIDDEN)))
UNITS = ["blocks.*", "head"]


class Stack(nn.Module):
    """Residual blocks of which each rank runs some, in an order of its own, and uses the outputs of some."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH)) for width in HIDDEN
        )
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.reentrant = reentrant

    def forward(self, x: Tensor, order: Sequence[int] = ALL, unused: Sequence[int] = ()) -> Tensor:
        for number in order:
            block = self.blocks[number]
            y = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x if number in unused else x + y
        return self.head(x) * self.scale


@dataclass(frozen=True)
class Trip:
    """What each of two ranks does with the blocks."""

    orders: tuple[Sequence[int], Sequence[int]] = (ALL, ALL)
    unused: tuple[Sequence[int], Sequence[int]] = ((), ())
    prefetch: int = 1
    reentrant: bool | None = None


def inputs(rank: int, step: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step)).double()
    return x.requires_grad_()  # reentrant recomputation needs it


def make(trip: Trip) -> Stack:
    torch.manual_seed(0)
    return Stack(trip.reentrant).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def in_one_process(trip: Trip) -> dict[str, Any]:
    model = make(trip)
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            (model(inputs(rank, step), trip.orders[rank], trip.unused[rank]).square().mean() / 2).backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    return {"weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


def on_this_rank(trip: Trip) -> dict[str, Any]:
    axis = core.Mesh(dp=2).dp
    model = make(trip)
    optimizer = zero.shard(model, sgd, axis=axis, stage=3, units=UNITS, prefetch=trip.prefetch)
    with core.ledger() as book:
        for step in range(2):
            optimizer.zero_grad()
            model(inputs(axis.rank, step), trip.orders[axis.rank], trip.unused[axis.rank]).square().mean().backward()
            optimizer.step()
    optimizer.close()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"weights": weights, "sent": [(record.op, record.label, record.shape) for record in book.records]}


def all_on_this_rank(trips: Sequence[Trip]) -> list[dict[str, Any]]:
    return [on_this_rank(trip) for trip in trips]


SKIPPED = (0, 1, 4, 5)
TRIPS = [
    *(
        trip
        for prefetch in (0, 1, 2)
        for trip in (
            Trip(prefetch=prefetch),
            Trip((ALL, (0, 1, 3, 2, 4, 5)), prefetch=prefetch),  # neighbours change places
            Trip((ALL, (0, 1, 2, 3, 5, 4)), prefetch=prefetch),
            Trip(((0, 4, 2, 3, 1, 5), (0, 4, 2, 3, 1, 5)), prefetch=prefetch),  # not as in the model, on both alike
            Trip((ALL[::-1], ALL[::-1]), prefetch=prefetch),
            Trip(unused=((3,), ()), prefetch=prefetch),  # run, without a gradient
            Trip(unused=((5,), (1, 2)), prefetch=prefetch),
            Trip(((), ALL), prefetch=prefetch),
            Trip(((0, 1, 2, 2, 3, 4, 5),) * 2, prefetch=prefetch),  # one block twice
            Trip(((0, 1, 2, 3, 4, 5, 1),) * 2, prefetch=prefetch),
            *(
                trip
                for reentrant in (None, False, True)
                for trip in (
                    Trip((ALL, SKIPPED), prefetch=prefetch, reentrant=reentrant),
                    Trip(((0, 5), (0, 2, 3)), prefetch=prefetch, reentrant=reentrant),
                    Trip(unused=((3,), ()), prefetch=prefetch, reentrant=reentrant),
                )
            ),
        )
    )
]


def test_all_ranks_issue_the_same_collectives_whatever_their_data() -> None:
    first, second = run(2, all_on_this_rank, TRIPS)
    failures = []
    for trip, *results in zip(TRIPS, first, second, strict=True):
        if results[0].pop("sent") != results[1].pop("sent"):
            failures.append(f"{trip}: other collectives")
        try:
            assert_parity(in_one_process(trip), results)
        except AssertionError as error:
            failures.append(f"{trip}: {error}")
    assert not failures, "\n".join(failures)


def test_debug_mode_has_nothing_to_say() -> None:
    trips = [Trip((ALL, SKIPPED)), Trip(unused=((3,), ()), reentrant=False)]
    for trip, *results in zip(trips, *run(2, all_on_this_rank, trips, debug_timeout_s=30), strict=True):
        assert_parity(in_one_process(trip), [{"weights": result["weights"]} for result in results])


def test_debug_mode_names_blocks_far_apart_that_change_places_on_one_rank() -> None:
    with pytest.raises(CollectiveMismatchError, match=r"rank [01] is at #\d+ .*; rank [01] is at #\d+ "):
        run(2, on_this_rank, Trip((ALL, (0, 4, 2, 3, 1, 5))), debug_timeout_s=5)


# ----------------------------------------------------------------------------------------------------------- memory


def most_at_a_time(prefetch: int, orders: tuple[Sequence[int], Sequence[int]]) -> dict[str, int]:
    """How many units are whole at any time, beside the root, and how many gradients are in flight."""
    axis = core.Mesh(dp=2).dp
    model = make(Trip())
    optimizer = zero.shard(model, sgd, axis=axis, stage=3, units=UNITS, prefetch=prefetch)
    root, *units = optimizer.windows.units
    most = {"forward": 0, "backward": 0, "gradients": 0, "after forward": 0, "after backward": 0}

    def look(when: str) -> None:
        # What collectives are in flight for counts too: its memory is there.
        stored = [bucket.parameters.untyped_storage().nbytes() > 0 for unit in units for bucket in unit.buckets]
        assert stored == [bucket.is_whole for unit in units for bucket in unit.buckets]
        most[when] = max(most[when], sum(stored))
        most["gradients"] = max(most["gradients"], sum(b.gradient is not None for b in optimizer.reducer.buckets))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: look("forward"))
    for parameter in model.parameters():
        parameter.register_hook(lambda _: look("backward"))
    for step in range(2):
        loss = model(inputs(axis.rank, step), orders[axis.rank]).square().mean()
        look("after forward")
        loss.backward()
        look("after backward")
        optimizer.step()
        optimizer.zero_grad()
    assert not root.buckets[0].parameters.untyped_storage().nbytes()
    return most


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_few_units_are_whole_at_a_time(prefetch: int) -> None:
    for most in run(2, most_at_a_time, prefetch, (ALL, ALL)):
        assert most["forward"] == most["backward"] == prefetch + 1
        assert most["after forward"] == most["after backward"] == 0
        assert 1 <= most["gradients"] <= 2


def test_units_that_a_rank_passes_over_in_backward_are_freed_too() -> None:
    for most in run(2, most_at_a_time, 1, (ALL, (0, 5))):
        assert most["backward"] == 2
        assert most["after forward"] == most["after backward"] == 0


def whole_after_a_forward_of_the_first_block() -> int:
    """The rest of the sweep: its units are gathered at its end, one by one."""
    axis = core.Mesh(dp=2).dp
    model = make(Trip())
    optimizer = zero.shard(model, sgd, axis=axis, stage=3, units=UNITS, prefetch=0)
    seen = []
    buckets = optimizer.windows.buckets
    with core.ledger() as book, torch.no_grad():
        real = type(buckets[0]).start_gather

        def start_gather(bucket: Any) -> None:
            real(bucket)
            seen.append(sum(other.is_whole for other in buckets))

        type(buckets[0]).start_gather = start_gather  # type: ignore[method-assign]
        model.forward = lambda x: model.blocks[0](x)  # type: ignore[method-assign]
        model(inputs(axis.rank, 0))
        type(buckets[0]).start_gather = real  # type: ignore[method-assign]
    assert len(book.records) == 1 + len(HIDDEN) + 1
    assert not any(bucket.is_whole for bucket in buckets)
    return max(seen)


def test_what_a_forward_leaves_out_is_gathered_one_by_one() -> None:
    assert run(2, whole_after_a_forward_of_the_first_block) == [2, 2]  # the root, and one


def outside_of_its_window() -> None:
    model = make(Trip())
    shapes = [p.shape for p in model.parameters()]
    optimizer = zero.shard(model, sgd, axis=core.Mesh(dp=2).dp, stage=3, units=UNITS)
    for _ in range(2):
        for parameter, shape in zip(model.parameters(), shapes, strict=True):
            assert parameter.shape == shape
            assert parameter.detach().isnan().all()
            assert parameter.untyped_storage().nbytes() == 8, "NaN takes no memory"
        seen = model.head(torch.zeros(1, WIDTH).double())  # a unit's own forward gathers it
        assert not seen.isnan().any()
        assert (model.blocks[0][0].weight @ torch.ones(WIDTH).double()).isnan().all()
        model(inputs(0, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_parameter_outside_of_its_window_is_nan_of_its_shape() -> None:
    run(2, outside_of_its_window)


def on_its_way() -> bool:
    """Whether the second block's weights, which are prefetched, are NaN while the first block runs."""
    model = make(Trip())
    optimizer = zero.shard(model, sgd, axis=core.Mesh(dp=2).dp, stage=3, units=UNITS)
    seen: list[bool] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(bool(model.blocks[1][0].weight.isnan().all())))
    model(inputs(0, 0))
    optimizer.close()
    return seen[0]


def test_a_parameter_on_its_way_is_nan_too() -> None:
    assert run(2, on_its_way) == [True, True]
