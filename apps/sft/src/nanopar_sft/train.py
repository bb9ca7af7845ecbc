"""The training loop.

    rows -> Batches ---------- micro-batches of this rank ----.
    model -> parallel.py: in its layout, with its optimizer   v
    each step:  forward, backward (gradients travel meanwhile) -> norm, clip -> finite? -> step -> record

The order of a step: the tokens that count are known from the batch, which every rank knows whole; forward and backward
of the micro-batches; gradients reduced; norm and clip; a step whose norm is not finite, which clipping leaves alone, is
skipped by all ranks together; update. The learning rate follows the number of the step, skipped ones included.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import nanopar_core as core
import nanopar_models as models
import nanopar_zero as zero
from nanopar_core import checkpoint
from nanopar_core.checkpoint import Saving
from nanopar_sft import answers, assemble, export, machine
from nanopar_sft.batches import Batches
from nanopar_sft.chat import Chat
from nanopar_sft.checkpoints import checkpoint_path, checkpoint_to_read, remove_old, set_aside
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.evaluate import Result, answer, evaluate
from nanopar_sft.footprint import state_bytes
from nanopar_sft.metrics import StepRecord
from nanopar_sft.report import Reporter
from nanopar_sft.rows import Row
from nanopar_sft.schedule import learning_rate

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
    model = assemble.model_to_train(config, chat)
    with core.launch(timeout_s=config.timeout_s, seed=config.seed) as world:
        first = world.rank == 0
        notes: list[str] = []
        resume = _checkpoint_to_resume(config, notes.append)
        trainer = Trainer(config, world, model, chat, batches, held_back, total_steps)
        start_step = trainer.resume(resume) if resume else 0
        if first:
            config.output_dir.mkdir(parents=True, exist_ok=True)
            config.save(config.output_dir / CONFIG)
        with Reporter(
            config.output_dir, total_steps, start_step=start_step, log=config.log, plot=config.plot, enabled=first
        ) as reporter:
            reporter.note(
                f"{trainer.parameters / 1e6:.1f} M parameters"
                f"{f' ({trainer.frozen:,} frozen)' if trainer.frozen else ''}, "
                f"{len(batches.examples)} training rows, {len(held_back)} held back, {total_steps} steps, "
                f"{world.size} rank(s), {config.precision} on {world.device.type}"
            )
            if world.size > 1:
                reporter.note(trainer.description)
            if first:
                notes += [f"set aside: {path}" for path in set_aside(config.output_dir, start_step)]
            for note in notes:
                reporter.note(note)
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
            is_done = trainer.train(start_step, reporter)
        if is_done and first:
            print(f"model saved in {config.output_dir}")
    if not is_done:
        sys.exit(128 + signal.SIGTERM)


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
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        groups = assemble.parameter_groups(model, config.weight_decay)
        self.parallel = assemble.build_parallel(config, model)
        assemble.train_in(config, self.parallel, groups, world.device)
        assert self.parallel.optimizer is not None
        self.model, self.optimizer = model.train(), self.parallel.optimizer
        self._saving: Saving | None = None
        self._all_written = self._stop_requested = self._is_stopping = False
        if config.compile:
            self.model.compile_layers()

    @property
    def description(self) -> str:
        """The layout, in a line."""
        layout, text = self.parallel.layout, f"layout: {self.parallel.layout}, zero={self.config.zero}"
        if layout.pp > 1:
            bubble = self.parallel.bubble
            text += (
                f"; pipeline {self.config.schedule}, {bubble:.0%} of it idle with {layout.microbatches} micro-batches"
            )
        return text

    def train(self, start_step: int, reporter: Reporter) -> bool:
        """All steps after ``start_step``, with the evaluations and checkpoints that are due.

        Returns:
            False where SIGTERM has ended it before the last step; a checkpoint is written then.
        """
        config = self.config
        before = self._sample_answer()
        if start_step == 0:
            self._evaluate(0, reporter)
        with core.ledger() as book, self._stopping_on_sigterm():
            for step in range(start_step + 1, self.total_steps + 1):
                book.clear()
                reporter.step(self.step(step, book))
                self._publish_if_written(reporter)
                is_due = config.eval_every and step % config.eval_every == 0
                if is_due and step < self.total_steps and not self._is_stopping:
                    self._evaluate(step, reporter)
                if self._is_stopping or (config.save_every and step % config.save_every == 0):
                    self.save_checkpoint(step, reporter)
                if self._is_stopping and step < self.total_steps:
                    self._publish(reporter)
                    reporter.note(f"stopped by SIGTERM after step {step}; go on with --resume auto")
                    return False
            self._publish(reporter)
        self.save_model(config.output_dir)  # before anything that takes long, or can fail
        if start_step < self.total_steps:
            self._evaluate(self.total_steps, reporter)
        if before is not None:
            question, right = self.held_back[0].prompt[-1].content, self.held_back[0].answer
            reporter.note(f"question: {question}\nbefore:   {before!r}")
            reporter.note(f"after:    {self._sample_answer()!r}\nright:    {right!r}")
        return True

    def step(self, step: int, book: core.Ledger) -> StepRecord:
        """One optimizer step, number ``step`` from 1; ``book`` is the open ledger."""
        config, parallel, device = self.config, self.parallel, self.world.device
        mesh = parallel.mesh
        started = time.perf_counter()
        lr = learning_rate(config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        micro_batches = parallel.micro_batches(self.batches, step - 1, config.seq_len if config.packing else 0)
        counted = self.batches.label_count(step - 1)
        loss = parallel.forward_backward(micro_batches, counted, device)
        norm = self.optimizer.clip_grad_norm_(math.inf if config.clip is None else config.clip)
        grad_norm = norm.item()  # equal on all ranks, hence so is the decision
        finite = math.isfinite(grad_norm)
        if finite or config.precision == "fp16":  # which skips by itself, and then lowers its loss scale
            self.optimizer.step()
        has_share = mesh.tp.rank == 0 and mesh.pp.rank == 0  # which the ranks of tp and pp have alike
        is_written = self._saving is not None and self._saving.is_written
        numbers = [float(machine.peak_memory_bytes(device)), float(is_written), float(self._stop_requested)]
        mine = torch.cat([loss.double().view(1) * has_share, torch.tensor(numbers, dtype=torch.float64, device=device)])
        everyone = parallel.axes.world
        each = core.all_gather(mine[None], everyone, sizes=[1] * everyone.size, label="metrics").cpu()
        self._all_written, self._is_stopping = bool(each[:, 2].all()), bool(each[:, 3].any())
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
        with self._not_compiled(), self.parallel.whole():
            result: Result = evaluate(self.parallel, self.chat, self.held_back, self.config, self.world.device)
        reporter.evaluation(step, result.strict, result.flexible, result.total, result.loss)
        if step == 0 and result.total:
            share = answers.commonest_answer_share([row.answer for row in self.held_back])
            reporter.note(f"the commonest answer alone would be right on {share:.1%}")

    def _sample_answer(self) -> str | None:
        """The model's answer to the first held-back question, on all ranks alike."""
        if not self.held_back or not self.config.max_new_tokens:
            return None
        with self._not_compiled(), self.parallel.whole():
            [text] = answer(self.parallel, self.chat, self.held_back[:1], self.config.max_new_tokens, self.world.device)
        return text

    def _not_compiled(self) -> AbstractContextManager[Any]:
        """For answers, in which every token makes other sizes: compiling for them would take longer than they do."""
        return torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, step: int, reporter: Reporter) -> None:
        """Everything that a resumed run needs, in ``output_dir/checkpoints/step-N``; written while training goes on."""
        self._publish(reporter)
        path = checkpoint_path(self.config.output_dir, step)
        self._saving = zero.save_in_background(
            path, self.parallel.part, self.optimizer, extra=self._about(step), write_files=self._write_tokenizer
        )

    def _about(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "config": self.config.model_dump(mode="json"),
            "model_config": self.model.config.to_dict(),
            "dtype": str(assemble.saved_dtype(self.config)).removeprefix("torch."),
        }

    def _publish_if_written(self, reporter: Reporter) -> None:
        """Once all ranks have written their parts, as the last step's metrics say."""
        if self._saving is not None and self._all_written:
            self._publish(reporter)

    def _publish(self, reporter: Reporter) -> None:
        """Give the checkpoint that is being written its name; a failure is told, and training goes on."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            saving.finish()
        except RuntimeError as error:
            reporter.note(f"WARNING: {error}; training goes on, earlier checkpoints are as they were")
            return
        if self.world.rank == 0:
            remove_old(saving.path, self.config.keep)

    @contextmanager
    def _stopping_on_sigterm(self) -> Iterator[None]:
        """SIGTERM asks all ranks to save and stop after the step that runs."""
        self._stop_requested = False

        def stop(*_: object) -> None:
            self._stop_requested = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _write_tokenizer(self, folder: Path) -> None:
        self.chat.tokenizer.save_pretrained(folder)
        text = json.dumps(assemble.generation_config(self.chat), indent=2)
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")

    def resume(self, path: Path) -> int:
        """Take weights and optimizer state from a checkpoint; returns its step. Options of AdamW are the keys' own."""
        options = [{key: group[key] for key in ("weight_decay", "betas")} for group in self.optimizer.param_groups]
        try:
            step = int(checkpoint.read_extra(path)["step"])
            zero.load(path, self.parallel.part, self.optimizer)
        except KeyError as error:
            raise InputError(f"resume={path}: not written by nanopar-sft train: it has no {error}") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"resume={path}: {error}") from None
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update(own)
        if step > self.total_steps:
            raise InputError(f"resume={path}: it is of step {step}, after the last one: use more steps than {step}")
        return step

    def save_model(self, folder: Path) -> None:
        """Leave the weights in Hugging Face form, with the tokenizer; no rank ever has them all in memory."""
        scratch = folder / ".weights"
        zero.save(
            scratch,
            self.parallel.part,
            self.optimizer,
            extra=self._about(self.total_steps),
            write_files=self._write_tokenizer,
            only_weights=True,
        )
        if self.world.rank == 0:
            export.write_model(scratch, folder)
            shutil.rmtree(scratch)


