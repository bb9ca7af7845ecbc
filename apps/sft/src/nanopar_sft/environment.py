"""`nanopar-sft env`: the versions and the hardware that a bug report should name."""

import importlib.metadata
import os
import platform
import sys
import warnings

import torch
import torch.distributed
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanopar_sft.config import Config
from nanopar_sft.launcher import usable_cores

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "safetensors",
    "numpy",
    "pydantic",
    "rich",
    "matplotlib",
)


def run(config: Config) -> None:  # noqa: ARG001 (every command takes the configuration)
    """Print one `name: value` line per fact."""
    for name, value in facts().items():
        print(f"{name:18s}{value}")


def facts() -> dict[str, str]:
    """What distinguishes this machine and this installation from another."""
    found = {"python": f"{platform.python_version()} ({sys.executable})", "platform": platform.platform()}
    ours = sorted({dist.name for dist in importlib.metadata.distributions() if dist.name.startswith("nanopar-")})
    found |= {name: _version(name) for name in (*ours, *LIBRARIES)}
    found["cpu cores"] = f"{usable_cores()} usable of {os.cpu_count()}"
    found["cpu threads"] = f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')})"
    found["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    found["cuda"] = torch.version.cuda or "not in this build of torch"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        found[f"gpu {i}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute {gpu.major}.{gpu.minor}"
    found["collectives"] = _collective_backends()
    found["attention"] = ", ".join(_attention_backends())
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _collective_backends() -> str:
    found = [name for name in ("gloo", "nccl") if torch.distributed.is_backend_available(name)]
    return ", ".join(found) or "none"


def _attention_backends() -> list[str]:
    """The kernels of scaled_dot_product_attention that really run on this machine's device, tried on a tiny input."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.zeros(1, 1, 16, 64, device=device, dtype=torch.bfloat16)
    working = []
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a kernel that does not run says why, kernel by kernel
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            except RuntimeError:
                continue
        working.append(name.lower().removesuffix("_attention"))
    return working
