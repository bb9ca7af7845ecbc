"""The expert-parallel peers of ``compare`` train what they say: losses of one plain process with the same routing."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_core as core
import nanopar_models as models
from nanopar_core.testing import assert_parity, run
from nanopar_sft import floors, peers, peers_expert, tables, workload
from nanopar_sft.candidates import CANDIDATES
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.figures import Row, row_of
from nanopar_sft.measure import Clock, Report
from nanopar_sft.setup import Setup, train_on_parts

RANKS, SEQUENCES, LENGTH, STEPS = 2, 4, 16, 4
NAMES = ("megatron-ep", "deepspeed-moe")


class BestTwo(nn.Module):
    """Softmax over all experts, the best two, weights that sum to one; with a capacity, what comes later is left out.

    As in GShard (arXiv 2006.16668, algorithm 1): an expert's places go to all first choices before any second one.
    """

    def __init__(self, router: nn.Module, capacity: float | None) -> None:
        super().__init__()
        self.weight, self.capacity, self.left_out = router.weight, capacity, 0

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores_TE = F.linear(x_TD, self.weight)  # type: ignore[arg-type]
        weights_T2, indices_T2 = scores_TE.softmax(1).topk(2, 1)
        if self.capacity is not None:
            tokens, experts = scores_TE.shape
            chosen = F.one_hot(indices_T2.T.flatten(), experts)
            places = (chosen.cumsum(0) * chosen).sum(1)  # 1, 2, .. among those that chose the same expert
            taken = places <= math.ceil(tokens / experts * 2 * self.capacity)
            self.left_out += int((~taken).sum())
            weights_T2 = weights_T2 * taken.view(2, tokens).T
        total = weights_T2.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
        return scores_TE, weights_T2 / total, indices_T2


def batch(number: int) -> Tensor:
    return workload.batch(number, SEQUENCES, LENGTH, models.PhiMoEConfig.preset("nano").vocab_size)


def plain_losses(capacity: float | None, parts: int) -> tuple[list[float], int]:
    """Of one process that knows nothing of ranks, with the batch in ``parts``; and how many choices were left out."""
    model = workload.build_model("nano")
    routers = []
    for block in model.model.layers:  # type: ignore[union-attr]
        block.mlp.router = BestTwo(block.mlp.router, capacity)
        routers.append(block.mlp.router)
    optimizer = workload.adamw(model.parameters(), True)
    losses = []
    for number in range(STEPS):
        losses.append(train_on_parts(model, batch(number).chunk(parts)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, sum(router.left_out for router in routers)


def peer_losses(name: str, microbatches: int) -> list[float]:
    """On one rank. Built twice in one process, as ``compare`` does."""
    setup = Setup("nano", core.Mesh(dp=RANKS).dp, torch.device("cpu"), microbatches, True)
    peers.PEERS[name].build(setup)
    step = peers.PEERS[name].build(setup)
    return [step(batch(number)).item() for number in range(STEPS)]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_plain_training_with_the_same_routing(name: str, microbatches: int) -> None:
    missing = peers.PEERS[name].missing()
    if missing is not None:
        pytest.skip(missing)
    capacity = peers_expert.CAPACITY if name == "deepspeed-moe" else None
    expected, left_out = plain_losses(capacity, RANKS * microbatches)
    assert (left_out > 0) == (capacity is not None)
    of_ranks = torch.tensor(run(RANKS, peer_losses, name, microbatches))
    assert not torch.equal(*of_ranks)  # each has its own sequences
    assert_parity({"losses": torch.tensor(expected)}, {"losses": of_ranks.mean(0)}, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_another_router_are_not_compared(name: str) -> None:
    candidate = CANDIDATES[name]
    assert candidate.needs is floors.EXPERT
    assert candidate.differs == "own router"
    clocks = [Clock([1.0], [1.0]) for _ in range(3)]
    report = Report(floors.Sizes(120, 7, 3), [5.0], 300, 300, 0, {}, None, [0], *clocks)
    row = row_of(name, candidate, Config(model="moe"), [report, report], [4.0], 400)
    assert (row.loss_difference, row.loss_difference_floor, row.differs) == (None, None, "own router")
    assert row.reports[0]["losses"] == [5.0]
    assert tables.markdown([row], "title", "command").splitlines()[6].endswith("| own router      |")
    [cell] = list(tables.terminal([row], "title").columns[-1].cells)[:1]
    assert cell == "own router"


def test_others_are_compared() -> None:
    own = {name for name, candidate in CANDIDATES.items() if candidate.differs is not None}
    assert own == set(NAMES)
    assert Row("zero0", "nanopar").differs is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ("dense", 1, "model=dense: this peer is set up for Phi-MoE without auxiliary loss: --model moe"),
        ("nano", 3, "model=nano: its 8 experts are not divisible by nproc=3"),
    ],
)
def test_what_is_refused(name: str, model: str, ranks: int, message: str) -> None:
    axis = core.Axis("dp", ranks, 0, None, ((0,),), False)
    with pytest.raises(InputError, match=f"^{message}$"):
        CANDIDATES[name].build(Setup(model, axis, torch.device("cpu"), 1, True))
