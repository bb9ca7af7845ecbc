"""The table of what ``compare`` can measure: nanopar's strategies, the peers, and plain local training.

    name --> Candidate.build(Setup) --> step(batch of all ranks) --> this rank's loss
                                        forward, backward, update; what it sends and when is the candidate's business

A new strategy of nanopar is one line in ``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

import nanopar_core as core
import nanopar_expert as expert
import nanopar_pipeline as pipeline
import nanopar_tensor as tensor
import nanopar_zero as zero
from nanopar_models.loss import next_token_labels
from nanopar_pipeline import schedules
from nanopar_sft import floors, peers, workload
from nanopar_sft.config import nearest
from nanopar_sft.errors import InputError
from nanopar_sft.floors import Needs
from nanopar_sft.setup import Setup, Step, train_on_parts

Kind = Literal["local", "nanopar", "peer"]
LOCAL = "local"


@dataclass(frozen=True)
class Candidate:
    """One row of the comparison.

    Attributes:
        kind: whose it is.
        build: makes model and optimizer on this rank; collective where the strategy is.
        needs: what it cannot do without.
        missing: why it cannot run here, as a package that is not installed; None where it can.
        differs: why its losses are not those of plain training; None where they must be.
    """

    kind: Kind
    build: Callable[[Setup], Step]
    needs: Needs
    missing: Callable[[], str | None] = lambda: None
    differs: str | None = None


def local(setup: Setup) -> Step:
    """This rank's part of the batch, in plain PyTorch, nothing sent: the limit that communication is measured by."""
    model = setup.make_model()
    optimizer = workload.adamw(model.parameters(), setup.fused)

    def step(batch: Tensor) -> Tensor:
        loss = train_on_parts(model, setup.parts(batch))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def zero_stage(stage: int, needs: Needs | None = None, **options: Any) -> Candidate:
    """``nanopar_zero.shard`` at a stage, with further keyword arguments of it; ``needs`` where these change them."""
    return Candidate("nanopar", partial(_zero, stage=stage, options=options), needs or floors.STAGES[stage])


def _zero(setup: Setup, *, stage: int, options: dict[str, Any]) -> Step:
    model = setup.make_model()
    optimizer = zero.shard(
        model,
        lambda groups: workload.adamw(groups, setup.fused),
        axis=setup.axis,
        stage=stage,
        **options,
    )
    # Stages 2 and 3 reduce after every micro-batch: between two of them they keep no whole gradient.
    hold_back = optimizer.no_sync if stage < 2 else nullcontext

    def step(batch: Tensor) -> Tensor:
        loss = train_on_parts(model, setup.parts(batch), hold_back)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()  # else what stages 1 and 2 still gather would be timed with the plain local step that follows
        return loss

    return step


def _tensor(setup: Setup, *, sequence: bool) -> Step:
    """``nanopar_tensor`` over all ranks, every one of which has the whole batch; logits are never put together."""
    model = setup.make_model()
    specs = tensor.parallelize(model, workload.tensor_plan(model), setup.axis, sequence=sequence)
    loss = tensor.VocabParallelLoss(setup.axis)
    here = core.Mesh(tp=setup.axis.size).dp  # of one rank: zero sums what is partial over the others, and updates
    optimizer = zero.shard(model, lambda groups: workload.adamw(groups, setup.fused), axis=here, stage=0, specs=specs)

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        result: Tensor = loss(model(input_ids=ids).logits, next_token_labels(ids))
        return result

    def step(batch: Tensor) -> Tensor:
        total = train_on_parts(model, setup.whole_parts(batch), optimizer.no_sync, loss_of=loss_of)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _expert(setup: Setup, *, stage: int, chunks: int = 1) -> Step:
    """``nanopar_expert`` over all ranks, each with its own sequences; zero has what is not experts."""
    _need_experts(setup)
    mesh, model = core.Mesh(dp=setup.axis.size, ep=setup.axis.size), setup.make_model()
    specs = expert.parallelize(model, None, mesh.ep, data_axis=mesh.edp, chunks=chunks)
    optimizer = zero.shard(
        model, lambda groups: workload.adamw(groups, setup.fused), axis=mesh.dp, stage=stage, specs=specs, reduce="sum"
    )

    def share_of_loss(model: nn.Module, ids: Tensor) -> Tensor:
        return workload.loss_of(model, ids) / mesh.dp.size  # rather than divide every gradient

    def step(batch: Tensor) -> Tensor:
        loss = train_on_parts(model, setup.parts(batch), optimizer.no_sync, loss_of=share_of_loss)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
        return loss * mesh.dp.size

    return step


