"""Install the freshly built wheel of one package into this environment, use it, take it out again.

Its declared dependencies decide what comes along, nanopar's from the folder ``dist``: a strategy brings core, nothing
else.
"""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
NEEDS = {
    "zero": {"core"},
    "tensor": {"core"},
    "pipeline": {"core"},
    "expert": {"core"},
    "sft": {"core", "zero", "tensor", "pipeline", "expert", "models"},
}
EVERY = [f"nanopar-{name}" for name in ("core", "zero", "tensor", "pipeline", "expert", "models", "sft")]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def main() -> None:
    package = sys.argv[1]
    pip("--quiet", "uninstall", "--yes", *EVERY)
    try:
        pip("install", "--find-links", str(ROOT / "dist"), f"nanopar-{package}=={VERSION}")
        only = [sys.executable, str(Path(__file__).with_name("only.py")), package, *NEEDS.get(package, ())]
        subprocess.run(only, check=True)
        module = importlib.import_module(f"nanopar_{package}")
        folder = Path(str(module.__file__)).parent
        if "site-packages" not in folder.parts or not (folder / "py.typed").is_file():
            sys.exit(f"{folder} is not what a wheel installs, or has no py.typed")
        results = doctest.testmod(module, verbose=False)
        if results.failed:
            sys.exit(1)
        if package == "sft":
            command = [str(Path(sys.executable).with_name("nanopar-sft")), "train", "--dry-run", "--train-rows", "64"]
            subprocess.run(command, check=True, cwd=ROOT.parent)
        print(f"nanopar-{package}: installed, {results.attempted} example lines of its docstring run")
    finally:
        pip("--quiet", "uninstall", "--yes", *EVERY)


if __name__ == "__main__":
    main()
