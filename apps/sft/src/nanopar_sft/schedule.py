"""The learning rate as a function of the step alone, so that a resumed run needs no state of it.

lr |   /``-.         cosine, linear, constant after a linear warm-up
   |  /     `-.
   | /         `-.__
   +------------------ step
"""

import math

from nanopar_sft.config import Config


def learning_rate(config: Config, step: int, total_steps: int) -> float:
    """The rate that optimizer step ``step`` (from 1) of ``total_steps`` uses.

    The warm-up reaches ``config.lr`` at its last step; cosine and linear reach 0 one step after the last.
    """
    warmup = config.warmup_steps(total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - 1 - warmup) / max(1, total_steps - warmup)
    if config.lr_schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (1 - progress) if config.lr_schedule == "linear" else config.lr
