"""How long a checkpoint makes training wait: ``python benchmarks/saving.py``.

stall    zero.save_in_background on two ranks, stage 1, of weights and AdamW's moments: until it returns
copy     a copy of the same bytes in memory, taken just before
finish   waiting at once for what is being written, to see what the background takes off
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import run

RANKS = 2


def on_rank(folder: str, width: int, layers: int, times: int) -> list[tuple[float, float, float, int]]:
    """Seconds of stall, copy and finish, and bytes of this rank's share."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    axis = core.Mesh(dp=RANKS).dp
    optimizer = zero.shard(model, lambda groups: torch.optim.AdamW(groups, fused=True), axis=axis, stage=1)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.wait()
    found = []
    for _ in range(times):
        share = [shard.masters for shard in optimizer.shards]
        share += [optimizer.state[shard.flat][key] for shard in optimizer.shards for key in ("exp_avg", "exp_avg_sq")]
        moments = [time.perf_counter()]
        copies = [tensor.clone() for tensor in share]
        moments.append(time.perf_counter())
        size = sum(tensor.nbytes for tensor in copies)
        del copies
        moments.append(time.perf_counter())
        saving = zero.save_in_background(Path(folder) / "checkpoint", model, optimizer)
        moments.append(time.perf_counter())
        saving.finish()
        moments.append(time.perf_counter())
        copy, _, stall, finish = (end - start for start, end in pairwise(moments))
        found.append((stall, copy, finish, size))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        [first, *_] = run(RANKS, on_rank, folder, options.width, options.layers, options.times, timeout_s=300)
    stall, copy, finish = (statistics.median(column) for column in list(zip(*first, strict=True))[:3])
    ratio = statistics.median(one[0] / one[1] for one in first)
    print(f"{first[0][3] / 2**20:.1f} MiB a rank: stall {stall:.3f} s, copy {copy:.3f} s, finish {finish:.3f} s")
    print(f"stall / copy: {ratio:.2f} (median of {options.times})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
