"""What stands for ``core.launch`` where the README's examples run on ranks of the test harness."""

CONTEXT = """
import contextlib, torch.distributed as dist
size = dist.get_world_size() if dist.is_initialized() else 1
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(0)
with contextlib.nullcontext(core.World(rank, size, rank, torch.device("cpu"))) as world:"""
