"""The command ``verify``: whether a layout computes what one process does.

    one process   the whole batch, plain PyTorch, torch's AdamW        --.
    the layout    the same weights and batches, on all its ranks       --+--> compare --> table; what is wrong, and why

Compared are losses, norms, every parameter's gradient before clipping, weights after some steps, the next loss, and on
all ranks bit by bit what must be equal there. In float64 by default, so that a difference is no matter of rounding.

With ``fuzz`` layouts, options and odd sizes are drawn at random; one that fails is printed as a command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import nanopar_core as core
import nanopar_models as models
import nanopar_zero as zero
from nanopar_core import ParamSpec
from nanopar_core.sharding import whole_parameter
from nanopar_core.verify import Report, compare, portable
from nanopar_sft import assemble, launcher, layout, machine, tiny
from nanopar_sft.batches import Batches
from nanopar_sft.chat import IGNORED, Example
from nanopar_sft.config import DEFAULTS_OF, Config
from nanopar_sft.errors import InputError
from nanopar_sft.parallel import ParallelModel, ValueOf

EXAMPLES = 96
LINE_EVERY = 20  # layouts
EPS = 1e-4  # AdamW's: where a gradient is zero but for rounding, an update must not be made of that
PARTS = ("loss", "norm", "gradients", "weights", "next loss", "replicas")


def run(config: Config) -> None:
    """Verify one layout on the ranks of this job, or many drawn ones on ranks that are started here.

    Raises:
        SystemExit: with status 1, where something differs.
    """
    if config.fuzz:
        _fuzz(config)
        return
    machine.set_threads(config.threads)
    with core.launch(timeout_s=config.timeout_s, seed=config.seed) as world:
        report, differs = _verify_here(config, world)
        if report is not None:
            show(config, report)
        if differs and _steps(config) > 1:  # one step names the cause, of which later ones are full of echoes
            first, _ = _verify_here(config.model_copy(update={"steps": 1}), world)
            if first is not None and not first.ok:
                print(f"after one step: {first}")
    if differs:
        sys.exit(1)


def _verify_here(config: Config, world: core.World) -> tuple[Report | None, bool]:
    """The first rank's report, and on all ranks whether anything differs."""
    mine = on_rank(config, world.device)
    everyone = core.Mesh(dp=world.size).dp
    of_all = core.gather_objects(mine, everyone)
    report = judge(config, of_all) if world.rank == 0 else None
    differs = torch.tensor([float(report is not None and not report.ok)], device=world.device)
    return report, bool(core.all_reduce(differs, everyone, label="verdict").item())


# ---------------------------------------------------------------------------------------------------- the two trainings


def shape_of(config: Config) -> models.PhiMoEConfig:
    """The model's sizes; ``tiny-N`` are odd ones, drawn with N."""
    if tiny.is_tiny(config.model):
        shape = tiny.shape(config.model)
        layers = config.layers or shape.num_hidden_layers
        return replace(shape, router_noise=config.router_noise, num_hidden_layers=layers)
    return assemble.model_shape(config, assemble.load_chat(config))


def batches_of(config: Config, shape: models.PhiMoEConfig) -> Batches:
    """Random tokens in sequences of odd lengths, of which some count."""
    random = np.random.default_rng([config.seed, 5])
    examples = []
    for _ in range(EXAMPLES):
        length = int(random.integers(2, config.seq_len + 1))
        ids = random.integers(0, shape.vocab_size, length).astype(np.int32)
        labels = np.where(random.random(length) < 0.6, ids, IGNORED).astype(np.int32)
        labels[0] = IGNORED
        labels[-1] = ids[-1]
        examples.append(Example(ids, labels))
    return Batches(examples, config.batch_size, seed=config.seed)


@contextmanager
def _values(config: Config, shape: models.PhiMoEConfig) -> Iterator[ValueOf]:
    preset = config.model_copy(update={"model": "nano"}) if tiny.is_tiny(config.model) else config
    with assemble.values_of(preset, shape) as value_of:
        yield value_of


