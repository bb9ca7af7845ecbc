"""Phi-MoE in plain PyTorch, with the results of transformers' own.

>>> import torch, nanopar_models as models
>>> model = models.PhiMoE(models.PhiMoEConfig.preset("nano"))  # or models.load("microsoft/Phi-tiny-MoE-instruct")
>>> ids = torch.randint(0, model.config.vocab_size, (2, 16))
>>> model(ids, labels=ids).loss.backward()
"""

from nanopar_models.config import PhiMoEConfig as PhiMoEConfig
from nanopar_models.generation import generate as generate
from nanopar_models.init import initial_value as initial_value
from nanopar_models.loss import next_token_labels as next_token_labels
from nanopar_models.noise import CounterNoise as CounterNoise
from nanopar_models.noise import GeneratorNoise as GeneratorNoise
from nanopar_models.phi_moe import PhiMoE as PhiMoE
from nanopar_models.weights import checkpoint_folder as checkpoint_folder
from nanopar_models.weights import load as load
from nanopar_models.weights import load_parts as load_parts
from nanopar_models.weights import opened as opened
from nanopar_models.weights import save as save
from nanopar_models.weights import save_state_dict as save_state_dict

__all__ = [
    "CounterNoise",
    "GeneratorNoise",
    "PhiMoE",
    "PhiMoEConfig",
    "checkpoint_folder",
    "generate",
    "initial_value",
    "load",
    "load_parts",
    "next_token_labels",
    "opened",
    "save",
    "save_state_dict",
]
