"""The first training batch through transformers: ``python -m nanopar_sft.reference --config RUN/config.yaml``.

A check of the whole path (rows, chat format, loss mask, padding, model, distributed sum) from outside: transformers'
own Phi-MoE, in evaluation mode (deterministic routing), reads the rows of step 1 one by one without padding; their
losses are added up and divided by the number of counted tokens. The result must be the first loss in the run's
``metrics.jsonl``, whatever its ranks and micro-batches.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from nanopar_sft import assemble, metrics
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError


@torch.no_grad()
def first_loss(config: Config) -> float:
    """The loss of the first batch's counted tokens, by transformers, in fp32."""
    changes = {"router_jitter_noise": config.router_jitter_noise, "num_hidden_layers": config.layers}
    shape = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
    shape.update({key: value for key, value in changes.items() if value is not None})
    model = AutoModelForCausalLM.from_pretrained(config.model, config=shape, dtype=torch.float32).eval()
    _, batches = assemble.training_batches(config, assemble.load_chat(config))
    total, counted = 0.0, 0
    for example in batches.batch(0):
        ids, labels = torch.tensor(example.input_ids).long(), torch.tensor(example.labels).long()
        logits = model(ids[None]).logits[0, :-1].double()
        total += F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum").item()
        counted += int((labels[1:] != -100).sum())
    return total / counted


def main() -> int:
    """Print both losses; status 1 where they differ by more than 1e-3."""
    try:
        config = Config.parse(sys.argv[1:])
        if config.model in assemble.PRESETS:
            raise InputError(f"model={config.model}: transformers needs a model directory or hub id")
        reference = first_loss(config)
    except InputError as error:
        print(f"nanopar_sft.reference: error: {error}", file=sys.stderr)
        return 2
    print(f"transformers   {reference:.6f}")
    records = metrics.read(config.output_dir / metrics.METRICS)
    if not records:
        print(f"no run in {config.output_dir} to compare with")
        return 0
    ours = records[0]["loss"]
    print(f"nanopar-sft    {ours:.6f}   first step in {config.output_dir / metrics.METRICS}")
    print(f"difference     {abs(ours - reference):.1e}")
    return 0 if abs(ours - reference) <= 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