def in_one_process(config: Config) -> dict[str, Any]:
    """The reference: plain PyTorch, the whole batch at once."""
    shape, dtype = shape_of(config), assemble.saved_dtype(config)
    model = models.PhiMoE(shape, device="cpu", dtype=dtype).train()
    assemble.freeze(model, config.freeze)
    with _values(config, shape) as value_of, torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = tuple(parameter.shape)
            parameter.copy_(value_of(name, whole, [[range(length)] for length in whole]))
    names = dict(model.named_parameters())
    groups = [
        {**group, "params": [names[name] for name in group["params"]]}
        for group in assemble.parameter_groups(model, config.weight_decay)
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=EPS, foreach=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches, result = batches_of(config, shape), _Result()
    for step in range(_steps(config) + 1):
        [micro] = batches.local(step, 0, 1)
        labels = models.next_token_labels(micro.labels, micro.attention_mask)
        logits = model(micro.input_ids, attention_mask=micro.attention_mask, sample_ids=micro.sample_ids).logits
        loss = model.loss(logits, labels, batches.label_count(step))
        optimizer.zero_grad()
        loss.backward()
        for parameter in trained:
            if parameter.grad is None:  # no token chose any of these experts
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: p.grad.clone() for name, p in names.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(trained, config.clip or float("inf")).item()
        result.add(config, step, loss.item(), norm, gradients)
        if step < _steps(config):
            optimizer.step()
    return result.finished({name: parameter.detach().clone() for name, parameter in names.items()})


def on_rank(config: Config, device: torch.device) -> dict[str, Any]:
    """The same in the layout: what this rank has of it, parameters whole."""
    shape = shape_of(config)
    model = models.PhiMoE(shape, device="meta", dtype=assemble.saved_dtype(config))
    assemble.freeze(model, config.freeze)
    groups = assemble.parameter_groups(model, config.weight_decay)
    parallel = assemble.build_parallel(config, model)
    with _values(config, shape) as value_of:
        optimizer = parallel.shard(
            lambda groups: torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=EPS, foreach=False),
            value_of,
            stage=config.zero,
            groups=groups,
            device=device,
        )
    batches, result = batches_of(config, shape), _Result()
    for step in range(_steps(config) + 1):
        optimizer.zero_grad()
        micro_batches = parallel.micro_batches(batches, step, config.seq_len if config.packing else 0)
        share = parallel.forward_backward(micro_batches, batches.label_count(step), device)
        gradients = zero.full_gradients(parallel.part, optimizer) if step == _steps(config) - 1 else {}
        norm = optimizer.clip_grad_norm_(config.clip or float("inf")).item()
        loss = core.all_reduce(share.double(), parallel.axes.everyone_with_data).item()
        result.add(config, step, loss, norm, _of_all_stages(parallel, gradients))
        if step < _steps(config):
            optimizer.step()
    optimizer.wait()
    with zero.gathered(parallel.part):
        weights = {
            name: whole_parameter(parameter.detach(), parallel.specs.get(name, ParamSpec()), label="verify").clone()
            for name, parameter in parallel.part.named_parameters()
        }
    specs = _of_all_stages(parallel, portable(parallel.specs))
    return {**result.finished(_of_all_stages(parallel, weights)), "specs": specs}


