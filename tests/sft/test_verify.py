"""``verify``: layouts equal one process, and a fault that is planted in one is caught and named."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import nanopar_models as models
import nanopar_tensor as tensor
import nanopar_zero as zero
from nanopar_core import ParamSpec
from nanopar_models.attention import Attention
from nanopar_models.phi_moe import SparseMoe
from nanopar_models.router import SparseMixerRouter
from nanopar_sft import assemble, tiny, verify
from nanopar_sft.batches import Batches
from nanopar_sft.config import Config
from nanopar_sft.parallel import ParallelModel
from nanopar_tensor.linear import RowLinear
from nanopar_zero.buckets import Bucket, Reduction
from nanopar_zero.optimizer import ZeroOptimizer

pytestmark = pytest.mark.long


def config_for(*arguments: str, model: str = "tiny-3") -> Config:
    config = Config.parse(["--model", model, "--timeout-s", "60", *arguments])
    return config.resolve("verify", config.ranks("verify"))


# ------------------------------------------------------------------------------------------------------ what is right


@pytest.mark.parametrize("number", range(8))
def test_drawn_layouts_equal_one_process(number: int) -> None:
    """A fixed sample of what ``verify --fuzz`` draws."""
    drawn = tiny.draw(20, number, 4)
    assert verify.verify_on_ranks(drawn) == "", verify.command(drawn)


LAYOUTS = [
    "--dp 2 --tp 2 --sp true --zero 3 --recompute true --microbatches 2",
    "--pp 2 --schedule zb_h1 --tp 2 --sp true --zero 2 --microbatches 4 --packing true",
    "--pp 2 --schedule interleaved --cp 2 --cp_method ring --microbatches 2 --zero 1 --recompute true",
    "--pp 2 --schedule dualpipe_v --dp 2 --ep 2 --microbatches 4 --zero 3 --router_noise true",
    "--cp 2 --tp 2 --ep 2 --etp 1 --zero 2 --packing true --cp_method ulysses",
    "--dp 2 --dp_replicate 2 --ep 2 --zero 3 --clip 0.1 --router_noise true",
    "--pp 2 --schedule zbv --tp 2 --ep 2 --etp 1 --microbatches 3",
]


@pytest.mark.parametrize("arguments", LAYOUTS)
def test_layouts_of_many_axes_equal_one_process(arguments: str) -> None:
    assert verify.verify_on_ranks(config_for(*arguments.split(), "--batch-size", "24", model="tiny-0")) == ""


def test_a_drawn_layout_is_drawn_again_by_its_command() -> None:
    drawn = tiny.draw(4, 2, 8)
    words = verify.command(drawn).replace("'", "").split()
    again = Config.parse(words[2:]).resolve("verify", drawn.layout().ranks)
    for name in tiny.DRAWN:
        assert getattr(again, name) == getattr(drawn, name), name
    assert tiny.draw(4, 2, 8) == drawn


# --------------------------------------------------------------------------------------------------- what is wrong


def change_specs(change: Callable[[str, ParamSpec], ParamSpec]) -> contextlib.AbstractContextManager[Any]:
    """Specs as a strategy would give them that has forgotten, or thought up, something."""
    right = assemble.build_parallel

    def build(config: Config, model: models.PhiMoE) -> ParallelModel:
        parallel = right(config, model)
        names = [name for name, _ in parallel.part.named_parameters()]
        parallel.specs = {name: change(name, parallel.specs.get(name, ParamSpec())) for name in names}
        return parallel

    return mock.patch.object(assemble, "build_parallel", build)


def norms_not_reduced() -> Any:
    return change_specs(lambda name, spec: replace(spec, grad_sum=()) if "layernorm" in name else spec)


def mean_for_sum() -> Any:
    right = zero.shard
    return mock.patch.object(zero, "shard", lambda *args, **more: right(*args, **{**more, "reduce": "mean"}))


def expert_divisor() -> Any:
    """Experts' gradients divided by the number of ranks that hold other experts."""
    right = Reduction.__init__

    def init(self: Reduction, data_axis: Any, divided: bool, more: Any, divisor: int, shards: Any) -> None:
        by_experts = any(axis.name == "ep" for axis in shards)
        right(self, data_axis, divided, more, 2 if by_experts else divisor, shards)

    return mock.patch.object(Reduction, "__init__", init)


