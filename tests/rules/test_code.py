"""What no product code does: run what it reads, hide state, or know this machine."""

import ast
import re
import subprocess

import pytest
from tests.rules.sources import ROOT, Source, sources

RUNS_WHAT_IT_READS = {
    "builtins.eval",
    "eval",
    "exec",
    "dill",
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "numpy.load",
    "pickle",
    "shelve",
    "torch.hub.load",
    "torch.load",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
}
# the messages between nanopar_core.testing and the ranks that it has started itself
PICKLES = "nanopar_core/testing.py"


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.where)
def test_no_file_runs_what_it_reads(source: Source) -> None:
    names = {*source.imports(), *source.uses()}
    bad = {name for name in names if any(f"{name}.".startswith(f"{forbidden}.") for forbidden in RUNS_WHAT_IT_READS)}
    if source.where == PICKLES:
        bad = {name for name in bad if name.split(".")[0] != "pickle"}
    assert not bad
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
        if isinstance(node, ast.keyword) and node.arg == "weights_only":
            raise AssertionError("torch.load by another name")
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            raise AssertionError("trust_remote_code in a dictionary")


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.where)
def test_no_file_hides_state(source: Source) -> None:
    for node in ast.walk(source.tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: module-global state"  # type: ignore[attr-defined]
    if source.package in ("zero", "tensor", "pipeline", "expert"):
        wrong = [name for name in source.uses() if name.startswith(("os.environ", "os.getenv", "os.putenv"))]
        assert not wrong, "an environment variable is no channel: pass an argument"


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.where)
def test_every_file_says_what_it_is(source: Source) -> None:
    assert ast.get_docstring(source.tree) or source.where.endswith("__main__.py")


def test_no_drawer_for_everything() -> None:
    words = {"utils", "util", "common", "misc", "helpers", "helper", "shared"}
    for source in sources():
        parts = set(re.split(r"[/.]", source.where))
        assert not parts & words, source.where


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.decode().split("\0") if name]


def test_no_file_knows_this_machine() -> None:
    places = [("/wo" + "rk/").encode(), ("/ro" + "ot/").encode(), ("/.lib" + "rary").encode()]
    knowing = []
    for name in tracked():
        path = ROOT / name
        if path.is_file() and any(place in path.read_bytes() for place in places):
            knowing.append(name)
    assert not knowing
