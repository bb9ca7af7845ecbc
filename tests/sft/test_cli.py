"""The command line: commands, --help, exit statuses, and one line for whatever is wrong."""

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanopar_sft import __main__ as cli
from nanopar_sft import launcher, preflight
from nanopar_sft.commands import COMMANDS, Command
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Fake:
    """Stands for a command's module, the preflight and the launcher; remembers what it was called with."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.checked: list[str] = []
        self.launched: list[tuple[int, list[str], int | None]] = []
        self.error: Exception | None = None

    def run(self, config: Config) -> None:
        self.configs.append(config)
        if self.error:
            raise self.error

    def check(self, command: str, _config: Config) -> None:
        self.checked.append(command)

    def launch(self, nproc: int, arguments: list[str], *, threads: int | None, shutdown_s: int) -> int:  # noqa: ARG002
        self.launched.append((nproc, arguments, threads))
        return 7


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    fake = Fake()
    module = types.ModuleType("fake_command")
    module.run = fake.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    for name in COMMANDS:
        monkeypatch.setitem(COMMANDS, name, Command("a fake", "fake_command"))
    monkeypatch.setattr(preflight, "check", fake.check)
    monkeypatch.setattr(launcher, "launch", fake.launch)
    monkeypatch.setattr(launcher, "end_with_launcher", lambda: None)
    yield fake


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanopar_sft", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_gets_its_configuration(fake: Fake) -> None:
    assert cli.main(["eval", "--model", "runs/x", "--seed", "3"]) == 0
    assert fake.checked == ["eval"]
    assert (fake.configs[0].model, fake.configs[0].seed, fake.configs[0].dp) == ("runs/x", 3, 1)
    assert not fake.launched


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--nproc", "2"], 2),
        (["train", "--dp", "4"], 4),
        (["eval", "--dp", "2", "--nproc", "2"], 2),
    ],
)
def test_several_ranks_go_through_the_launcher(fake: Fake, arguments: list[str], expected: int) -> None:
    assert cli.main([*arguments, "--threads", "3"]) == 7
    assert fake.launched == [(expected, [*arguments, "--threads", "3"], 3)]
    assert not fake.configs


def test_a_rank_runs_the_command_itself(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "--nproc", "8"]) == 0
    assert not fake.launched
    assert fake.configs[0].dp == 2


def test_a_rank_refuses_a_layout_of_another_size(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["train", "--dp", "4"]) == 2
    assert capsys.readouterr().err.startswith("nanopar-sft: error: dp=4 needs 4 rank(s), but there would be 2:")


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [5.0])])
def test_rank_0_speaks_first(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, waits: list[float]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "--lr", "x"]) == 2
    assert slept == waits
    assert capsys.readouterr().err == "nanopar-sft: error: lr=x: must be a valid number\n"


def test_exit_statuses(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.error = InputError("rows.jsonl, line 3:\n  no answer")
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "nanopar-sft: error: rows.jsonl, line 3: no answer\n"
    fake.error = KeyboardInterrupt()  # type: ignore[assignment]
    assert cli.main(["train"]) == 130
    fake.error = ZeroDivisionError("a fault of ours")
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


NAMES = "train, eval, generate, data, export, trace, verify, compare, env"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], f"unknown command 'trian'; did you mean 'train'? There are {NAMES}"),
        ([], f"the command comes first, one of {NAMES}; see nanopar-sft --help"),
        (["--lr", "1"], f"the command comes first, one of {NAMES}; see nanopar-sft --help"),
        (["train", "--bacth_size", "8"], "unknown key 'bacth_size'; did you mean 'batch_size'?"),
        (
            ["train", "--batch-size", "5", "--nproc", "2"],
            "batch_size=5 is not divisible by dp=2 x microbatches=1 = 2: "
            "every micro-batch must have the same number of sequences",
        ),
        (
            ["train", "--nproc", "2", "--dp", "3"],
            "dp=3 needs 3 rank(s), but there would be 2: "
            "make nproc (or torchrun's --nproc-per-node) and the layout equal, or leave dp out",
        ),
    ],
)
def test_bad_input_is_one_line(
    fake: Fake, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"nanopar-sft: error: {expected}\n")
    assert not fake.checked
    assert not fake.configs
    assert not fake.launched


@pytest.mark.parametrize(
    "arguments",
    [["train", "--lr", "0"], ["train", "--config", "none.yaml", "--nproc", "2"], ["export"], ["fly"]],
)
def test_bad_input_in_a_real_process(tmp_path: Path, arguments: list[str]) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("nanopar-sft: error: ")
    assert not list(tmp_path.iterdir())


def test_bad_input_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "nanopar_sft", "train", "--bacth-size", "8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("nanopar-sft: error: ")]
    assert lines == ["nanopar-sft: error: unknown key 'bacth-size'; did you mean 'batch_size'?"]
    assert "exitcode  : 2" in done.stderr  # in torchrun's own table of the failure
    assert "nanopar_sft/" not in done.stderr  # the only traceback is torchrun's own
    assert not list(tmp_path.iterdir())


def test_help_needs_no_torch() -> None:
    code = "import sys; from nanopar_sft.__main__ import main; main(['train', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "nanopar_sft.config" in loaded
    assert not {"torch", "transformers", "datasets", "matplotlib", "numpy"} & set(loaded)


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS.values():
        assert command.summary in text
    assert "Exit status: 0 done, 1 failed, 2 bad input" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_keys_of_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    shown = [line.split()[0].removeprefix("--") for line in text.splitlines() if line.startswith("  --")]
    expected = [
        name
        for name, field in Config.model_fields.items()
        if command in field.json_schema_extra["commands"]  # type: ignore[index,operator]
    ]
    assert sorted(shown) == sorted(expected)
    assert max(map(len, text.splitlines())) <= 106  # the notes at the end do not wrap


def test_help_of_train_says_what_matters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["train", "--nproc", "2", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the default here is deterministic routing" in text
    assert "--lr X peak learning rate of AdamW [0.002]" in text
    assert "--betas A,B AdamW's two averaging factors [0.9,0.95]" in text
    assert "--lr_schedule cosine|linear|constant" in text
    assert "--prompt" not in text


def test_every_key_is_used_by_a_command() -> None:
    for name, field in Config.model_fields.items():
        assert field.json_schema_extra, name
        used_by = field.json_schema_extra["commands"]  # type: ignore[index]
        assert set(used_by) <= set(COMMANDS), name  # type: ignore[arg-type]
        assert used_by, name


def test_env_names_versions(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert cli.main(["env"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["torch"] == torch.__version__
    assert facts["collectives"].startswith("gloo")
    assert "math" in facts["attention"]
    assert "nanopar-sft" in facts
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"nanopar-sft {facts['nanopar-sft']}\n"
