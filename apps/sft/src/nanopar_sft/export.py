"""The command ``export``: the weights of a checkpoint as a Hugging Face directory, in one process."""

import shutil
from pathlib import Path

import torch

import nanopar_models as models
from nanopar_core import checkpoint
from nanopar_models import PhiMoEConfig
from nanopar_sft.checkpoints import newest_checkpoint
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError

NOT_FOR_EXPORT = ("checkpoint.json",)


def run(config: Config) -> None:
    """Read ``config.resume`` and write ``config.output_dir``."""
    path = Path(config.resume or "")
    if config.resume == "auto":
        newest = newest_checkpoint(config.output_dir)
        if newest is None:
            raise InputError(f"resume=auto: there is no checkpoint in {config.output_dir}")
        path = newest
    try:
        stored = checkpoint.describe(path)
        extra = checkpoint.read_extra(path)
        shape, dtype = PhiMoEConfig.from_dict(extra["model_config"]), getattr(torch, extra["dtype"])
        weights = {
            name.removeprefix("model."): torch.empty_like(tensor, device="cpu")
            for name, tensor in stored.items()
            if name.startswith("model.")
        }
        checkpoint.load(path, {f"model.{name}": tensor for name, tensor in weights.items()})
    except (AttributeError, KeyError, ValueError) as error:
        raise InputError(f"resume={path}: {error}") from None
    pairs = ((name, tensor.to(dtype)) for name, tensor in weights.items())
    models.save_state_dict(pairs, shape, config.output_dir)
    for file in path.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in NOT_FOR_EXPORT:
            shutil.copy(file, config.output_dir / file.name)
    print(f"step {extra['step']} of {path} written to {config.output_dir}")