def _checkpoint_to_resume(config: Config, note: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from; called on all ranks."""
    return None if config.resume is None else checkpoint_to_read(config.resume, config.output_dir, note)


def _describe(config: Config, chat: Chat, batches: Batches, total_steps: int, left_out: str) -> None:
    """What a run would do, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    model = assemble.model_to_train(config, chat)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layout = config.layout()
    state = state_bytes(config, model)
    tokens = sum(len(example.input_ids) for example in batches.examples)
    print(f"model       {parameters:,} parameters, {trained:,} of them trained")
    print(f"data        {len(batches.examples):,} rows, {tokens:,} tokens; {left_out}")
    print(
        f"steps       {total_steps:,} of {config.batch_size} sequences, about "
        f"{total_steps * config.batch_size * tokens // len(batches.examples):,} tokens"
    )
    print(
        f"layout      {layout}; {layout.batches} batch(es) of {config.microbatches} micro-batch(es) of "
        f"{config.batch_size // (layout.batches * config.microbatches)} sequences"
    )
    print(f"memory      {state / 2**30:.2f} GiB a rank for weights, gradients and AdamW's moments, activations apart")
    available = machine.available_memory_bytes()
    ranks_here = 1 if torch.cuda.is_available() else int(os.environ.get("LOCAL_WORLD_SIZE", layout.ranks))
    if available is not None:
        fits = "fits" if state * ranks_here < available else "does NOT fit"
        print(f"            {available / 2**30:.2f} GiB are free for {ranks_here} rank(s) here: it {fits}")
