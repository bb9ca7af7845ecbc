"""A README's example, run on ranks of the test harness, where no process group has to be made."""

import re
from typing import Any

LAUNCH = "with core.launch(seed=0) as world:"
LAUNCHED = """
import contextlib, torch.distributed as dist
size = dist.get_world_size() if dist.is_initialized() else 1
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(0)
with contextlib.nullcontext(core.World(rank, size, rank, torch.device("cpu"))) as world:"""


def last_loss(readme: str) -> float:
    """That of the first example."""
    example = re.findall(r"```python\n(import.*?)```", readme, flags=re.DOTALL)[0]
    assert LAUNCH in example
    names: dict[str, Any] = {}
    exec(compile(example.replace(LAUNCH, LAUNCHED), "README.md", "exec"), names)
    loss: float = names["loss"].item()
    return loss
