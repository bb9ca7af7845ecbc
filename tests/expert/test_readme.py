"""The README's example runs, and its picture shows what a layer sends."""

import re
from pathlib import Path

import torch
from tests.as_launched import last_loss

import nanopar_core as core
import nanopar_expert as expert
from nanopar_core.testing import run

README = (Path(__file__).parents[2] / "packages" / "expert" / "README.md").read_text()
TOKENS, HIDDEN, TOP_K, EXPERTS, SIZE = 6, 5, 2, 4, 2


def the_example() -> float:
    return last_loss(README)


def test_the_example_runs_on_one_rank_and_on_two() -> None:
    assert the_example() < 0.1
    for loss in run(2, the_example):
        assert loss < 0.1


def sent_by_a_layer() -> tuple[list[str], list[str]]:
    """What the ledger saw, and what the picture says."""
    mesh = core.Mesh(dp=SIZE, ep=SIZE)
    torch.manual_seed(0)
    moe = expert.MoE(expert.TopKRouter(HIDDEN, EXPERTS, TOP_K), expert.Experts(EXPERTS, HIDDEN, 4))
    expert.parallelize(moe, None, mesh.ep)
    arrived: list[int] = []
    moe.experts.register_forward_hook(lambda _m, _args, y: arrived.append(y.shape[0]))
    rows: list[int] = []
    moe.experts.register_forward_pre_hook(lambda _m, args: rows.append(args[0].shape[0]))
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(mesh.dp.rank)).requires_grad_()
    with core.ledger() as book:
        moe(x).sum().backward()
    sizes = {"E": EXPERTS, "P": TOKENS * TOP_K, "R": rows[0], "D": HIDDEN, "D + 1": HIDDEN + 1}
    [picture] = [text for text in re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL) if "dispatch" in text]
    lines = re.findall(r"^ \+- \w.*? {3,}(-|\w+ \[.*?\]) {2,}(-|\w+ \[.*?\])$", picture, flags=re.MULTILINE)
    assert len(lines) == 3
    drawn = [forward for forward, _ in lines] + [backward for _, backward in lines[::-1]]
    said = []
    for text in drawn:
        for op, shape in re.findall(r"(\w+) \[(.*?)\]", text):
            said.append(f"{op} {[sizes[size] for size in shape.split(', ')]}")
    seen = []
    for record in book.records:
        shape = [EXPERTS] if record.label.endswith("counts") else list(record.shape)
        seen.append(f"{record.op} {shape}")
    return seen, said


def test_the_picture_shows_what_a_layer_sends() -> None:
    for seen, said in run(SIZE, sent_by_a_layer):
        assert seen == said
