"""Experts on one process: ``hatch run bench:python benchmarks/experts.py --output docs/benchmarks``.

Forward and backward of the same tokens, weights and routing, one of each in turn, there and back:

    ours          nanopar_expert.Experts: sort, gather, grouped products, sum per token
    phi-moe       nanopar_models' experts, which are written for Phi-MoE alone
    transformers  MixtralExperts with its grouped_mm implementation
    loop          one expert after the other, weights unbound once, index_add

CPU time of one thread; a ratio is theirs / ours, of medians: above 1 ours is faster. Outputs are compared first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_expert as expert
from nanopar_models import PhiMoEConfig
from nanopar_models.experts import Experts as PhiExperts
from nanopar_sft.tables import pipe_table

# hidden size, width, experts, tokens: the model of ``compare --model moe``, and Phi-tiny-MoE's experts
SHAPES = [(256, 512, 8, 512), (512, 448, 16, 2048)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOP_K = 2


def sides(hidden: int, width: int, count: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    """All with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    ours = expert.Experts(count, hidden, width)
    phi = PhiMoEConfig.preset("nano", hidden_size=hidden, intermediate_size=width, num_local_experts=count)
    config: Any = MixtralConfig(hidden_size=hidden, intermediate_size=width, num_local_experts=count)
    config._experts_implementation = "grouped_mm"
    modules = {"ours": ours, "phi-moe": PhiExperts(phi), "transformers": MixtralExperts(config)}
    modules["loop"] = Loop(count, hidden, width)
    for module in modules.values():
        module.load_state_dict(ours.state_dict())
        module.to(dtype)
    return modules


class Loop(expert.Experts):
    """One product for each expert."""

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        _meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """As the class it takes its weights from."""
        y = torch.zeros_like(hidden_states)
        weights = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        for number, (gate_up, down) in enumerate(weights):
            tokens, places = (top_k_index == number).nonzero(as_tuple=True)
            gate, up = F.linear(hidden_states[tokens], gate_up).chunk(2, 1)
            y = y.index_add(0, tokens, F.linear(F.silu(gate) * up, down) * top_k_weights[tokens, places, None])
        return y


def measure(shape: tuple[int, int, int, int], dtype: torch.dtype, pairs: int) -> dict[str, float]:
    """Milliseconds by side."""
    hidden, width, count, tokens = shape
    modules = sides(hidden, width, count, dtype)
    x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    indices = torch.rand(tokens, count).topk(TOP_K, 1).indices
    weights = torch.rand(tokens, TOP_K).to(dtype).requires_grad_()
    gradient = torch.randn(tokens, hidden).to(dtype)
    right = modules["loop"](x, indices, weights).detach()
    for name, module in modules.items():
        error = (module(x, indices, weights) - right).abs().max() / right.abs().max()
        if error > (0.05 if dtype is torch.bfloat16 else 1e-5):
            raise RuntimeError(f"{name} deviates by {error:.1e}")
    times: dict[str, list[float]] = {name: [] for name in modules}
    for number in range(pairs + 1):
        order = list(modules.items())
        for name, module in order if number % 2 else reversed(order):
            for leaf in (x, weights, *module.parameters()):
                leaf.grad = None
            start = time.process_time()
            module(x, indices, weights).backward(gradient)
            times[name].append(time.process_time() - start)
    return {name: 1000 * statistics.median(taken[1:]) for name, taken in times.items()}  # the first is a warm-up


def main(arguments: list[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, metavar="N", help="timed steps of each [15]")
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory for table and numbers")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    headings = ("dtype", "hidden", "width", "experts", "tokens", "ms", "transformers", "loop", "phi-moe")
    lines: list[list[object]] = []
    rows = []
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            found = measure(shape, dtype, given.pairs)
            ratios = {side: found[side] / found["ours"] for side in ("transformers", "loop", "phi-moe")}
            rows.append({"dtype": name, "shape": shape, "milliseconds": found, "ratios": ratios})
            lines.append([name, *shape, f"{found['ours']:.1f}", *(f"{ratio:.2f}" for ratio in ratios.values())])
            print(*lines[-1], flush=True)
    command = "hatch run bench:python benchmarks/experts.py " + shlex.join(arguments or sys.argv[1:])
    text = "Milliseconds of ours, forward and backward, one thread; the others' time / ours, medians.\n\n"
    text += f"{pipe_table(headings, lines)}\n\n    {command}\n"
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "experts.md").write_text(text)
        (given.output / "experts.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
