"""Ways of calling backward that are not one forward and one backward through the root module.

Each is a function ``pattern(model, rank, step, scale)`` which leaves gradients in ``model``. The reference calls it in
one process for all ranks in turn, on the same weights, with the loss scaled by 1 / number of ranks.

Stages 1 and 2 have weights on their way after a step: what does not go through the root waits for them first. In stage
3 all ranks go through the root, or through units, equally often.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.zero.cases import gradients_of, weights_of
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
    """Two stacked layers, a side layer, an embedding with sparse gradients; the output nests its tensors.

    The output has a weight itself too, or a copy where weights are not there after forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(5, 6)
        self.upper = nn.Linear(6, 3)
        self.side = nn.Linear(5, 3)
        self.table = nn.Embedding(4, 3, sparse=True)
        self.weight = nn.Parameter(torch.ones(3))
        self.gives_copy = False

    def forward(self, x: Tensor) -> Output:
        y = self.upper(torch.tanh(self.lower(x)))
        return Output(y, {"more": [y.square()]}, self.weight * 1 if self.gives_copy else self.weight)


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
    before = None if model.lower.weight.grad is None else model.lower.weight.grad.clone()
    torch.autograd.grad(forward(model, rank, step, 1), list(model.lower.parameters()))
    after = model.lower.weight.grad
    assert after is before is None or torch.equal(after, before)


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
STEPS = 3
NOT_THROUGH_THE_ROOT = [
    not_only_through_the_root,
    by_a_submodule_alone,
    by_forward_itself,
    another_layer_on_each_rank,
    an_embedding_with_sparse_gradients,
]
NOT_IN_STAGE_3 = [
    not_only_through_the_root,
    by_forward_itself,
    only_the_first_rank,
    another_rank_each_step,
    another_layer_on_each_rank,
]


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1)


def in_one_process(pattern: Pattern) -> Result:
    model = make_model()
    optimizer = momentum(model.parameters())
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            pattern(model, rank, step, 1 / RANKS)
        gradients = {}
        for name, p in model.named_parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense()
            gradients[name] = p.grad.clone()
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        results.append({"gradients": gradients, "weights": weights})
    return results


def on_this_rank(pattern: Pattern, stage: int, local: bool) -> Result:
    axis = core.Mesh(dp=RANKS).dp
    model = make_model()
    model.gives_copy = stage == 3
    optimizer = zero.shard(
        model, momentum, axis=axis, stage=stage, bucket_bytes=100, units=["lower", "upper", "side", "table"]
    )
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if pattern in NOT_THROUGH_THE_ROOT:
            optimizer.wait()
        with optimizer.no_sync() if local else nullcontext():
            pattern(model, axis.rank, step, 1.0)
        optimizer.clip_grad_norm_(float("inf"))  # whatever is not reduced yet is reduced now
        gradients = gradients_of(model, optimizer)
        optimizer.step()
        results.append({"gradients": gradients, "weights": weights_of(model, optimizer)})
    optimizer.close()
    return results


def patterns_of(stage: int) -> list[tuple[Pattern, bool]]:
    patterns = [pattern for pattern in PATTERNS if stage < 3 or pattern not in NOT_IN_STAGE_3]
    return [(pattern, local) for pattern in patterns for local in (False, True)]


def all_on_this_rank(stage: int) -> list[Result]:
    return [on_this_rank(pattern, stage, local) for pattern, local in patterns_of(stage)]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_way_of_calling_backward(stage: int) -> None:
    failures = []
    for (pattern, local), *by_rank in zip(patterns_of(stage), *run(RANKS, all_on_this_rank, stage), strict=True):
        try:
            for step, *results in zip(in_one_process(pattern), *by_rank, strict=True):  # the first step that deviates
                assert_parity(step, results)
        except AssertionError as error:
            failures.append(f"{pattern.__name__}, no_sync: {local}\n{error}")
    assert not failures, "\n".join(failures)
