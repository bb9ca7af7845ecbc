"""The command ``generate``: one answer, printed as it is written."""

import sys

import torch
from torch import Tensor

import nanopar_core as core
import nanopar_models as models
from nanopar_sft import assemble, machine
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.rows import Message


def run(config: Config) -> None:
    """Answer ``config.prompt``; greedy with temperature 0, else sampled with ``config.seed``."""
    machine.set_threads(config.threads)
    chat = assemble.load_chat(config)
    model = assemble.model_to_answer(config, chat)
    prompt = chat.encode_prompt([Message("user", config.prompt or "")])
    room = model.config.max_position_embeddings - len(prompt)
    if config.max_new_tokens > room:
        raise InputError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={config.max_new_tokens} do not fit the model's "
            f"{model.config.max_position_embeddings} positions"
        )
    with core.launch(timeout_s=config.timeout_s, seed=config.seed) as world:
        parallel = assemble.build_parallel(config, model)
        assemble.answer_in(config, parallel, world.device)
        written: list[int] = []
        shown = ""

        def show(token: Tensor) -> None:
            nonlocal shown
            if world.rank:
                return
            written.append(int(token))
            text = chat.decode(written)
            if not text.endswith("\ufffd"):  # the first bytes of a character
                print(text[len(shown) :], end="", flush=True)
                shown = text

        with parallel.whole():
            models.generate(
                model,
                torch.tensor([prompt], device=world.device),
                max_new_tokens=config.max_new_tokens,
                stop_ids=sorted(chat.stop_ids),
                temperature=config.temperature,
                top_p=config.top_p if config.top_p < 1 else None,
                generator=torch.Generator(world.device).manual_seed(config.seed),
                on_token=show,
                next_logits=parallel.next_logits,
                is_over=parallel.is_over,
            )
        if world.rank == 0:
            print(chat.decode(written)[len(shown) :])
            sys.stdout.flush()
