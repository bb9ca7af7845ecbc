"""Assert that of all nanopar packages exactly the named ones are importable: ``python only.py core zero``."""

import importlib.util
import sys

ALL = {"core", "zero", "tensor", "pipeline", "expert", "models", "sft"}


def main() -> None:
    expected = set(sys.argv[1:])
    found = {name for name in ALL if importlib.util.find_spec(f"nanopar_{name}") is not None}
    if found != expected:
        sys.exit(f"importable: {sorted(found)}, expected: {sorted(expected)}")
    for name in sorted(found):
        importlib.import_module(f"nanopar_{name}")


if __name__ == "__main__":
    main()
