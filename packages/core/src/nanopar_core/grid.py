"""Pure arithmetic between axis sizes and ranks: no process group, no torch.

A grid lays the ranks 0..world-1 out row by row over named axes, the last one fastest. For pp=2, dp=2, tp=2:

              tp=0  tp=1
    pp=0 dp=0   0     1        ranks along tp: (0,1) (2,3) (4,5) (6,7)
         dp=1   2     3        ranks along dp: (0,2) (1,3) (4,6) (5,7)
    pp=1 dp=0   4     5        ranks along pp: (0,4) (1,5) (2,6) (3,7)
         dp=1   6     7        ranks along dp and tp together: (0,1,2,3) (4,5,6,7)
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

RankLists = tuple[tuple[int, ...], ...]


def split_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Lengths of ``parts`` consecutive pieces of ``length``, as even as possible, longer ones first: 7, 2 -> (4, 3)."""
    if parts < 1 or length < 0:
        raise ValueError(f"cannot split a length of {length} into {parts} parts")
    short, longer = divmod(length, parts)
    return tuple(short + 1 if part < longer else short for part in range(parts))


def rank_lists(sizes: Mapping[str, int], along: Sequence[str]) -> RankLists:
    """Lists of ranks that differ only along the axes ``along``, one list per position on the other axes.

    ``sizes`` maps axis names to sizes, outer to inner. In each list the last name of ``along`` changes fastest.
    """
    for name in along:
        if name not in sizes:
            raise ValueError(f"no axis {name!r}; the axes are {', '.join(sizes)}")
    names = list(sizes)
    stride = {name: prod(sizes[inner] for inner in names[i + 1 :]) for i, name in enumerate(names)}
    rest = [name for name in names if name not in along]

    def offsets(axes: Sequence[str]) -> list[int]:
        places = product(*(range(sizes[name]) for name in axes))
        return [sum(place * stride[name] for name, place in zip(axes, at, strict=True)) for at in places]

    steps = offsets(along)
    return tuple(tuple(start + step for step in steps) for start in offsets(rest))


def expert_sizes(dense: Mapping[str, int], ep: int, etp: int) -> dict[str, int]:
    """Sizes of the expert view ``pp, dp_replicate, edp, ep, etp`` of the same ranks.

    The ranks of one stage and replica, ``dp * cp * tp`` of them, are laid out anew as ``edp * ep * etp``.

    Raises:
        ValueError: ``etp`` is neither 1 nor tp, or ``ep * etp`` does not divide ``dp * cp * tp``.
    """
    dp, cp, tp = dense["dp"], dense["cp"], dense["tp"]
    if etp not in (1, tp):
        raise ValueError(f"etp={etp} must be 1 or equal to tp={tp}")
    if (dp * cp * tp) % (ep * etp):
        raise ValueError(f"ep={ep} x etp={etp} does not divide dp={dp} x cp={cp} x tp={tp} = {dp * cp * tp} ranks")
    edp = dp * cp * tp // (ep * etp)
    return {"pp": dense["pp"], "dp_replicate": dense["dp_replicate"], "edp": edp, "ep": ep, "etp": etp}
