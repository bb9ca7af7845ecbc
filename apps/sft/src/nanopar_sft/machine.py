"""What the app asks of the machine: threads, memory, and how fast the hardware could be."""

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

import nanopar_models as models

# Dense bf16 peak, FLOP/s, from the makers' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX A5000": 111e12}


def description() -> dict[str, Any]:
    """What published figures must name: processor, cores, memory, GPUs, and how busy the machine was."""
    cpu = platform.processor()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "platform": platform.platform(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "load_average": round(os.getloadavg()[0], 2),
    }


def set_threads(threads: int | None) -> None:
    """Use so many CPU threads in this process; by default the cores divided by the local ranks."""
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return  # the launcher, or the user, has decided
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_ranks))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has used: on CUDA the allocator's peak, else the resident set's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory_bytes() -> int | None:
    """Memory that new processes could use on this machine's GPU, or in its main memory; None where nobody says."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 peak in FLOP/s; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def flops_per_token(shape: models.PhiMoEConfig, length: int) -> float:
    """FLOPs of forward and backward per token of a sequence of ``length``: 6 per active weight, 6 per attended pair.

    As in "PaLM" (Chowdhery et al. 2022, appendix B), with two experts active per token and causal attention.
    """
    d, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    attention = d * (2 * heads + 2 * shape.num_key_value_heads * shape.head_dim)
    experts = shape.num_experts_per_tok * 3 * d * shape.intermediate_size + d * shape.num_local_experts
    pairs = 2 * heads * min(length, shape.sliding_window or length) / 2
    return 6 * (shape.num_hidden_layers * (attention + experts + pairs) + d * shape.vocab_size)
