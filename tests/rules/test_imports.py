"""Who imports whom, what the wheels depend on, and who touches torch's distributed modules."""

import re
import sys
from collections.abc import Iterable

import pytest
from tests.rules.sources import FOLDERS, LIBRARIES, ROOT, project, sources

VERSION = (ROOT / "VERSION").read_text().strip()

# core <- zero, tensor, pipeline, expert      models by itself      all of them <- sft
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "zero": {"core"},
    "tensor": {"core"},
    "pipeline": {"core"},
    "expert": {"core"},
    "models": set(),
    "sft": {"core", "zero", "tensor", "pipeline", "expert", "models"},
}


def siblings(names: Iterable[str], package: str) -> set[str]:
    """The other nanopar packages among dotted names."""
    found = {match[1] for name in names if (match := re.match(r"nanopar_(\w+)", name))}
    return found - {package}


@pytest.mark.parametrize("package", FOLDERS)
def test_who_imports_whom(package: str) -> None:
    for source in sources():
        if source.package == package:
            wrong = siblings(source.imports(), package) - MAY_IMPORT[package]
            assert not wrong, f"{source.where} imports {sorted(wrong)}"
            # nor by name at run time
            dynamic = set(re.findall(r"nanopar_(\w+)", source.strings())) - {package}
            assert package in ("sft", "core") or not dynamic - MAY_IMPORT[package], f"{source.where}: {dynamic}"


def requirements(lines: Iterable[str]) -> dict[str, str]:
    """Distribution name -> the rest of the requirement."""
    return {(match := re.match(r"[\w.-]+", line))[0]: line[match.end() :] for line in lines}  # type: ignore[index, union-attr]


@pytest.mark.parametrize("package", LIBRARIES)
def test_wheels_of_libraries_depend_on_little(package: str) -> None:
    own = {"core": set(), "models": {"safetensors"}}.get(package, {"nanopar-core"})
    assert set(requirements(project(package)["project"]["dependencies"])) == {"torch", *own}


@pytest.mark.parametrize("package", FOLDERS)
def test_what_is_imported_is_declared(package: str) -> None:
    """Imports on a file's first level are dependencies; those inside functions may be extras."""
    table = project(package)["project"]
    needed = requirements(table["dependencies"])
    extras = requirements(line for lines in table.get("optional-dependencies", {}).values() for line in lines)

    def names(distributions: dict[str, str]) -> set[str]:
        brought = {"yaml" for rest in distributions.values() if "[yaml]" in rest}
        modules = {"megatron-core": "megatron"}
        return {modules.get(name, name).replace("-", "_").lower() for name in distributions} | brought

    known = set(sys.stdlib_module_names) | {f"nanopar_{package}"}
    optional_helper = {"transformers"} if package == "models" else set()  # the hub's files, where it is there anyway
    for source in sources():
        if source.package != package:
            continue
        top_level = {name.split(".")[0] for name in source.imports(top_level=True)} - known
        everywhere = {name.split(".")[0] for name in source.imports()} - known
        if source.where != "nanopar_core/checkpoint.py":  # a sub-module with an extra of its own
            assert not top_level - names(needed), f"{source.where}: {top_level - names(needed)}"
        missing = everywhere - names(needed) - names(extras) - optional_helper
        assert not missing, f"{source.where}: {missing}"


@pytest.mark.parametrize("package", FOLDERS)
def test_one_version_for_all(package: str) -> None:
    table = project(package)
    assert "version" not in table["project"]
    assert table["project"]["dynamic"] == ["version"]
    assert (FOLDERS[package] / table["tool"]["hatch"]["version"]["path"]).resolve() == ROOT / "VERSION"
    lines = table["project"]["dependencies"] + [
        line for extra in table["project"].get("optional-dependencies", {}).values() for line in extra
    ]
    for name, rest in requirements(lines).items():
        if name.startswith("nanopar-") and not rest.startswith("["):
            assert rest == f"~={VERSION}", f"{package} asks for {name}{rest}"
    assert [path for path in ROOT.rglob("VERSION") if ".venv" not in path.parts] == [ROOT / "VERSION"]


