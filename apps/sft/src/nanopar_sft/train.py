"""The training loop.

    rows -> Batches ---- micro-batches of this rank ----.
    model -> zero.shard -> optimizer                    v
    each step:  forward, backward (gradients travel meanwhile) -> norm, clip -> finite? -> step -> record

The order of a step: the tokens that count are known from the batch, which every rank knows whole; forward and backward
of the micro-batches; gradients reduced; a step whose norm is not finite is skipped by all ranks together; clip; update.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import nanopar_core as core
import nanopar_models as models
import nanopar_zero as zero
from nanopar_core import checkpoint
from nanopar_sft import answers, assemble, machine
from nanopar_sft.batches import Batches
from nanopar_sft.chat import Chat
from nanopar_sft.checkpoints import checkpoint_path, newest_checkpoint
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.evaluate import Result, answer, evaluate
from nanopar_sft.metrics import StepRecord
from nanopar_sft.report import Reporter
from nanopar_sft.rows import Row
from nanopar_sft.schedule import learning_rate
from nanopar_zero.stages import STAGES

CONFIG = "config.yaml"


def run(config: Config) -> None:
    """The command ``train``."""
    machine.set_threads(config.threads)
    chat = assemble.load_chat(config)
    encoded, batches = assemble.training_batches(config, chat)
    held_back = assemble.held_back_rows(config)
    total_steps = config.steps or batches.steps_in(config.epochs or 1)
    if config.warmup_steps(total_steps) >= total_steps and config.warmup >= 1:
        raise InputError(f"warmup={config.warmup:g} leaves no step to train in {total_steps} steps")
    rows = len(encoded.examples) + encoded.too_long
    left_out = f"{encoded.too_long} of {rows} rows are longer than seq_len={config.seq_len} and left out"
    if config.dry_run:
        _describe(config, chat, batches, total_steps, left_out)
        return
    resume = _checkpoint_to_resume(config)
    model = assemble.training_model(config, chat)
    with core.launch(timeout_s=config.timeout_s, seed=config.seed) as world:
        trainer = Trainer(config, world, model, chat, batches, held_back, total_steps)
        start_step = trainer.resume(resume) if resume else 0
        first = world.rank == 0
        if first:
            config.output_dir.mkdir(parents=True, exist_ok=True)
            config.save(config.output_dir / CONFIG)
        with Reporter(
            config.output_dir, total_steps, start_step=start_step, log=config.log, plot=config.plot, enabled=first
        ) as reporter:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
            reporter.note(
                f"{parameters / 1e6:.1f} M parameters{f' ({frozen:,} frozen)' if frozen else ''}, "
                f"{len(batches.examples)} training rows, {len(held_back)} held back, {total_steps} steps, "
                f"{world.size} rank(s), {config.precision} on {world.device.type}"
            )
            reporter.note(left_out if encoded.too_long else "all rows fit seq_len")
            if config.data == "synthetic":
                reporter.note(
                    f"problems: operands 2 to {config.max_operand}, {config.two_step:.0%} take two steps, "
                    f"{config.three_step:.0%} three, the others one"
                )
            reporter.note(
                "routing: stochastic, as transformers trains Phi-MoE"
                if config.router_noise
                else "routing: deterministic (transformers trains Phi-MoE with the stochastic form: router_noise)"
            )
            unknown = chat.unknown_share(encoded.examples)
            if unknown > 0:
                reporter.note(
                    f"WARNING: {unknown:.1%} of the tokens are unknown to the tokenizer: take the model's own"
                )
            if config.resume == "auto" and resume is None:
                reporter.note(f"resume=auto: no checkpoint in {config.output_dir}, starting from the beginning")
            if resume:
                reporter.note(f"resumed from {resume} after step {start_step}")
            trainer.train(start_step, reporter)
        trainer.save_model(config.output_dir)
        if first:
            print(f"model saved in {config.output_dir}")


class Trainer:
    """One rank's part of a training run."""

    def __init__(
        self,
        config: Config,
        world: core.World,
        model: models.PhiMoE,
        chat: Chat,
        batches: Batches,
        held_back: list[Row],
        total_steps: int,
    ) -> None:
        self.config, self.world, self.chat, self.batches = config, world, chat, batches
        self.held_back, self.total_steps = held_back, total_steps
        self.mesh = core.Mesh(dp=world.size)
        self.model = model.to(world.device)
        self.model.set_recompute(config.recompute)
        self.model.train()
        self.optimizer = assemble.build_optimizer(config, self.model, self.mesh.dp)
        if config.compile:
            self.model.compile_layers()

    def train(self, start_step: int, reporter: Reporter) -> None:
        """All steps after ``start_step``, with the evaluations and checkpoints that are due."""
        config = self.config
        before = self._sample_answer()
        if start_step == 0:
            self._evaluate(0, reporter)
        with core.ledger() as book:
            for step in range(start_step + 1, self.total_steps + 1):
                book.clear()
                reporter.step(self.step(step, book))
                if config.eval_every and step % config.eval_every == 0 and step < self.total_steps:
                    self._evaluate(step, reporter)
                if config.save_every and step % config.save_every == 0:
                    self.save_checkpoint(step)
        if start_step < self.total_steps:
            self._evaluate(self.total_steps, reporter)
        if before is not None:
            question, right = self.held_back[0].prompt[-1].content, self.held_back[0].answer
            reporter.note(f"question: {question}\nbefore:   {before!r}")
            reporter.note(f"after:    {self._sample_answer()!r}\nright:    {right!r}")

    def step(self, step: int, book: core.Ledger) -> StepRecord:
        """One optimizer step, number ``step`` from 1; ``book`` is the open ledger."""
        config, axis, device = self.config, self.mesh.dp, self.world.device
        started = time.perf_counter()
        lr = learning_rate(config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        micro_batches = self.batches.local(step - 1, axis.rank, axis.size, config.microbatches)
        counted = self.batches.label_count(step - 1)
        loss = torch.zeros((), device=device)
        for number, micro in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with nullcontext() if last else self.optimizer.no_sync():
                output = self.model(
                    micro.input_ids.to(device, non_blocking=True),
                    labels=micro.labels.to(device, non_blocking=True),
                    attention_mask=micro.attention_mask,
                    sample_ids=micro.sample_ids.to(device),
                    num_items_in_batch=counted,
                )
                self.optimizer.scale(output.loss).backward()
                loss += output.loss.detach()
        norm = self.optimizer.clip_grad_norm_(math.inf if config.clip is None else config.clip)
        grad_norm = norm.item()  # equal on all ranks, hence so is the decision
        finite = math.isfinite(grad_norm)
        if finite or config.precision == "fp16":  # which skips by itself, and then lowers its loss scale
            self.optimizer.step()
        losses_and_peaks = torch.stack(
            [loss.double(), torch.tensor(float(machine.peak_memory_bytes(device)), dtype=torch.float64, device=device)]
        )
        each = core.all_gather(losses_and_peaks[None], axis, sizes=[1] * axis.size, label="metrics").cpu()
        seconds = time.perf_counter() - started
        tokens = sum(len(example.input_ids) for example in self.batches.batch(step - 1))
        return StepRecord(
            step=step,
            loss=each[:, 0].sum().item(),
            grad_norm=grad_norm,
            lr=lr,
            tokens=counted,
            tokens_per_second=tokens / seconds,
            peak_memory_bytes=int(each[:, 1].max().item()),
            collectives={
                f"{op}/{name}": {"calls": total.calls, "bytes": total.bytes}
                for (op, name), total in book.totals().items()
            },
            skipped=not finite,
            mfu=self._mfu(tokens, seconds),
        )

    def _mfu(self, tokens: int, seconds: float) -> float | None:
        peak = machine.peak_flops(self.world.device)
        if peak is None:
            return None
        length = tokens // self.config.batch_size
        return machine.flops_per_token(self.model.config, length) * tokens / seconds / peak / self.world.size

    def _evaluate(self, step: int, reporter: Reporter) -> None:
        if not self.held_back:
            return
        with self._not_compiled(), zero.gathered(self.model):  # so that ranks may have unequal shares of the questions
            result: Result = evaluate(
                self.model, self.chat, self.held_back, self.mesh.dp, self.config, self.world.device
            )
        reporter.evaluation(step, result.strict, result.flexible, result.total, result.loss)
        if step == 0 and result.total:
            share = answers.commonest_answer_share([row.answer for row in self.held_back])
            reporter.note(f"the commonest answer alone would be right on {share:.1%}")

    def _sample_answer(self) -> str | None:
        """The model's answer to the first held-back question, on all ranks alike."""
        if not self.held_back or not self.config.max_new_tokens:
            return None
        with self._not_compiled(), zero.gathered(self.model):
            [text] = answer(self.model, self.chat, self.held_back[:1], self.config.max_new_tokens, self.world.device)
        return text

    def _not_compiled(self) -> AbstractContextManager[Any]:
        """For answers, in which every token makes other sizes: compiling for them would take longer than they do."""
        return torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()

    def save_checkpoint(self, step: int) -> None:
        """Everything that a resumed run needs, in ``output_dir/checkpoints/step-N``."""
        path = checkpoint_path(self.config.output_dir, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        extra = {
            "step": step,
            "config": self.config.model_dump(mode="json"),
            "model_config": self.model.config.to_dict(),
            "dtype": str(assemble.saved_dtype(self.config)).removeprefix("torch."),
        }
        zero.save(path, self.model, self.optimizer, extra=extra, write_files=self._write_tokenizer)

    def _write_tokenizer(self, folder: Path) -> None:
        self.chat.tokenizer.save_pretrained(folder)
        text = json.dumps(assemble.generation_config(self.chat), indent=2)
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")

    def resume(self, path: Path) -> int:
        """Take weights and optimizer state from a checkpoint; returns its step."""
        try:
            step = int(checkpoint.read_extra(path)["step"])
            zero.load(path, self.model, self.optimizer)
        except (KeyError, ValueError) as error:
            raise InputError(f"resume={path}: {error}") from None
        return step

    def save_model(self, folder: Path) -> None:
        """Leave the weights in Hugging Face form, with the tokenizer; rank 0 writes."""
        weights = zero.full_state_dict(self.model, self.optimizer)
        if self.world.rank == 0:
            dtype = assemble.saved_dtype(self.config)
            pairs = ((name, tensor.to(dtype)) for name, tensor in weights.items())
            models.save_state_dict(pairs, self.model.config, folder)
            self._write_tokenizer(folder)


def _checkpoint_to_resume(config: Config) -> Path | None:
    if config.resume is None:
        return None
    if config.resume == "auto":
        return newest_checkpoint(config.output_dir)
    path = Path(config.resume)
    if not path.is_dir():
        raise InputError(f"resume={path}: no such checkpoint directory (use 'auto' for the newest in output_dir)")
    return path


def _describe(config: Config, chat: Chat, batches: Batches, total_steps: int, left_out: str) -> None:
    """What a run would do, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    model = assemble.training_model(config, chat, meta=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    stage, ranks = STAGES[config.zero], config.dp or 1
    compute, masters = (4, 0) if config.precision == "fp32" else (2, 4)
    frozen = (parameters - trained) * compute // (ranks if stage.divides_parameters else 1)
    state = frozen + stage.state_bytes(trained, ranks, parameter=compute, master=masters)
    tokens = sum(len(example.input_ids) for example in batches.examples)
    print(f"model       {parameters:,} parameters, {trained:,} of them trained")
    print(f"data        {len(batches.examples):,} rows, {tokens:,} tokens; {left_out}")
    print(
        f"steps       {total_steps:,} of {config.batch_size} sequences, about "
        f"{total_steps * config.batch_size * tokens // len(batches.examples):,} tokens"
    )
    print(
        f"layout      dp={config.dp} ranks x {config.microbatches} micro-batch(es) of "
        f"{config.batch_size // ((config.dp or 1) * config.microbatches)} sequences"
    )
    print(f"memory      {state / 2**30:.2f} GiB a rank for weights, gradients and AdamW's moments, activations apart")
    available = machine.available_memory_bytes()
    ranks_here = 1 if torch.cuda.is_available() else config.dp or 1
    if available is not None:
        fits = "fits" if state * ranks_here < available else "does NOT fit"
        print(f"            {available / 2**30:.2f} GiB are free for {ranks_here} rank(s) here: it {fits}")
