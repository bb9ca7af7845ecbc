"""The files that start runs on several machines: their syntax, and the commands in them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from nanopar_models import PhiMoEConfig
from nanopar_sft import layout
from nanopar_sft.config import Config

FOLDER = Path(__file__).parents[2] / "apps" / "sft" / "launch"
MODEL = PhiMoEConfig.preset("phi-tiny-moe")


def check(arguments: list[str], ranks: int) -> None:
    """The keys exist, and the published model can be divided so."""
    config = Config.parse(arguments).resolve("train", ranks)
    assert config.resume == "auto"
    assert config.save_every is not None
    assert layout.problem(config.layout(), MODEL, config.batch_size, config.seq_len) is None


def test_slurm() -> None:
    text = (FOLDER / "slurm.sbatch").read_text()
    if (bash := shutil.which("bash")) is None:
        pytest.skip("needs bash")
    subprocess.run([bash, "-n", str(FOLDER / "slurm.sbatch")], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    ranks = int(options["nodes"]) * int(options["gpus-per-node"])
    assert re.search(r"^NPROC=(\d+)$", text, re.MULTILINE)[1] == options["gpus-per-node"]  # type: ignore[index]
    command = text.partition("nanopar_sft train")[2].replace("\\\n", " ").replace('"$RUN_DIR" &', "out")
    command = command.partition("RUN=")[0]
    check(command.split(), ranks)


def test_kubernetes() -> None:
    job = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    assert job["kind"] == "PyTorchJob"
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    [container] = worker["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    assert job["spec"]["elasticPolicy"]["minReplicas"] == worker["replicas"]
    torchrun, shutdown, _, module, command, *arguments = container["command"]
    assert (torchrun, module, command) == ("torchrun", "nanopar_sft", "train")
    assert int(shutdown.partition("=")[2]) < worker["template"]["spec"]["terminationGracePeriodSeconds"]
    check(arguments, worker["replicas"] * int(job["spec"]["nprocPerNode"]))
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in worker["template"]["spec"]["volumes"]}
