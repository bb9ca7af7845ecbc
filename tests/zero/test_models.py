"""Models and uses of them that a reader of the README would not think of, in stages 1 to 3 against plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from tests.zero.cases import gradients_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run

pytestmark = pytest.mark.long

WIDTH = 6


@dataclass
class Output:
    value: Any
    about: str = "no tensor"


class Hidden:
    """Tensors in here are found by nobody."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Any:
        return self.compute(x)


class Net(nn.Module):
    """Three blocks and a head, each a unit; subclasses change what blocks give and how they are used."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.use(block, x)
        return self.head(x)

    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


# ----------------------------------------------------------------------------------------------- what blocks give


class Views(Net):
    """A view, modified in place: autograd makes new nodes for it, and drops the one that the block knew."""

    class block(Block):  # noqa: N801 - takes the place of the attribute
        def forward(self, x: Tensor) -> Tensor:
            return self.compute(x).view(2, -1, WIDTH)

    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        y[0].mul_(2.0)
        y += 1.0
        return y.view(-1, WIDTH)


class InPlace(Net):
    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).mul_(2.0)


class ViewsOfTheInput(Net):
    """What a block computes is not used, its view is modified in place."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            self.compute(x)
            return x.view(-1, WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.start(x))

    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).mul_(2.0)


class Objects(Net):
    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Hidden:
            return Hidden(self.compute(x))

    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).value


class Sets(Net):
    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> set[Tensor]:
            return {self.compute(x)}

    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).pop()


class Nested(Net):
    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Any:
            return {"list": [(Output([self.compute(x)]), 3)], "text": "text", "nothing": None}

    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)["list"][0][0].value[0]


class Nothing(Net):
    """The result goes into a list of the caller's."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor, results: list[Tensor]) -> None:
            results.append(self.compute(x))

    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        block(x, results=results)
        return results[0]


class Numbers(Net):
    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Any:
            return len(x), "text"

    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        number, text = block(x)
        return x * number + len(text)


class Pairs(Net):
    """A second output goes straight into the loss, and its gradient comes at another time."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.compute(x)
            return y, y.square().mean()

    def forward(self, x: Tensor) -> Output:
        total = torch.zeros(()).double()
        for block in self.blocks:
            x, more = block(x)
            total = total + more
        return Output([self.head(x), total])


class AsDictionary(Net):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": super().forward(x), "cache": None}


class AsObject(Net):
    """The root hides its tensors, and has a parameter of its own that is needed first in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(super().forward(x) * self.scale)


# ------------------------------------------------------------------------------------------ how they are put together


class TwoNames(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1], self.blocks[0]])


class SharedLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up


class Fork(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.head(self.blocks[1](x) + self.blocks[2](x) + x)


class FrozenFirst(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class FrozenMiddle(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class HalfFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)


class Detached(Net):
    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x.detach())


class WithoutGradient(Net):
    def use(self, block: nn.Module, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(block is not self.blocks[1]):
            return block(x)


class Segment(Net):
    """Two blocks are recomputed together."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        def segment(x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x))

        return self.head(self.blocks[2](checkpoint(segment, x.requires_grad_(), use_reentrant=self.reentrant)))


class ReentrantSegment(Segment):
    reentrant = True


