"""The README's example runs, and its pictures show what a layer sends."""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tensor.test_parity import LENGTH, ROWS, divided, loss_of, tokens

import nanopar_core as core
from nanopar_core.testing import run

README = (Path(__file__).parents[2] / "packages" / "tensor" / "README.md").read_text()
HIDDEN = 24  # of the model in test_parity


def test_the_example_runs() -> None:
    pytest.importorskip("transformers")
    example = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"].item() < 1.0


def drawn(picture: str, part: int) -> list[str]:
    """What the picture says, in the order of a step, as "op label elements"; S/N is ``part``."""
    rows = re.findall(r"^ [|+][- ]+([\w.]+) {2,}(-|\w+ \[.*?\]) {2,}(\S.*)$", picture, flags=re.MULTILINE)
    assert len(rows) == 4

    def calls(name: str, text: str) -> list[str]:
        sizes = {"B": ROWS, "S": LENGTH, "S/N": part, "D": HIDDEN}
        found = re.findall(r"(\w+) \[(.*?)\]", text)
        return [f"{op} {name} {prod(sizes[size] for size in shape.split(', '))}" for op, shape in found]

    forward = [call for name, there, _ in rows for call in calls(name, there)]
    return [*forward, *(call for name, _, back in rows[::-1] for call in calls(name, back))]


def sent_by_the_first_layer(how: str) -> list[str]:
    torch.set_num_threads(1)
    model, _, _ = divided("qwen3", 2, how)
    with core.ledger() as book:
        loss_of(model, tokens(0)).backward()
        layer = "model.layers.0."
        here = [record for record in book.records if record.label.startswith(layer)]
        return [f"{record.op} {record.label.removeprefix(layer)} {prod(record.shape)}" for record in here]


@pytest.mark.parametrize(("which", "how"), [(0, ""), (1, "sequence")])
def test_the_pictures_show_what_a_layer_sends(which: int, how: str) -> None:
    pytest.importorskip("transformers")
    picture = [text for text in re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL) if "forward" in text][which]
    for rank, sent in enumerate(run(2, sent_by_the_first_layer, how)):
        assert sent == drawn(picture, (4, 3)[rank])
