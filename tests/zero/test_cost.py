"""What a step sends, and when."""

import pytest
import torch
from tests.zero.cases import mlp
from torch import nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import run

# Of mlp: weights and biases of 7 x 15, 15 x 9 and 9 x 3, each padded to a multiple of 32 elements of 8 bytes.
PADDED = [128, 32, 160, 32, 32, 32]
TOTAL_BYTES = 8 * sum(PADDED)


def sgd(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def prepare(bucket_bytes: int) -> tuple[nn.Module, zero.ZeroOptimizer, torch.Tensor]:
    axis = core.Mesh(dp=torch.distributed.get_world_size()).dp
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = zero.shard(model, sgd, axis=axis, stage=0, bucket_bytes=bucket_bytes)
    return model, optimizer, torch.randn(4, 7, dtype=torch.float64)


def records_of_steps(bucket_bytes: int) -> dict[str, list[tuple[str, str, int]]]:
    model, optimizer, x = prepare(bucket_bytes)
    found = {}
    with core.ledger() as book:

        def note(name: str) -> None:
            found[name] = [(record.op, record.label, record.bytes) for record in book.records]
            book.clear()

        model(x).sum().backward()
        note("backward")
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        note("the rest of the step")
        with optimizer.no_sync():
            model(x).sum().backward()
            model(x).sum().backward()
        note("no_sync")
        model(x).sum().backward()
        note("the last micro-batch")
        with optimizer.no_sync():
            model(x).sum().backward()
        note("no_sync again")
        optimizer.step()
        note("step with unreduced gradients")
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_byte_is_sent_once_per_step(ranks: int) -> None:
    for bucket_bytes, lengths in [(10**6, [sum(PADDED)]), (1, PADDED[::-1]), (1000, [32 + 32 + 32 + 160, 32 + 128])]:
        reduced = [("all_reduce", "gradients", 2 * 8 * length * (ranks - 1) // ranks) for length in lengths]
        assert sum(size for _, _, size in reduced) == 2 * TOTAL_BYTES * (ranks - 1) // ranks
        for found in run(ranks, records_of_steps, bucket_bytes):
            assert sorted(found["backward"]) == sorted(reduced)
            assert found["the last micro-batch"] == found["backward"]
            assert found["step with unreduced gradients"] == found["backward"]
            assert not found["the rest of the step"]  # the norm needs no collective: every rank has all gradients
            assert not found["no_sync"]
            assert not found["no_sync again"]


def events_of_backward() -> list[str]:
    """Of the second pass: the first one must leave nothing behind."""
    model, optimizer, x = prepare(bucket_bytes=1)
    model(x).sum().backward()
    optimizer.zero_grad()
    events = []
    with core.ledger() as book:

        def sent_so_far(name: str) -> None:
            events.append(f"{name}: {len(book.records)} sent")

        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _gradient, name=name: sent_so_far(f"gradient of {name} comes"))
        model(x).sum().backward()
        sent_so_far("end")
    return events


def test_buckets_are_sent_while_backward_still_runs() -> None:
    names = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
    for events in run(2, events_of_backward):
        assert events[-1] == "end: 6 sent"
        sent = {event.split()[2]: int(event.split()[4]) for event in events[:-1]}
        assert sorted(sent) == sorted(names)
        # Linear's bias may come before or after its weight; all of the layers above have been sent by then.
        assert min(sent["0.weight"], sent["0.bias"]) >= 4
        assert min(sent["2.weight"], sent["2.bias"]) >= 2


def sent_when_the_last_layer_comes_second() -> tuple[int, int]:
    """Layers used in the order 0, 2, 1: the gradient of 1 is there first and waits for that of 2."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    optimizer = zero.shard(layers, sgd, axis=core.Mesh(dp=2).dp, stage=0, bucket_bytes=8 * 8 * 4)
    first_sight: dict[int, int] = {}

    def gradient_comes(number: int) -> None:
        first_sight.setdefault(number, len(book.records))

    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.register_hook(lambda _gradient, number=number: gradient_comes(number))
    with core.ledger() as book:
        layers[1](layers[2](layers[0](torch.ones(2, 8)))).sum().backward()
    optimizer.close()
    return first_sight[2], first_sight[0]


def test_buckets_that_waited_for_an_earlier_one_are_sent_with_it() -> None:
    assert run(2, sent_when_the_last_layer_comes_second) == [(0, 2)] * 2


def gradients_seen_in_flight() -> list[bool]:
    model, optimizer, x = prepare(bucket_bytes=1)
    seen: list[bool] = []
    model[0].weight.register_hook(lambda _gradient: seen.append(model[4].weight.grad is None))
    model(x).sum().backward()
    seen.append(model[4].weight.grad is None)
    optimizer.close()
    return seen


def test_autograd_cannot_reach_a_gradient_in_flight() -> None:
    assert run(2, gradients_seen_in_flight) == [[True, False]] * 2


def records_with_a_penalty_on_the_gradient() -> list[str]:
    model, optimizer, x = prepare(bucket_bytes=1)
    x.requires_grad_()
    with core.ledger() as book:
        y = model(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        of_weights = torch.autograd.grad(y, list(model.parameters()), create_graph=True)
        (y + gradient.square().sum() + sum(g.square().sum() for g in of_weights)).backward()
    optimizer.close()
    return [record.op for record in book.records]


def test_gradients_that_autograd_grad_gives_away_are_not_sent() -> None:
    assert run(2, records_with_a_penalty_on_the_gradient) == [["all_reduce"] * 6] * 2


def first_records_with_one_layer_unused() -> list[int]:
    model, _optimizer, x = prepare(bucket_bytes=1)
    with core.ledger() as book:
        rank = torch.distributed.get_rank()
        (model[:4](x) if rank else model(x)).sum().backward()
    return [record.bytes for record in book.records]


def test_the_order_is_that_of_the_layout_whatever_a_rank_uses() -> None:
    first, second = run(2, first_records_with_one_layer_unused)
    assert first == second
    assert first == [8 * length for length in (32, 32, 32, 160, 32, 128)]


def copies_in_a_step() -> tuple[bool, bool, int]:
    """Whether gradients and weights are the buffers themselves, and how many bytes the buffers have per weight byte."""
    model, optimizer, x = prepare(bucket_bytes=10**6)
    (bucket,) = optimizer.reducer.buckets
    model(x).sum().backward()
    views = all(p.grad.untyped_storage().data_ptr() == bucket.reduced.data_ptr() for p in model.parameters())
    weights = all(p.untyped_storage().data_ptr() == bucket.masters.data_ptr() for p in model.parameters())
    stored = {t.untyped_storage().data_ptr(): t.nbytes for t in (bucket.parameters, bucket.masters, bucket.reduced)}
    return views, weights, sum(stored.values())


def test_memory_is_one_buffer_of_weights_and_one_of_gradients() -> None:
    assert run(1, copies_in_a_step) == [(True, True, 2 * TOTAL_BYTES)]
