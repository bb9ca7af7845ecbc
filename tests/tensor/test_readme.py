"""The README's example runs."""

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "packages" / "tensor" / "README.md").read_text()


def test_the_example_runs() -> None:
    pytest.importorskip("transformers")
    [example] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"].item() < 1.0