def router_detached() -> Any:
    right = SparseMixerRouter.forward

    def forward(self: SparseMixerRouter, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, indices = right(self, *args)
        return logits, weights.detach(), indices

    return mock.patch.object(SparseMixerRouter, "forward", forward)


def bias_on_every_rank() -> Any:
    right = RowLinear.forward

    def forward(self: RowLinear, x: Tensor) -> Tensor:
        y = right(self, x)
        return y if self.bias is None else y + (self.boundary.axis.size - 1) * self.bias

    return mock.patch.object(RowLinear, "forward", forward)


def divided_by_micro_batches() -> Any:
    right = ParallelModel._share_of_loss
    return mock.patch.object(ParallelModel, "_share_of_loss", lambda self, *args: right(self, *args) / 3)


def norm_of_the_shard() -> Any:
    return mock.patch(
        "nanopar_zero.optimizer.global_norm",
        lambda pieces, stages=None: torch.stack([g.square().sum() for g, _ in pieces]).sum().sqrt(),  # noqa: ARG005
    )


def norm_of_copies() -> Any:
    """Every rank's gradient counted, though in stage 0 all have the same."""
    return mock.patch.object(Reduction, "norm_axes", property(lambda self: (*self.shard_axes, self.data_axis)))


def embedding_detached() -> Any:
    right = torch.nn.Embedding.forward
    return mock.patch.object(torch.nn.Embedding, "forward", lambda self, ids: right(self, ids).detach())


def masters_never_published() -> Any:
    return mock.patch.object(Bucket, "publish", lambda _self: None)


def gradients_not_reduced() -> Any:
    def start(self: Bucket) -> None:
        self.gradient = self._collect()
        self.state = type(self.state).REDUCING
        self.waiting = set()
        self.pending = mock.Mock(wait=lambda: self.gradient)

    return mock.patch.object(Bucket, "start_reduction", start)


def tokens_of_this_rank() -> Any:
    right = Batches.label_count
    return mock.patch.object(Batches, "label_count", lambda self, step: right(self, step) // 2)


def positions_from_zero() -> Any:
    """Every context-parallel rank takes its positions for the first ones."""
    right = ParallelModel._part_of

    def part(self: ParallelModel, *args: Any) -> Any:
        inputs, labels = right(self, *args)
        start = torch.arange(labels.shape[1]).expand_as(labels)
        return {**inputs, "position_ids": start}, labels

    return mock.patch.object(ParallelModel, "_part_of", part)


def vocabulary_off_by_one() -> Any:
    right = tensor.VocabParallelLoss.forward
    return mock.patch.object(
        tensor.VocabParallelLoss,
        "forward",
        lambda self, logits, labels, counted: right(self, logits, (labels - 1).where(labels > 0, labels), counted),
    )


def micro_batch_forgotten() -> Any:
    right = Batches.local
    return mock.patch.object(Batches, "local", lambda self, *args: right(self, *args)[:1])


def clipped_twice() -> Any:
    right = ZeroOptimizer.clip_grad_norm_

    def clip(self: ZeroOptimizer, most: float) -> Tensor:
        norm = right(self, most)
        right(self, most / 2)
        return norm

    return mock.patch.object(ZeroOptimizer, "clip_grad_norm_", clip)


def experts_summed_over_dp() -> Any:
    """Experts' gradients summed over all data ranks, though each of these has other experts."""
    return change_specs(lambda name, spec: replace(spec, data_axis=None) if ".experts." in name else spec)


def norm_of_one_stage() -> Any:
    right = ZeroOptimizer.__init__

    def init(self: ZeroOptimizer, *args: Any, **more: Any) -> None:
        right(self, *args, **more)
        self.stages = None

    return mock.patch.object(ZeroOptimizer, "__init__", init)


def initial_values_by_rank() -> Any:
    right = models.initial_value

    def value(name: str, shape: Any, config: Any, seed: int) -> Tensor:
        found = right(name, shape, config, seed)
        return found * (1 + torch.distributed.get_rank()) if "q_proj.weight" in name else found

    return mock.patch.object(models, "initial_value", value)


def attention_weights_not_scaled() -> Any:
    right = Attention.forward
    return mock.patch.object(Attention, "forward", lambda self, *args: 1.5 * right(self, *args))


def token_kept_from_experts() -> Any:
    right = SparseMoe.forward

    def forward(self: SparseMoe, x: Tensor, layout: Any) -> Any:
        rows = torch.arange(x.shape[0] * x.shape[1])  # the first token of a batch is forgotten
        return right(self, x, layout._replace(real=rows[1:] if layout.real is None else layout.real[1:]))

    return mock.patch.object(SparseMoe, "forward", forward)


FAULTS: list[tuple[Callable[[], Any], str, str]] = [
    (
        norms_not_reduced,
        "--tp 2 --sp true",
        r"replicas on tp.* differ: gradient not reduced: .*layernorm.*sum is right",
    ),
    (mean_for_sum, "--dp 2", r"off by a constant on all parameters: .*ratio 0\.500 = 1/size of axis dp"),
    (expert_divisor, "--dp 2 --ep 2", r"first deviation .*experts.*: constant ratio 0\.500 = 1/size of axis"),
    (router_detached, "--dp 2", r"router\.weight.*: zero where the reference is not: detached"),
    (bias_on_every_rank, "--tp 2", r"o_proj\.bias .*: constant ratio 2\.000 = size of axis tp"),
    (divided_by_micro_batches, "--dp 2 --microbatches 3", r"ratio 0\.333 = 1/number of micro-batches"),
    (norm_of_the_shard, "--dp 2 --zero 1", r"differ in norm\[0\], gradients do not: norm of the local shard"),
    (norm_of_copies, "--dp 2", r"norm\[0\]: ratio 1\.414 = square root of size of axis dp, gradients agree: copies"),
    (embedding_detached, "--dp 2", r"first deviation model\.embed_tokens\.weight: zero .*: detached"),
    (
        masters_never_published,
        "--dp 2 --zero 1",
        r"replicas on dp differ in weights, gradients do not: .* parts not gathered",
    ),
    (gradients_not_reduced, "--dp 2", r"replicas on dp differ: gradient not reduced: .* \(their sum is right\)"),
    (tokens_of_this_rank, "--dp 2", r"off by a constant on all parameters: loss divisor, ratio (2|1\.9|2\.0)"),
    (positions_from_zero, "--cp 2", r"all gradients and loss\[0\] deviate without a constant ratio"),
    (vocabulary_off_by_one, "--tp 2", r"all gradients and loss\[0\] deviate without a constant ratio"),
    (
        micro_batch_forgotten,
        "--dp 2 --microbatches 2",
        r"all gradients and loss\[0\] deviate .*rows dropped or",
    ),
    (clipped_twice, "--dp 2 --clip 0.05", r"loss, gradients, norm agree, weights do not .*: .*clipping factor"),
    (experts_summed_over_dp, "--dp 2 --ep 2", r"all gradients and loss\[0\] deviate .*other initial weights"),
    (norm_of_one_stage, "--pp 2", r"differ in norm\[0\], gradients do not: norm of the local shard"),
    (initial_values_by_rank, "--tp 2", r"all gradients and loss\[0\] deviate .*other initial weights"),
    (attention_weights_not_scaled, "--dp 2", r"all gradients and loss\[0\] deviate .*another forward"),
    (token_kept_from_experts, "--dp 2", r"all gradients and loss\[0\] deviate .*another forward pass"),
]


def train_with(fault: str, config: Config, device: torch.device) -> dict[str, Any]:
    with globals()[fault]():
        return verify.on_rank(config, device)


@pytest.mark.parametrize(("fault", "arguments", "named"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS])
def test_a_planted_fault_is_caught_and_named(fault: Callable[[], Any], arguments: str, named: str) -> None:
    text = verify.verify_on_ranks(config_for(*arguments.split()), functools.partial(train_with, fault.__name__))
    assert re.search(named, text), text


def test_the_command_line_prints_a_table_and_fails_where_something_differs() -> None:
    whole = [sys.executable, "-m", "nanopar_sft", "verify", "--model", "tiny-3", "--steps", "2", "--tp", "2"]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "tp=2, zero=0, fp64: against one process" in done.stdout
    assert done.stdout.count("equal") == 6
    fault = (
        "import sys, nanopar_sft.__main__ as m, tests.sft.test_verify as t; t.divided_by_micro_batches().__enter__(); "
    )
    code = f"{fault} sys.exit(m.main(['verify', '--model', 'tiny-3', '--steps', '2']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