def _pipeline(setup: Setup, *, name: str, chunks: int) -> Step:
    """``nanopar_pipeline`` over all ranks, every sequence a micro-batch."""
    axis, model = core.Mesh(pp=setup.axis.size).pp, setup.make_model()
    shape = schedules.NAMED[name](axis.size, chunks, 1)
    stages, _ = pipeline.split(model, None, axis, chunks=chunks, placement=shape.placement)
    del model
    optimizer = workload.adamw([p for stage in stages for p in stage.parameters()], setup.fused)
    runners: dict[int, pipeline.Runner] = {}

    def step(batch: Tensor) -> Tensor:
        ids = batch.to(setup.device)
        count = ids.shape[0]
        if count not in runners:
            schedule = schedules.NAMED[name](axis.size, chunks, count)
            runners[count] = pipeline.Runner(stages, schedule, axis, workload.share_of_loss(count))
        loss = runners[count].step({"input_ids": ids}, next_token_labels(ids))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _need_experts(setup: Setup) -> None:
    if setup.model == "dense":
        raise InputError("model=dense: expert parallelism needs a mixture of experts: --model moe")


STRATEGIES: dict[str, Candidate] = {
    "zero0": zero_stage(0),
    "zero1": zero_stage(1),
    "zero2": zero_stage(2),
    "zero3": zero_stage(3),
    "zero3-keep": zero_stage(3, floors.STAGE_3_KEPT, reshard_after_forward=False),
    "ep": Candidate("nanopar", partial(_expert, stage=0), floors.EXPERT),
    **{
        f"pp-{name.replace('_', '-')}": Candidate(
            "nanopar", partial(_pipeline, name=name, chunks=chunks), floors.PIPELINE[chunks]
        )
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1))
    },
    "tp": Candidate("nanopar", partial(_tensor, sequence=False), floors.TENSOR),
    "tp-sp": Candidate("nanopar", partial(_tensor, sequence=True), floors.SEQUENCE),
}
OTHER_NAMES = {"ddp": "zero0"}
PEERS: dict[str, Candidate] = {
    name: Candidate("peer", peer.build, peer.needs, peer.missing, peer.differs) for name, peer in peers.PEERS.items()
}
CANDIDATES: dict[str, Candidate] = {
    LOCAL: Candidate("local", local, floors.NOTHING),
    **STRATEGIES,
    **PEERS,
}


def chosen(strategies: Sequence[str], others: Sequence[str]) -> list[str]:
    """The candidates to measure, in order, each once; plain local training always comes first.

    Raises:
        InputError: a name that does not exist, or that belongs to the other key.
    """
    own = [OTHER_NAMES.get(name, name) for name in strategies or STRATEGIES]
    _check("strategies", own, [LOCAL, *STRATEGIES, *OTHER_NAMES], other=("peers", PEERS))
    _check("peers", others, PEERS, other=("strategies", STRATEGIES))
    return list(dict.fromkeys([LOCAL, *own, *others]))


def _check(key: str, names: Iterable[str], known: Iterable[str], other: tuple[str, Iterable[str]]) -> None:
    known, (other_key, other_names) = list(known), other
    for name in names:
        if name in known:
            continue
        if name in other_names:
            raise InputError(f"{key}={name}: {name} belongs to {other_key}: --{other_key} {name}")
        raise InputError(
            f"{key}={name}: no such name; did you mean {nearest(name, known)}? There are {', '.join(known)}"
        )
