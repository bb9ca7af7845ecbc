"""The commands of nanopar-sft: what each is for, which module runs it, and whether several ranks take part.

Every module is imported only when its command runs, so that `--help` and a bad key never wait for torch.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from nanopar_sft.config import Config


@dataclass(frozen=True)
class Command:
    """One command: its line in --help, and the module whose `run(config)` does the work."""

    summary: str
    module: str

    def run(self, config: Config) -> None:
        """Do the work; whatever goes wrong is raised."""
        run: Callable[[Config], None] = importlib.import_module(self.module).run
        run(config)


COMMANDS = {
    "train": Command("fine-tune a model, evaluate it before and after, save it", "nanopar_sft.train"),
    "eval": Command("answer held-back problems and count the right answers", "nanopar_sft.evaluate"),
    "generate": Command("answer one question", "nanopar_sft.generate"),
    "data": Command("print rows as tokens with their loss mask, and counts", "nanopar_sft.data"),
    "export": Command("turn a checkpoint into a Hugging Face directory", "nanopar_sft.export"),
    "trace": Command("show one step's collectives by call site, and where its time goes", "nanopar_sft.trace"),
    "verify": Command("check that a layout computes what one process does", "nanopar_sft.verify"),
    "compare": Command("measure strategies side by side, beside peers and arithmetic floors", "nanopar_sft.compare"),
    "env": Command("print versions and hardware, for a bug report (takes no keys)", "nanopar_sft.environment"),
}
