"""The product's source files as the rules read them: who they import and which dotted names they use."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARIES = ("core", "zero", "tensor", "pipeline", "expert", "models")
FOLDERS = {name: ROOT / "packages" / name for name in LIBRARIES} | {"sft": ROOT / "apps" / "sft"}


@dataclass(frozen=True)
class Source:
    """One file of a package: ``where`` is its path inside the import package, as ``nanopar_core/mesh.py``."""

    package: str
    where: str
    tree: ast.Module

    def imports(self, *, top_level: bool = False) -> Iterator[str]:
        """Dotted names of everything imported, anywhere in the file or only on its first level (and not in an
        ``if TYPE_CHECKING``): ``from a import b`` is ``a.b``."""
        for node in self.tree.body if top_level else ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.where}:{node.lineno}: relative import"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def aliases(self) -> dict[str, str]:
        """What the names that imports bind stand for: ``import a.b as c`` gives c -> a.b."""
        bound = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    bound[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return bound

    def uses(self) -> Iterator[str]:
        """Dotted names in the code, with the names that imports bind written out: ``dist.new_group`` under
        ``import torch.distributed as dist`` is ``torch.distributed.new_group``."""
        bound = self.aliases()
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and (name := dotted(node)):
                first, *rest = name.split(".")
                yield ".".join([bound.get(first, first), *rest])

    def strings(self) -> str:
        """All string constants but docstrings, one a line: where a name could be imported from at run time."""
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(self.tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
        }
        constants = (node for node in ast.walk(self.tree) if isinstance(node, ast.Constant))
        return "\n".join(str(node.value) for node in constants if id(node) not in docstrings)


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` of an expression that is nothing but names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return None


@cache
def sources() -> tuple[Source, ...]:
    """All Python files of all distributions."""
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((folder / "src").rglob("*.py")):
            tree = ast.parse(path.read_text(), filename=str(path))
            found.append(Source(package, path.relative_to(folder / "src").as_posix(), tree))
    assert len({source.package for source in found}) == len(FOLDERS)
    return tuple(found)


@cache
def project(package: str) -> dict[str, Any]:
    """The distribution's pyproject.toml."""
    return tomllib.loads((FOLDERS[package] / "pyproject.toml").read_text())