# ------------------------------------------------------------------------------------- torch's distributed modules

# file -> what it may use of torch.distributed; a name allows everything below it
GROUPS = ("torch.distributed", "torch.distributed.device_mesh", "torch.distributed.rendezvous")
DISTRIBUTED: dict[str, tuple[str, ...]] = {
    "nanopar_core/mesh.py": GROUPS,
    "nanopar_core/collectives.py": GROUPS,
    "nanopar_core/debug.py": GROUPS,
    "nanopar_core/launch.py": GROUPS,
    "nanopar_core/testing.py": GROUPS,
    "nanopar_core/torch_private.py": GROUPS,
    "nanopar_core/checkpoint.py": ("torch.distributed", "torch.distributed.checkpoint"),
    # types in a signature: what a user may pass
    "nanopar_zero/api.py": ("torch.distributed.ProcessGroup", "torch.distributed.device_mesh.DeviceMesh"),
    "nanopar_expert/parallelize.py": ("torch.distributed.ProcessGroup", "torch.distributed.device_mesh.DeviceMesh"),
    "nanopar_tensor/parallelize.py": ("torch.distributed.ProcessGroup", "torch.distributed.device_mesh.DeviceMesh"),
    # torchrun's own launcher, and the list of backends that `env` prints
    "nanopar_sft/launcher.py": ("torch.distributed.elastic", "torch.distributed.launcher"),
    "nanopar_sft/environment.py": ("torch.distributed.is_backend_available",),
    # what `compare` measures nanopar against
    "nanopar_sft/peers.py": ("torch.distributed.fsdp", "torch.distributed.optim"),
    "nanopar_sft/peers_tensor.py": (*GROUPS, "torch.distributed.tensor"),
    "nanopar_sft/peers_pipeline.py": ("torch.distributed.pipelining",),
}
SUBMODULES = (
    "algorithms",
    "autograd",
    "checkpoint",
    "device_mesh",
    "elastic",
    "fsdp",
    "launcher",
    "nn",
    "optim",
    "pipelining",
    "rendezvous",
    "rpc",
    "tensor",
)


def allowed(name: str, rules: tuple[str, ...]) -> bool:
    """Whether a file with these rules may use this dotted name of torch.distributed."""
    for rule in rules:
        if rule == "torch.distributed":  # groups and collectives, none of the modules below
            if name.split(".")[2:3] == [] or name.split(".")[2] not in SUBMODULES:
                return True
        elif f"{name}.".startswith(f"{rule}."):
            return True
    return False


def test_who_touches_torch_distributed() -> None:
    touching = set()
    for source in sources():
        names = {name for name in source.uses() if name.startswith("torch.distributed")}
        # a plain `import torch.distributed` names nothing; what is used of it is among the uses
        names |= {name for name in source.imports() if name.startswith("torch.distributed.")}
        names -= {"torch.distributed"}
        if not names:
            continue
        touching.add(source.where)
        rules = DISTRIBUTED.get(source.where, ())
        wrong = sorted(name for name in names if not allowed(name, rules))
        assert not wrong, f"{source.where} may not use {wrong}: collectives and groups are core's"
    assert touching <= set(DISTRIBUTED)


def test_no_peer_in_the_product() -> None:
    peers = ("torch.nn.parallel", "torch.nn.DataParallel", "torch.distributed.fsdp", "torch.distributed.pipelining")
    for source in sources():
        if source.where in ("nanopar_sft/peers.py", "nanopar_sft/peers_pipeline.py"):
            continue
        wrong = [name for name in (*source.imports(), *source.uses()) if name.startswith(peers)]
        assert not wrong, f"{source.where} uses {wrong}"


def test_torch_private_names_live_in_one_file_per_package() -> None:
    for source in sources():
        if source.where.endswith("/torch_private.py"):
            continue
        wrong = {
            name
            for name in (*source.imports(), *source.uses())
            if name.startswith("torch.") and any(re.match(r"_[a-z]", part) for part in name.split("."))
        }
        assert not wrong, f"{source.where} uses {sorted(wrong)}: move them to torch_private.py"
