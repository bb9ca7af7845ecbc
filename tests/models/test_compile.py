"""The compiled model gives the results of transformers' model, in one graph per kind of batch and without a break."""

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import nanopar_models as models
from nanopar_core.testing import assert_parity
from nanopar_models import compiling

# What torch's tracer does to its own objects; no user sees either.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is None,
    reason="torch.compile needs a C++ compiler",
)


@pytest.fixture(autouse=True)
def counters() -> Iterator[dict[str, Any]]:
    """torch's counts of graphs and breaks, which start at zero in every test."""
    from torch._dynamo.utils import counters as counts

    torch._dynamo.reset()
    counts.clear()
    yield counts
    torch._dynamo.reset()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 320, (batch, length), generator=torch.Generator().manual_seed(1))


def result_of(model: Any, ids: Tensor, **arguments: Any) -> dict[str, Any]:
    """Loss, logits and the gradient of every parameter."""
    output = model(input_ids=ids, labels=ids, **arguments)
    return differentiated(model, output.logits, output.loss)


def reference_result(reference: Any, ids: Tensor) -> dict[str, Any]:
    """The same of transformers' model; its loss is in fp32 always, so it is written out here."""
    logits = reference(input_ids=ids).logits
    return differentiated(reference, logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def differentiated(model: Any, logits: Tensor, loss: Tensor) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"outputs": {"logits": logits.detach()}, "loss": loss.detach(), "gradients": gradients}


def graphs_and_breaks(counters: dict[str, Any]) -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_layers_traced_without_a_compiler(make_pair, counters):
    """One graph serves all layers and lengths, padding needs a second one, nothing breaks; names stay."""
    pair = make_pair(num_hidden_layers=2)
    names = [name for name, _ in pair.ours.named_parameters()]
    for layer in pair.ours.model.layers:
        layer.compile(dynamic=True, backend="aot_eager")
    for batch, length in ((3, 24), (3, 24), (2, 17), (4, 31)):
        ids = tokens(batch, length)
        assert_parity(reference_result(pair.reference, ids), result_of(pair.ours, ids), rtol=5e-6)
        assert graphs_and_breaks(counters) == (1, 0)
    for real in (20, 13):  # other numbers of tokens for the experts, the same graph
        mask = (torch.arange(24) < real).long().expand(2, -1)
        result_of(pair.ours, tokens(2, 24), attention_mask=mask)
        assert graphs_and_breaks(counters) == (2, 0)
    assert [name for name, _ in pair.ours.named_parameters()] == names == list(pair.ours.state_dict())


def test_recomputed_layers_with_a_noisy_router(make_pair, counters):
    """Recomputation and the stochastic router are traced too; results are those of the model that is not compiled."""
    plain, compiled = (make_pair(router_noise=True, num_hidden_layers=1).ours.train() for _ in range(2))
    compiled.set_recompute(True)
    for layer in compiled.model.layers:
        layer.compile(dynamic=True, backend="aot_eager")
    ids, samples = tokens(2, 24), torch.arange(2)
    want = result_of(plain, ids, sample_ids=samples)
    assert_parity(want, result_of(compiled, ids, sample_ids=samples), rtol=5e-6)
    assert graphs_and_breaks(counters)[1] == 0


def test_whole_model_wrapped(make_pair, counters):
    """``torch.compile(model)``: one graph, from the tokens to the loss."""
    pair = make_pair(num_hidden_layers=2)
    compiled = torch.compile(pair.ours, backend="aot_eager")
    ids = tokens(2, 24)
    for _ in range(2):
        got = result_of(compiled, ids)
        got["gradients"] = {name.removeprefix("_orig_mod."): grad for name, grad in got["gradients"].items()}
        assert_parity(reference_result(pair.reference, ids), got, rtol=5e-6)
        assert graphs_and_breaks(counters) == (1, 0)


@needs_compiler
def test_layers_compiled_to_machine_code(make_pair, counters):
    """In float64, where a wrong formula cannot hide behind rounding; fp32 goes the whole way in nanopar-sft's tests."""
    pair = make_pair(dtype=torch.float64, num_hidden_layers=2)
    pair.ours.compile_layers()
    for batch, length in ((2, 24), (2, 24), (3, 17)):
        ids = tokens(batch, length)
        assert_parity(reference_result(pair.reference, ids), result_of(pair.ours, ids), rtol=1e-12)
        assert graphs_and_breaks(counters) == (1, 0)


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    model = models.PhiMoE(models.PhiMoEConfig.preset("nano"), device="meta")
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler .* install one .* or run without compilation"):
        model.compile_layers()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="finds no 'no-such-compiler'"):
        compiling.check_compiler()
