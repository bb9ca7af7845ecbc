"""Ways of calling backward that are not one forward and one backward through the root module.

Each is a function ``pattern(model, rank, step, scale)`` which leaves gradients in ``model``. The reference calls it in
one process for all ranks in turn, on the same weights, with the loss scaled by 1 / number of ranks.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run

pytestmark = pytest.mark.long

RANKS = 2


@dataclass
class Output:
    first: Tensor
    rest: dict[str, list[Tensor]]
    weight: Tensor


class Net(nn.Module):
    """Two stacked layers, a side layer, an embedding with sparse gradients; the output nests its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(5, 6)
        self.upper = nn.Linear(6, 3)
        self.side = nn.Linear(5, 3)
        self.table = nn.Embedding(4, 3, sparse=True)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Output:
        y = self.upper(torch.tanh(self.lower(x)))
        return Output(y, {"more": [y.square()]}, self.weight)


def make_model() -> Net:
    torch.manual_seed(3)
    return Net().double()


def rows(rank: int, step: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def forward(model: Net, *place: int) -> Tensor:
    output = model(rows(*place))
    return (output.first * output.weight).sum() + output.rest["more"][0].mean()


def through_the_root(model: Net, rank: int, step: int, scale: float) -> None:
    (scale * forward(model, rank, step)).backward()


def not_only_through_the_root(model: Net, rank: int, step: int, scale: float) -> None:
    decay = sum(0.1 * p.square().sum() for p in model.parameters())
    loss = forward(model, rank, step) + model.lower(rows(rank, step, 1)).sum() + decay
    (scale * loss).backward()


def by_a_submodule_alone(model: Net, rank: int, step: int, scale: float) -> None:
    (scale * model.side(rows(rank, step)).square().sum()).backward()


def by_forward_itself(model: Net, rank: int, step: int, scale: float) -> None:
    (scale * model.forward(rows(rank, step)).first.sum()).backward()


def two_forwards_one_backward(model: Net, rank: int, step: int, scale: float) -> None:
    (scale * (forward(model, rank, step) * forward(model, rank, step, 1))).backward()


def two_forwards_two_backwards_in_reverse_order(model: Net, rank: int, step: int, scale: float) -> None:
    losses = [scale * forward(model, rank, step, number) for number in range(2)]
    losses[1].backward()
    losses[0].backward()


def the_same_graph_twice(model: Net, rank: int, step: int, scale: float) -> None:
    loss = scale * forward(model, rank, step)
    loss.backward(retain_graph=True)
    loss.backward()


def only_the_first_rank(model: Net, rank: int, step: int, scale: float) -> None:
    if rank == 0:
        through_the_root(model, rank, step, scale)


def another_rank_each_step(model: Net, rank: int, step: int, scale: float) -> None:
    if rank == step % RANKS:
        through_the_root(model, rank, step, scale)


def no_rank_in_the_second_step(model: Net, rank: int, step: int, scale: float) -> None:
    if step != 1:
        through_the_root(model, rank, step, scale)


def another_layer_on_each_rank(model: Net, rank: int, step: int, scale: float) -> None:
    layer = (model.side, model.lower)[rank]
    (scale * layer(rows(rank, step)).square().sum()).backward()


def an_embedding_with_sparse_gradients(model: Net, rank: int, step: int, scale: float) -> None:
    for number in range(2):
        (scale * model.table(torch.tensor([rank, step % 4, number])).square().sum()).backward()


def with_create_graph(model: Net, rank: int, step: int, scale: float) -> None:
    for number in range(2):
        (scale * forward(model, rank, step, number)).backward(create_graph=True)


def with_a_penalty_on_the_inputs_gradient(model: Net, rank: int, step: int, scale: float) -> None:
    x = rows(rank, step).requires_grad_()
    y = model(x).first.square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    (scale * (y + gradient.square().sum())).backward()


def with_a_penalty_on_the_weights_gradient(model: Net, rank: int, step: int, scale: float) -> None:
    y = forward(model, rank, step)
    gradients = torch.autograd.grad(y, [model.lower.weight, model.upper.weight], create_graph=True)
    (scale * (y + sum(gradient.square().sum() for gradient in gradients))).backward()


def after_looking_at_gradients_elsewhere(model: Net, rank: int, step: int, scale: float) -> None:
    through_the_root(model, rank, step, scale)
    before = model.lower.weight.grad.clone()
    torch.autograd.grad(forward(model, rank, step, 1), list(model.lower.parameters()))
    assert torch.equal(model.lower.weight.grad, before)


def for_some_parameters_only(model: Net, rank: int, step: int, scale: float) -> None:
    (scale * forward(model, rank, step)).backward(inputs=[model.upper.weight, model.lower.bias])


def evaluation_in_between(model: Net, rank: int, step: int, scale: float) -> None:
    with torch.no_grad():
        forward(model, rank, step, 1)
    forward(model, rank, step, 2)  # a graph that is dropped
    with torch.inference_mode():
        forward(model, rank, step, 3)
    through_the_root(model, rank, step, scale)


PATTERNS = [
    through_the_root,
    not_only_through_the_root,
    by_a_submodule_alone,
    by_forward_itself,
    two_forwards_one_backward,
    two_forwards_two_backwards_in_reverse_order,
    the_same_graph_twice,
    only_the_first_rank,
    another_rank_each_step,
    no_rank_in_the_second_step,
    another_layer_on_each_rank,
    an_embedding_with_sparse_gradients,
    with_create_graph,
    with_a_penalty_on_the_inputs_gradient,
    with_a_penalty_on_the_weights_gradient,
    after_looking_at_gradients_elsewhere,
    for_some_parameters_only,
    evaluation_in_between,
]


Pattern = Callable[[Net, int, int, float], None]
Result = list[dict[str, Any]]


def snapshot(model: nn.Module) -> dict[str, Any]:
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone().to_dense()
    return {"gradients": gradients}


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1)


def in_one_process(pattern: Pattern, steps: int) -> Result:
    model = make_model()
    optimizer = momentum(model.parameters())
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(RANKS):
            pattern(model, rank, step, 1 / RANKS)
        results.append(snapshot(model))
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense()
        optimizer.step()
        results[-1]["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return results


def on_this_rank(pattern: Pattern, steps: int, local: bool) -> Result:
    axis = core.Mesh(dp=RANKS).dp
    model = make_model()
    optimizer = zero.shard(model, momentum, axis=axis, stage=0, bucket_bytes=100)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        with optimizer.no_sync() if local else nullcontext():
            pattern(model, axis.rank, step, 1.0)
        optimizer.clip_grad_norm_(float("inf"))  # whatever is not reduced yet is reduced now
        results.append(snapshot(model))
        optimizer.step()
        results[-1]["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.close()
    return results


def all_on_this_rank(steps: int) -> dict[tuple[str, bool], Result]:
    patterns = [(pattern, local) for pattern in PATTERNS for local in (False, True)]
    return {(pattern.__name__, local): on_this_rank(pattern, steps, local) for pattern, local in patterns}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[tuple[str, bool], Result]]:
    return run(RANKS, all_on_this_rank, 3)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("local", [False, True], ids=["reduced at once", "no_sync"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_way_of_calling_backward(pattern: Pattern, local: bool, by_rank: list[dict[Any, Result]]) -> None:
    expected = in_one_process(pattern, 3)
    first, second = (results[pattern.__name__, local] for results in by_rank)
    for step, *results in zip(expected, first, second, strict=True):  # to explain the first step that deviates
        assert_parity(step, results)
