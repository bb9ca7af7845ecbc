"""What users see: the public names of every package, its example, its types, and how little an import brings."""

import doctest
import importlib
import json
import subprocess
import sys

import pytest
from tests.rules.sources import FOLDERS, LIBRARIES

# The public names. Adding one is a decision: change this list together with the documentation.
PUBLIC: dict[str, list[str]] = {
    "core": [
        "Axis",
        "Ledger",
        "Mesh",
        "ParamSpec",
        "Pending",
        "Shard",
        "World",
        "all_gather",
        "all_gather_fwd_reduce_scatter_bwd",
        "all_gather_fwd_split_bwd",
        "all_reduce",
        "all_reduce_fwd_all_reduce_bwd",
        "all_reduce_fwd_identity_bwd",
        "all_to_all",
        "all_to_all_fwd_all_to_all_bwd",
        "as_axis",
        "barrier",
        "broadcast",
        "default_specs",
        "gather_objects",
        "global_norm",
        "identity_fwd_all_reduce_bwd",
        "keep_communicated",
        "launch",
        "ledger",
        "merge_specs",
        "reduce_scatter",
        "reduce_scatter_fwd_all_gather_bwd",
        "send_recv",
        "split_fwd_all_gather_bwd",
        "split_sizes",
    ],
    "zero": [
        "LossScale",
        "PrecisionPolicy",
        "ZeroOptimizer",
        "full_gradients",
        "full_state_dict",
        "gathered",
        "load",
        "load_full_state_dict",
        "save",
        "save_in_background",
        "shard",
    ],
    "tensor": [
        "ContextAttention",
        "VocabParallelLoss",
        "cross_entropy",
        "fill",
        "keep_sums",
        "load_parts",
        "merge_sequence",
        "merge_state_dict",
        "parallelize",
        "plan_of",
        "set_sequence_length",
        "split_positions",
        "split_sequence",
        "split_state_dict",
        "whole_sequences",
    ],
    "pipeline": [
        "Action",
        "Runner",
        "Schedule",
        "Stage",
        "Stages",
        "as_chrome_trace",
        "read_csv",
        "schedules",
        "split",
        "write_csv",
        "write_svg",
    ],
    "expert": [
        "BalancingLoss",
        "BiasBalancer",
        "ExpertLoad",
        "Experts",
        "MoE",
        "TopKRouter",
        "dispatchers_of",
        "parallelize",
        "routers_of",
    ],
    "models": [
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
    ],
}

# What the packages promise and do not hold yet: an entry goes when its name comes.
PROMISED_LATER: dict[str, set[str]] = {"zero": {"deepspeed"}}

# What strategies share lives in core; a user of one finds it there too.
FROM_CORE = {"fill", "keep_sums", "load_parts", "merge_state_dict", "split_state_dict"}

# The sub-modules that users import by name.
SUBMODULES = {"core": {"testing", "checkpoint", "verify", "sharding", "loading"}, "pipeline": {"schedules"}}


@pytest.mark.parametrize("package", LIBRARIES)
def test_public_names(package: str) -> None:
    module = importlib.import_module(f"nanopar_{package}")
    assert module.__all__ == sorted(module.__all__)
    assert module.__all__ == PUBLIC[package]
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__doc__, f"{name} has no docstring"
        home = getattr(value, "__module__", None) or value.__name__  # a sub-module has a name only
        own = (f"nanopar_{package}", "nanopar_core") if name in FROM_CORE else f"nanopar_{package}"
        assert home.startswith(own), f"{name} is not this package's own"
    for name in PROMISED_LATER.get(package, ()):
        assert not hasattr(module, name), f"{name} has come: move it to the public names"
    for name in SUBMODULES.get(package, ()):
        assert importlib.import_module(f"nanopar_{package}.{name}").__doc__


@pytest.mark.parametrize("package", FOLDERS)
def test_every_package_explains_itself_and_has_types(package: str) -> None:
    module = importlib.import_module(f"nanopar_{package}")
    assert module.__doc__
    folder = FOLDERS[package] / "src" / f"nanopar_{package}"
    assert (folder / "py.typed").is_file()
    assert (FOLDERS[package] / "README.md").read_text().strip()


@pytest.mark.parametrize("package", [package for package in LIBRARIES if PUBLIC[package]])
def test_the_example_of_every_package_runs(package: str) -> None:
    module = importlib.import_module(f"nanopar_{package}")
    result = doctest.testmod(module)
    assert 2 <= result.attempted <= 10
    assert result.failed == 0


# Each package is imported by an interpreter of its own; it prints the nanopar modules and the heavy ones it got.
LOOK = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.modules if name.startswith("nanopar_") or name in sys.argv[2:]]))
"""
HEAVY = ("transformers", "datasets", "matplotlib", "safetensors", "numpy", "torch._dynamo", "torch.distributed.tensor")


def loaded(package: str, *, watch: tuple[str, ...] = HEAVY) -> set[str]:
    command = [sys.executable, "-c", LOOK, f"nanopar_{package}", *watch]
    return set(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def test_importing_core_brings_neither_testing_nor_checkpoint() -> None:
    names = loaded("core", watch=tuple(name for name in HEAVY if name != "numpy"))  # torch itself imports numpy
    assert not names & {f"nanopar_core.{name}" for name in ("testing", "verify", "checkpoint")}
    assert not names & set(HEAVY)
    assert "nanopar_core.collectives" in names


def test_importing_models_brings_no_other_package() -> None:
    names = loaded("models", watch=("transformers", "huggingface_hub"))
    assert {name.split(".")[0] for name in names} == {"nanopar_models"}
