"""Long tensors, which the direct reduce_scatter sends in several pieces, against sums in double precision."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nanopar_core as core
from nanopar_core import testing
from nanopar_core.grid import split_sizes

ROWS = 700_003  # of 4 columns on 2 ranks: a part has more than five pieces, the last one short


def of_rank(rank: int, dtype: torch.dtype) -> Tensor:
    """Sixteenths: exact in 16 bits, their sums exact in fp32 and not in 16 bits."""
    values = torch.randint(-128, 128, (ROWS, 4), generator=torch.Generator().manual_seed(rank))
    return (values / 16).to(dtype)


def reduces(dtype: torch.dtype) -> list[Any]:
    """What deviates from the sum over all ranks."""
    size = dist.get_world_size()
    axis = core.Mesh(dp=size).dp
    total = torch.stack([of_rank(rank, dtype).double() for rank in range(size)]).sum(0).to(dtype)
    uneven = [ROWS - (size - 2)] + [1] * (size - 2) + [0]  # all pieces go to rank 0, none to the last
    wrong: list[Any] = []
    for background in (False, True):
        x = of_rank(axis.rank, dtype)
        reduced = core.all_reduce(x, axis, async_op=True).wait() if background else core.all_reduce(x, axis)
        if not torch.equal(reduced, total):
            wrong.append(("all_reduce", background))
        for sizes in (list(split_sizes(ROWS, size)), uneven):
            mine = total.split(sizes)[axis.rank]
            for out in (None, x.clone().split(sizes)[axis.rank]):
                if background:
                    first = core.reduce_scatter(x, axis, sizes=sizes, out=out, async_op=True)
                    second = core.reduce_scatter(2 * x, axis, sizes=sizes)  # overtakes the first, whose parts wait
                    if not torch.equal(second, 2 * mine):
                        wrong.append(("second", sizes))
                    part = first.wait()
                else:
                    part = core.reduce_scatter(x, axis, sizes=sizes, out=out)
                if not torch.equal(part, mine):
                    wrong.append(("reduce_scatter", background, sizes, out is None))
        if not torch.equal(x, of_rank(axis.rank, dtype)):
            wrong.append("the input has changed")
        core.all_reduce(x, axis, out=x)
        if not torch.equal(x, total):
            wrong.append("in place")
    return wrong


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (3, torch.bfloat16)])
def test_pieces_make_up_the_sum(world_size: int, dtype: torch.dtype) -> None:
    assert testing.run(world_size, reduces, dtype) == [[]] * world_size
