"""How much memory the state of training takes on the fullest rank of a layout, worked out beforehand."""

from __future__ import annotations

from nanopar_core import Axis
from nanopar_models import PhiMoE
from nanopar_pipeline import split
from nanopar_sft.config import TWO_STAGES, Config
from nanopar_sft.layout import Layout
from nanopar_zero.stages import STAGES


def state_bytes(config: Config, model: PhiMoE) -> int:
    """Weights, gradients, masters and AdamW's moments on the rank with the most of them; activations apart."""
    layout = config.layout()
    return max(_of_stages(config, layout, names, model) for names in names_by_stage(config, model))


def names_by_stage(config: Config, model: PhiMoE) -> list[set[str]]:
    """The parameters that each rank of the pipeline has."""
    layout = config.layout()
    if layout.pp == 1:
        return [{name for name, _ in model.named_parameters()}]
    placement = "v" if config.schedule in TWO_STAGES else "loop"
    names = []
    for rank in range(layout.pp):
        axis = Axis("pp", layout.pp, rank, None, (tuple(range(layout.pp)),), communicates=False)
        stages, _ = split(model, None, axis, chunks=layout.chunks, placement=placement)
        names.append({name for stage in stages for name, _ in stage.named_parameters()})
    return names


def _of_stages(config: Config, layout: Layout, names: set[str], model: PhiMoE) -> int:
    compute, masters = {"fp64": (8, 0), "fp32": (4, 0)}.get(config.precision, (2, 4))
    kv = model.config.num_key_value_heads
    stage, total = STAGES[config.zero], 0.0
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        is_expert = ".experts." in name
        parts = layout.ep * layout.etp if is_expert else layout.tp if _is_divided(name) else 1
        parts = min(parts, kv) if ".k_proj." in name or ".v_proj." in name else parts  # heads that several ranks have
        ranks = layout.edp if is_expert else layout.dp * layout.cp
        size = parameter.numel() / parts
        if parameter.requires_grad:
            total += stage.state_bytes(round(size), ranks, parameter=compute, master=masters)
        else:
            total += size * compute / (ranks if stage.divides_parameters else 1)
    return round(total)


def _is_divided(name: str) -> bool:
    """By tensor parallelism, experts apart."""
    return "norm" not in name and ".router." not in name and not name.endswith("o_proj.bias")
