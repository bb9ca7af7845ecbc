"""The command ``export``: the weights of a checkpoint as a Hugging Face directory, in one process.

Of the model no more than one file of the directory is in memory at a time.
"""

import shutil
import sys
from pathlib import Path

import torch

import nanopar_models as models
from nanopar_core import checkpoint
from nanopar_models import PhiMoEConfig
from nanopar_sft.checkpoints import checkpoint_of, checkpoint_to_read
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError

NOT_FOR_EXPORT = ("checkpoint.json",)
WEIGHTS = "model."  # how names of weights begin in a checkpoint


def run(config: Config) -> None:
    """Read ``config.resume`` and write ``config.output_dir``."""
    resume = config.resume or ""
    newest = checkpoint_of(resume, config.output_dir)
    path = checkpoint_to_read(resume, config.output_dir, lambda note: print(note, file=sys.stderr))
    if path is None:
        raise InputError(f"resume=auto: no checkpoint in {newest.parent} is whole")
    try:
        step = write_model(path, config.output_dir)
    except KeyError as error:
        raise InputError(f"resume={path}: not written by nanopar-sft train: it has no {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"resume={path}: {error}") from None
    print(f"step {step} of {path} written to {config.output_dir}")


def write_model(path: Path, folder: Path) -> int:
    """Write the weights of a checkpoint of ours, and what was saved beside them; returns its step.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is not one of ours, or damaged.
    """
    extra = checkpoint.read_extra(path)
    shape, dtype = PhiMoEConfig.from_dict(extra["model_config"]), getattr(torch, extra["dtype"])
    with checkpoint.reading(path) as stored:
        pairs = (
            (name.removeprefix(WEIGHTS), tensor.read().to(dtype))
            for name, tensor in stored.items()
            if name.startswith(WEIGHTS)
        )
        models.save_state_dict(pairs, shape, folder)
    for file in path.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in NOT_FOR_EXPORT:
            shutil.copy(file, folder / file.name)
    return int(extra["step"])
