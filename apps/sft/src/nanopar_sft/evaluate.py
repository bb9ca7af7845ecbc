"""Held-back problems: the loss of their reference answers, and how many answers of the model's own are right.

    rows, longest prompt first --> dealt over the N ranks of dp_replicate, dp and cp (row i to rank i mod N)
      loss: reference answer fed in        --> sum and count of answer tokens --.
      answers: greedy, key/value cache,    --> right (strict, flexible), total -+--> one all-reduce --> Result
               until a stop token                                              -'

Every row is counted exactly once whatever the layout; all ranks take part and get the same result. Ranks of tp and pp
work on the same rows together. Where experts lie on other ranks all ranks go on until the last one has ended, on a row
that is not counted if need be.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track

import nanopar_core as core
import nanopar_models as models
from nanopar_sft import answers, assemble, machine
from nanopar_sft.batches import MicroBatch, collate
from nanopar_sft.chat import IGNORED, Chat
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.parallel import ParallelModel
from nanopar_sft.rows import Row

RESULT = "eval.json"
NO_ROWS = MicroBatch(*(torch.full((1, 2), value) for value in (0, IGNORED, 0, 0, 0)))  # padding only


@dataclass(frozen=True)
class Result:
    """An evaluation, equal on all ranks.

    Attributes:
        loss: mean over the counted tokens of the reference answers; NaN where no row fits ``seq_len``.
        strict: answers whose number after "####" is right.
        flexible: answers whose last number is right.
        total: answers given; 0 with max_new_tokens=0.
    """

    loss: float
    strict: int
    flexible: int
    total: int


def evaluate(
    parallel: ParallelModel,
    chat: Chat,
    rows: Sequence[Row],
    config: Config,
    device: torch.device,
    *,
    progress: bool = False,
) -> Result:
    """Evaluate on all ranks together, within ``parallel.whole()``; ``progress``: the first one shows a bar."""
    axis = parallel.axes.everyone_with_data
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].prompt[-1].content))
    mine = [rows[index] for index in order[axis.rank :: axis.size]]
    size = max(1, config.batch_size // axis.size)
    batches = [mine[first : first + size] for first in range(0, len(mine), size)]
    if parallel.in_step:  # the first rank has the most rows
        batches += [[] for _ in range(math.ceil(len(order[:: axis.size]) / size) - len(batches))]
    sums = torch.zeros(5, dtype=torch.float64)
    shown = track(
        batches,
        description="evaluating",
        console=Console(stderr=True),
        transient=True,
        disable=not progress or parallel.axes.world.rank != 0 or not sys.stderr.isatty(),
    )
    for batch in shown:
        sums[:2] += _loss(parallel, chat, batch, config.seq_len, device)
        if config.max_new_tokens:
            texts = answer(parallel, chat, batch or rows[:1], config.max_new_tokens, device)
            scores = [answers.score(text, row.answer) for text, row in zip(texts, batch, strict=False)]
            right = sum(score.strict for score in scores), sum(score.flexible for score in scores)
            sums[2:] += torch.tensor([*right, len(scores)])
    loss, tokens, strict, flexible, total = core.all_reduce(sums.to(device), axis, label="evaluation").tolist()
    return Result(loss / tokens if tokens else math.nan, int(strict), int(flexible), int(total))


def _loss(parallel: ParallelModel, chat: Chat, rows: Sequence[Row], seq_len: int, device: torch.device) -> torch.Tensor:
    """[2]: the summed loss of the reference answers that fit, and their number of counted tokens."""
    examples = [example for example in chat.encode(rows, sys.maxsize).examples if len(example.input_ids) <= seq_len]
    if not examples and not parallel.in_step:
        return torch.zeros(2, dtype=torch.float64)
    batch = collate(examples, range(len(examples))) if examples else NO_ROWS
    loss = parallel.sum_of_losses(batch, device)
    return torch.tensor([loss.item(), sum(example.label_count for example in examples)], dtype=torch.float64)


def answer(
    parallel: ParallelModel, chat: Chat, rows: Sequence[Row], max_new_tokens: int, device: torch.device
) -> list[str]:
    """The model's own answers to the rows' prompts, greedily; within ``parallel.whole()``."""
    prompts = [chat.encode_prompt(row.prompt) for row in rows]
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):  # padded on the left
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    pad = chat.tokenizer.pad_token_id
    new = models.generate(
        parallel.model,
        ids.to(device),
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        stop_ids=sorted(chat.stop_ids),
        pad_id=0 if pad is None else pad,
        next_logits=parallel.next_logits,
        is_over=parallel.is_over,
    )
    return [chat.decode(tokens) for tokens in new.tolist()]


def run(config: Config) -> None:
    """The command ``eval``: prints one JSON line, and writes it to ``output_dir/eval.json``."""
    machine.set_threads(config.threads)
    chat = assemble.load_chat(config)
    rows = assemble.test_rows(config)
    if any(answers.reference_answer(row.answer) is None for row in rows):
        where = next(row.where for row in rows if answers.reference_answer(row.answer) is None)
        raise InputError(f"{where}: the answer holds no number to compare with")
    model = assemble.model_to_answer(config, chat)
    with core.launch(timeout_s=config.timeout_s, seed=config.seed) as world:
        parallel = assemble.build_parallel(config, model)
        assemble.answer_in(config, parallel, world.device)
        with parallel.whole():
            result = evaluate(parallel, chat, rows, config, world.device, progress=True)
    if world.rank == 0:
        references = [row.answer for row in rows]
        line = json.dumps(
            {
                "accuracy": result.strict / max(1, result.total),
                "correct": result.strict,
                "total": result.total,
                "flexible_accuracy": result.flexible / max(1, result.total),
                "flexible_correct": result.flexible,
                "commonest_answer": answers.commonest_answer_share(references),
                "loss": None if math.isnan(result.loss) else result.loss,
            }
        )
        config.output_dir.mkdir(parents=True, exist_ok=True)
        (config.output_dir / RESULT).write_text(line + "\n", encoding="utf-8")
        print(line)
