"""torch's private names: these tests fail when torch changes what they mean."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanopar_zero.torch_private import (
    call_at_end_of_backward,
    current_backward,
    divide_each,
    not_compiled,
    will_accumulate,
)


def test_passes_are_numbered_and_nested_ones_have_numbers_of_their_own() -> None:
    seen: dict[str, int] = {}
    inner, outer = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    inner.register_hook(lambda _: seen.update(inner=current_backward()))
    outer.register_hook(lambda _: seen.update(outer=current_backward()))
    assert current_backward() == -1
    (checkpoint(lambda x: x * inner, outer * 1, use_reentrant=True) * outer).sum().backward()
    assert -1 not in seen.values()
    assert seen["inner"] != seen["outer"]
    assert current_backward() == -1


def test_the_callback_runs_once_after_the_last_gradient() -> None:
    events: list[str] = []
    first, last = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    last.register_hook(lambda _: call_at_end_of_backward(lambda: events.append("end")))
    for name, parameter in (("first", first), ("last", last)):
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    ((first * 1).exp() * last).sum().backward()
    assert events[-1] == "end"
    assert sorted(events) == ["end", "first", "last"]
    assert first.grad is not None


def test_the_callback_does_not_run_when_backward_fails() -> None:
    events: list[str] = []
    parameter = nn.Parameter(torch.ones(2))

    def fail(_parameter: torch.Tensor) -> None:
        raise ArithmeticError

    parameter.register_hook(lambda _: call_at_end_of_backward(lambda: events.append("end")))
    parameter.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ArithmeticError):
        parameter.sum().backward()
    assert not events


def test_will_accumulate_tells_backward_from_grad() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    seen: list[tuple[bool, bool]] = []
    middle = torch.ones(2, requires_grad=True)

    def loss() -> torch.Tensor:
        product = a * b * middle
        product.register_hook(lambda _: seen.append((will_accumulate(a), will_accumulate(b))))
        return product.sum()

    loss().backward()
    loss().backward(inputs=[b])
    torch.autograd.grad(loss(), middle)
    torch.autograd.grad(loss(), a)
    assert seen == [(True, True), (False, True), (False, False), (False, False)]


def test_the_dtype_in_which_gradients_are_added() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    for factor in (1.0, 2**-9):
        (parameter * factor).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.item() == 1 + 2**-9


def test_what_is_not_compiled_runs_as_plain_python_between_the_compiled_parts() -> None:
    compiled: list[bool] = []

    @not_compiled
    def hook(*_: object) -> None:
        compiled.append(torch.compiler.is_compiling())

    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(hook)
    model.compile(backend="eager")
    for _ in range(2):
        model(torch.ones(2))
    assert compiled == [False, False]


def test_tensors_are_divided_into_places_of_their_own_dtype() -> None:
    flat = torch.zeros(5, dtype=torch.float64)
    for dtype in (torch.float64, torch.bfloat16):
        for divisor in (1, 4):
            flat.zero_()
            tensors = [torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([0.5, 4.0], dtype=dtype)]
            divide_each([flat[:2], flat[3:]], tensors, divisor)
            assert flat.tolist() == [1.0 / divisor, 2.0 / divisor, 0.0, 0.5 / divisor, 4.0 / divisor]
            assert tensors[0].tolist() == [1.0, 2.0]