class Hooked(Net):
    """The user has hooks of his own on the same modules."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5,))
            block.register_forward_hook(lambda _module, _args, output: output * 2)
            block.register_full_backward_pre_hook(lambda *_: None)
            block.register_full_backward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.requires_grad_())  # otherwise torch warns of its own hooks


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].compile(backend="aot_eager")
        self.blocks[2].compile(backend="aot_eager")


# ------------------------------------------------------------------------------------------------- how they are used


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        output = output["logits"]
    while isinstance(output, (Hidden, Output)):
        output = output.value
    if isinstance(output, list):
        return loss_of(output[0]) + output[1]
    return output.square().mean()


def usual(model: nn.Module, x: Tensor) -> None:
    loss_of(model(x)).backward()


def the_graph_twice(model: nn.Module, x: Tensor) -> None:
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses_of_one_graph(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    output.mean().backward(retain_graph=True)
    output.square().mean().backward()


def two_forwards_one_backward(model: nn.Module, x: Tensor) -> None:
    (loss_of(model(x)) * loss_of(model(2 * x))).backward()


def two_backwards_in_reverse_order(model: nn.Module, x: Tensor) -> None:
    first, second = loss_of(model(x)), loss_of(model(2 * x))
    second.backward()
    first.backward()


def two_backwards_in_order(model: nn.Module, x: Tensor) -> None:
    first, second = loss_of(model(x)), loss_of(model(2 * x))
    first.backward()
    second.backward()


def gradient_of_the_input_before(model: nn.Module, x: Tensor) -> None:
    loss = loss_of(model(x.requires_grad_()))
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def gradient_of_the_input_elsewhere(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(loss_of(model(x.requires_grad_())), x)
    usual(model, x)


def penalty_on_the_inputs_gradient(model: nn.Module, x: Tensor) -> None:
    loss = loss_of(model(x.requires_grad_()))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def penalty_on_the_weights_gradient(model: nn.Module, x: Tensor) -> None:
    loss = loss_of(model(x))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def backward_with_a_graph(model: nn.Module, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cycle, which zero_grad ends
        loss_of(model(x)).backward(create_graph=True)


def evaluation_before(model: nn.Module, x: Tensor) -> None:
    model.eval()
    for _ in range(2):
        with torch.no_grad():
            model(x)
    with torch.inference_mode():
        model(x)
    model(x)  # a graph that is dropped
    model.train()
    usual(model, x)


def a_part_before(model: Net, x: Tensor) -> None:
    loss_of(model.blocks[0](x)).backward()
    usual(model, x)


def some_parameters_only(model: Net, x: Tensor) -> None:
    loss_of(model(x)).backward(inputs=[*model.blocks[1].parameters()])


NETS = [
    *(Views, InPlace, ViewsOfTheInput, Objects, Sets, Nested, Nothing, Numbers, Pairs, AsDictionary, AsObject),
    *(TwoNames, SharedLayer, Fork, FrozenFirst, FrozenMiddle, HalfFrozen, Detached, WithoutGradient),
    *(Segment, ReentrantSegment, Hooked),
]
USES: list[Callable[[Any, Tensor], None]] = [
    *(usual, the_graph_twice, two_losses_of_one_graph),
    *(two_forwards_one_backward, two_backwards_in_order, two_backwards_in_reverse_order),
    *(gradient_of_the_input_before, gradient_of_the_input_elsewhere),
    *(penalty_on_the_inputs_gradient, penalty_on_the_weights_gradient, backward_with_a_graph),
    *(evaluation_before, a_part_before, some_parameters_only),
]


@dataclass(frozen=True)
class Job:
    net: type[Net] = Net
    use: Callable[[Any, Tensor], None] = usual
    stage: int = 3
    units: tuple[str, ...] | None = ("blocks.*", "head")
    prefetch: int = 1
    reshard_after_forward: bool = True

    def __str__(self) -> str:
        return f"{self.net.__name__} {self.use.__name__} {vars(self)}"


STEPS = 2


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step)).double()


def make(job: Job) -> Net:
    torch.manual_seed(0)
    return job.net().double()


def in_one_process(job: Job, ranks: int) -> dict[str, Any]:
    model = make(replace(job, net=Net) if job.net is Compiled else job)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = sgd(trained.values())
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            job.use(model, inputs(rank, step))
        for name, p in trained.items():
            gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach() / ranks
            p.grad = gradients[name].clone()
        optimizer.step()
    return {"gradients": gradients, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


def hooks_on(model: nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    on_parameters = sum(
        len(p._backward_hooks or {}) + len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()
    )
    return on_modules + on_parameters


def on_this_rank(job: Job, axis: core.Axis | None = None) -> dict[str, Any]:
    axis = axis or core.Mesh(dp=torch.distributed.get_world_size()).dp
    model = make(job)
    before = hooks_on(model)
    optimizer = zero.shard(
        model,
        sgd,
        axis=axis,
        stage=job.stage,
        units=job.units,
        prefetch=job.prefetch,
        reshard_after_forward=job.reshard_after_forward,
    )
    assert hooks_on(model) > before
    gradients = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        job.use(model, inputs(axis.rank, step))
        gradients = gradients_of(model, optimizer)
        optimizer.step()
        if job.stage == 3:
            stored = [bucket.parameters.untyped_storage().nbytes() for bucket in optimizer.windows.buckets]
            assert not any(stored), "after a step every rank holds only its part"
    optimizer.close()
    assert hooks_on(model) == before
    return {"gradients": gradients, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


def all_on_this_rank(jobs: Sequence[Job]) -> list[Any]:
    return [on_this_rank(job) for job in jobs]


WINDOWS: list[dict[str, Any]] = [{}, {"prefetch": 0}, {"reshard_after_forward": False}]


def check(jobs: Sequence[Job], ranks: int) -> None:
    by_rank = run(ranks, all_on_this_rank, jobs)
    failures = []
    for number, job in enumerate(jobs):
        try:
            assert_parity(in_one_process(job, ranks), [results[number] for results in by_rank])
        except AssertionError as error:
            failures.append(f"{job}: {error}")
    assert not failures, "\n".join(failures)


def test_odd_models_in_stage_3() -> None:
    check([replace(Job(net), **more) for net, more in zip(NETS, cycle(WINDOWS), strict=False)], 2)


def test_odd_uses_in_stage_3() -> None:
    check([replace(Job(use=use), **more) for use, more in zip(USES, cycle(WINDOWS), strict=False)], 2)


def test_odd_models_and_uses_in_units_that_zero_finds_on_three_ranks() -> None:
    nets = [Job(net, stage=1 + number % 3, units=None) for number, net in enumerate(NETS)]
    check([*nets, *(Job(use=use, stage=1 + number % 2) for number, use in enumerate(USES))], 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks(stage: int) -> None:
    check([Job(Compiled, stage=stage)], 2)


# ------------------------------------------------------------------------------------------------------- a single rank


def alone(jobs: Sequence[Job], how: str) -> tuple[list[dict[str, Any]], int]:
    """Results, and how many collectives there were."""
    axis = core.Mesh(always_communicate=how == "always communicates").dp
    with core.ledger() as book:
        results = [on_this_rank(job, axis) for job in jobs]
    return results, len(book.records)


@pytest.mark.parametrize("how", ["an axis of one rank", "always communicates"])
def test_one_rank(how: str) -> None:
    jobs = [Job(stage=stage) for stage in (0, 1, 2, 3)] + [Job(units=())]  # everything in the root
    ((results, collectives),) = run(1, alone, jobs, how)
    for job, result in zip(jobs, results, strict=True):
        assert_parity(in_one_process(job, 1), result)
    assert (collectives > 0) == (how == "always communicates")


def test_without_any_process_group() -> None:
    for stage in (0, 1, 2, 3):
        job = Job(stage=stage)
        assert_parity(in_one_process(job, 1), on_this_rank(job, core.Mesh().dp))


def test_everything_in_the_root() -> None:
    check([Job(units=(), stage=stage) for stage in (1, 2, 3)], 2)
