"""What several ranks computed is compared by verify, which says what is probably wrong, and never by hand."""

import ast
from collections.abc import Iterator

import pytest
from tests.rules.sources import ROOT, Source

BY_HAND = {"torch.testing.assert_close", "torch.allclose", "torch.isclose", "numpy.allclose", "numpy.testing"}
RUN = "nanopar_core.testing.run"


def compared_by_hand(text: str) -> Iterator[str]:
    """The functions that start ranks, and compare what these return within a tolerance of their own."""
    tree = ast.parse(text)
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names = {*Source("tests", node.name, ast.Module([*imports, node], [])).uses()}
            if RUN in names and any(f"{name}.".startswith(f"{bad}.") for name in names for bad in BY_HAND):
                yield node.name


@pytest.mark.parametrize("path", sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/*/*.py")))
def test_results_of_ranks_go_through_verify(path: str) -> None:
    found = list(compared_by_hand((ROOT / path).read_text()))
    assert not found, "compare with nanopar_core.testing.assert_parity(reference, results)"


def test_the_rule_sees_what_it_forbids() -> None:
    imports = "import torch\nfrom nanopar_core import testing\n"
    also = "from nanopar_core.testing import run as start\nfrom torch.testing import assert_close\n"
    wrong = "def test_a():\n    for x in testing.run(2, f):\n        torch.testing.assert_close(x, y)\n"
    wrong_too = "def test_b():\n    assert_close(start(2, f), y)\n"
    right = "def test_c():\n    testing.assert_parity(y, testing.run(2, f))\n\ndef f():\n    torch.allclose(x, y)\n"
    assert list(compared_by_hand(imports + also + wrong + wrong_too + right)) == ["test_a", "test_b"]