class _Result:
    """What is compared, step by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def add(self, config: Config, step: int, loss: float, norm: float, gradients: dict[str, Tensor]) -> None:
        """One step, of which the one after the last has a loss only; gradients of the last one."""
        self.losses.append(loss)
        if step < _steps(config):
            self.norms.append(norm)
            self.gradients = gradients

    def finished(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """As ``compare`` takes it."""
        losses = {"loss": self.losses[:-1], "next loss": self.losses[-1]}
        tensors = {"gradients": _cpu(self.gradients), "weights": _cpu(weights)}
        return {**losses, "norm": self.norms, **tensors}


def _cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _of_all_stages(parallel: ParallelModel, here: Mapping[str, Any]) -> dict[str, Any]:
    """What the ranks of a pipeline have together."""
    of_all = core.gather_objects(dict(here), parallel.mesh.pp)
    return {name: value for of_one in of_all for name, value in of_one.items()}


def _steps(config: Config) -> int:
    return config.steps or 3


# ---------------------------------------------------------------------------------------------------------- the verdict


def judge(config: Config, of_all: list[dict[str, Any]]) -> Report:
    """Compare what all ranks have with one process."""
    specs = of_all[0]["specs"]
    ranks = [{key: value for key, value in rank.items() if key != "specs"} for rank in of_all]
    wanted = config.layout()
    reference = in_one_process(config)
    rtol = None if config.precision == "fp64" else 1e-3  # AdamW makes much of rounding where gradients are near zero
    sizes = {name: getattr(wanted, name) for name in layout.AXES if name != "ep"}
    return compare(reference, ranks, specs, axes=sizes, micro_batches=config.microbatches, rtol=rtol)


def show(config: Config, report: Report) -> None:
    """The table, and what is wrong."""
    wrong = {difference.name.partition(".")[0].partition("[")[0] for difference in report.differences}
    wrong |= {"replicas"} if any(difference.kind == "replicas" for difference in report.differences) else set()
    table = Table(title=f"{config.layout()}, zero={config.zero}, {config.precision}: against one process")
    table.add_column("compared")
    table.add_column("")
    for part in PARTS:
        table.add_row(part, "DIFFERS" if part in wrong else "equal")
    Console(soft_wrap=True).print(table)
    if not report.ok:
        print(report)


# ------------------------------------------------------------------------------------------------------------ at random


def command(config: Config) -> str:
    """What verifies this again."""
    words = ["nanopar-sft", "verify"]
    for name in tiny.DRAWN:
        value = getattr(config, name)
        if value != DEFAULTS_OF["verify"].get(name, Config.model_fields[name].default):
            words += [f"--{name}", ",".join(value) if isinstance(value, tuple) else str(value).lower()]
    return shlex.join(words)


def _fuzz(config: Config) -> None:
    """Draw and verify ``config.fuzz`` layouts of at most ``nproc`` ranks."""
    if launcher.in_rank():
        raise InputError(f"fuzz={config.fuzz} starts ranks itself: run it without torchrun")
    if config.nproc == 1:
        raise InputError(f"fuzz={config.fuzz} needs ranks to divide something among: use nproc=2 or more")
    failed, count = 0, config.fuzz or 0
    for number in track(range(count), description="layouts", console=Console(stderr=True), transient=True):
        drawn = tiny.draw(config.seed, number, config.nproc or 4)
        if problem := verify_on_ranks(drawn):
            failed += 1
            print(f"\n{command(drawn)}\n{problem}\n", flush=True)
        if (number + 1) % LINE_EVERY == 0:
            print(f"{number + 1} of {count} layouts, {failed} differ from one process", file=sys.stderr, flush=True)
    print(f"{count} layouts, seed {config.seed}: {failed} differ from one process")
    if failed:
        sys.exit(1)


def verify_on_ranks(config: Config, train: Callable[[Config, torch.device], dict[str, Any]] = on_rank) -> str:
    """Verify a layout on ranks of this machine; what is wrong with it, in words, or nothing.

    ``train``: what the ranks run, importable.
    """
    from nanopar_core.testing import run as run_ranks

    ranks = config.layout().ranks
    try:
        of_all = run_ranks(ranks, train, config, torch.device("cpu"), timeout_s=config.timeout_s)
        report = judge(config, of_all)
        if not report.ok and _steps(config) > 1:
            shorter = config.model_copy(update={"steps": 1})
            first = judge(shorter, run_ranks(ranks, train, shorter, torch.device("cpu"), timeout_s=config.timeout_s))
            report = report if first.ok else first
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}\n{notes}"
    return "" if report.ok else str(report)
