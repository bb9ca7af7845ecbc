"""The configuration: where values come from, what is refused and with which words, and that it survives a file."""

from pathlib import Path

import pytest
import yaml

from nanopar_sft.config import Config
from nanopar_sft.errors import InputError

RECIPES = Path(__file__).parents[2] / "apps" / "sft" / "recipes"

# A new key is a promise to every user: adding one means adding it here, on purpose.
# fmt: off
KEYS = [
    "model", "tokenizer", "layers", "router_noise", "router_jitter_noise", "precision", "data", "eval_data",
    "train_rows", "eval_rows", "seq_len", "max_operand", "two_step", "three_step", "show", "steps", "epochs",
    "batch_size", "microbatches", "lr", "lr_schedule", "warmup", "weight_decay", "betas", "clip", "freeze",
    "packing", "seed", "nproc", "dp", "dp_replicate", "tp", "sp", "cp", "cp_method", "pp", "schedule",
    "virtual_stages", "ep", "etp", "zero", "recompute", "compile", "threads", "timeout_s", "strategies", "peers",
    "pairs", "fused", "fuzz", "prompt", "max_new_tokens", "temperature", "top_p", "output_dir", "save_every",
    "keep", "resume", "eval_every", "log", "plot", "dry_run",
]
# fmt: on


def write(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return ["--config", str(file)]


def message(arguments: list[str], command: str = "train", world_size: int = 1) -> str:
    with pytest.raises(InputError) as caught:
        Config.parse(arguments).resolve(command, world_size)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_keys_are_these() -> None:
    assert list(Config.model_fields) == KEYS
    assert all(field.description for field in Config.model_fields.values())


def test_command_line_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "lr: 1e-4\nseed: 7\nplot: off\n")
    config = Config.parse([*file, "--seed", "8"])
    assert (config.seed, config.lr, config.plot, config.batch_size) == (8, 1e-4, False, 32)


def test_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEED", "seed", "LR", "NANOPAR_SFT_SEED", "DATA"):
        monkeypatch.setenv(name, "9")
    config = Config.parse([])
    assert (config.seed, config.lr, config.data) == (0, 2e-3, "synthetic")


@pytest.mark.parametrize(
    "arguments",
    [["--batch-size", "8"], ["--batch_size", "8"], ["--batch-size=8"], ["--batch_size=4", "--batch-size=8"]],
)
def test_hyphens_and_underscores_mean_the_same(arguments: list[str]) -> None:
    assert Config.parse(arguments).batch_size == 8


def test_hyphens_in_a_file(tmp_path: Path) -> None:
    assert Config.parse(write(tmp_path, "batch-size: 8\n")).batch_size == 8
    assert "given twice" in message(write(tmp_path, "batch-size: 8\nbatch_size: 9\n"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--plot", "false"], (False, False)),
        (["--plot=no", "--recompute", "true"], (False, True)),
        (["--recompute"], (True, True)),
        (["--recompute", "--plot", "0"], (False, True)),
    ],
)
def test_booleans(arguments: list[str], expected: tuple[bool, bool]) -> None:
    config = Config.parse(arguments)
    assert (config.plot, config.recompute) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--freeze", "a.*", "--freeze", "b"], ("a.*", "b")),
        (["--freeze", "a.*,b"], ("a.*", "b")),
        (["--freeze", "layers.[01].*, b", "--freeze=c"], ("layers.[01].*", "b", "c")),
        ([], ()),
    ],
)
def test_lists(arguments: list[str], expected: tuple[str, ...]) -> None:
    assert Config.parse(arguments).freeze == expected


def test_lists_in_a_file(tmp_path: Path) -> None:
    config = Config.parse(write(tmp_path, "freeze: [a, b]\nbetas: [0.8, 0.99]\n"))
    assert (config.freeze, config.betas) == (("a", "b"), (0.8, 0.99))


def test_betas_on_the_command_line() -> None:
    assert Config.parse(["--betas", "0.8,0.99"]).betas == (0.8, 0.99)


def test_none_and_text_that_looks_like_something_else(tmp_path: Path) -> None:
    config = Config.parse(["--clip", "none", "--log", "none", "--prompt=--5 - {x: [1, 2", "--model", "123"])
    assert (config.clip, config.log, config.prompt, config.model) == (None, "none", "--5 - {x: [1, 2", "123")
    config = Config.parse(write(tmp_path, "clip: none\nlog: none\nsteps: null\nmodel: 123\n"))
    assert (config.clip, config.log, config.steps, config.model) == (None, "none", None, "123")


def test_negative_and_scientific_numbers_reach_their_check() -> None:
    assert Config.parse(["--lr", "1e-5"]).lr == 1e-5
    assert message(["--lr", "-1e-5"]) == "lr=-1e-5: must be greater than 0"


def test_steps_on_the_command_line_replace_epochs_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "epochs: 3\n")
    config = Config.parse([*file, "--steps", "30"])
    assert (config.steps, config.epochs) == (30, None)
    assert Config.parse(file).resolve("train", 1).steps is None
    assert Config.parse([]).resolve("train", 1).steps == 1200


def test_saved_configuration_is_read_back(tmp_path: Path) -> None:
    arguments = [
        "--freeze",
        "a,b",
        "--clip",
        "none",
        "--prompt",
        "What: 'is' #1?\nnext",
        "--output-dir",
        "x/y",
        "--dp=2",
    ]
    config = Config.parse(arguments).resolve("train", 2)
    config.save(tmp_path / "config.yaml")
    assert Config.parse(["--config", str(tmp_path / "config.yaml")]) == config
    assert set(yaml.safe_load((tmp_path / "config.yaml").read_text())) == set(KEYS)


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config.parse([]).lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--bacth-size", "8"], "unknown key 'bacth-size'; did you mean 'batch_size'?"),
        (["--zeros", "8"], "unknown key 'zeros'; did you mean 'zero'?"),
        (["--learning_rate", "1"], "unknown key 'learning_rate'; did you mean 'lr'?"),
        (["train"], "unexpected argument 'train': keys are written --key value"),
        (["-lr", "1"], "unexpected argument '-lr': keys are written --key value"),
        (["--lr"], "--lr needs a value"),
        (["--lr", "--seed", "1"], "--lr needs a value"),
        (["--lr", "fast"], "lr=fast: must be a valid number"),
        (["--lr", "nan"], "lr=nan: must be a finite number"),
        (["--steps", "2.5"], "steps=2.5: must be a valid integer"),
        (["--seq_len", "0"], "seq_len=0: must be greater than or equal to 2"),
        (["--steps", "0"], "steps=0: must be greater than or equal to 1"),
        (["--precision", "fp8"], "precision=fp8: must be 'fp64', 'fp32', 'bf16' or 'fp16'"),
        (["--log", "wandb"], "log=wandb: must be 'none' or 'tensorboard'"),
        (["--plot", "maybe"], "plot=maybe: must be a valid boolean"),
        (["--betas", "0.9,1.5"], "betas=1.5: must be less than 1"),
        (["--betas", "0.9"], "betas has the wrong number of values: it needs as many as its default, see --help"),
        (["--top_p", "1.5"], "top_p=1.5: must be less than or equal to 1"),
        (["--offload", "cpu"], "offload=cpu: nanopar-sft cannot offload to host memory yet; use offload=none"),
        (["--tp", "0"], "tp=0: must be greater than or equal to 1"),
        (["--zero", "4"], "zero=4: must be less than or equal to 3"),
        (["--steps", "5", "--epochs", "1"], "steps=5 and epochs=1 are both set: keep one of them"),
        (
            ["--steps", "10", "--warmup", "10"],
            "warmup=10 leaves no step to train in steps=10: use fewer warm-up steps, or a fraction such as 0.03",
        ),
        (
            ["--two_step", "0.7", "--three_step", "0.4"],
            "two_step=0.7 and three_step=0.4 are shares of the problems: together they may be at most 1",
        ),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config is given twice (a.yaml and b.yaml): use one file"),
        (["--config", "no/such.yaml"], "cannot read --config no/such.yaml: No such file or directory"),
    ],
)
def test_bad_arguments(arguments: list[str], expected: str) -> None:
    assert message(arguments) == expected


def test_several_faults_are_one_line() -> None:
    faults = message(["--lr", "x", "--seed", "-1"]).split("; ")
    assert sorted(faults) == ["lr=x: must be a valid number", "seed=-1: must be greater than or equal to 0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bacth_size: 8\n", ": unknown key 'bacth_size'; did you mean 'batch_size'?"),
        ("lr: 1.0\nsteps: [1\n", ", line 3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("- a\n- b\n", ": expected lines of the form 'key: value', found a list"),
        ("lr: fast\n", ": lr=fast: must be a valid number"),
        ("offload: cpu\n", ": offload=cpu: nanopar-sft cannot offload to host memory yet; use offload=none"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, expected: str) -> None:
    arguments = write(tmp_path, text)
    assert message(arguments) == f"{arguments[1]}{expected}"


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert Config.parse(write(tmp_path, "# nothing yet\n")) == Config.parse([])


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00model")
    assert message(["--config", str(tmp_path / "run.yaml")]).endswith("is not a text file in UTF-8")


def test_neutral_values_of_planned_keys_are_accepted(tmp_path: Path) -> None:
    file = write(tmp_path, "profile_steps: none\noffload: none\n")
    assert Config.parse([*file, "--offload", "none"]) == Config.parse([])


@pytest.mark.parametrize(
    ("arguments", "world_size", "ok"),
    [
        (["--batch_size", "12", "--microbatches", "3"], 2, True),
        (["--batch_size", "12", "--microbatches", "3"], 4, True),
        (["--batch_size", "10", "--microbatches", "2"], 4, False),
        (["--batch_size", "6"], 4, False),
    ],
)
def test_batch_must_split_evenly(arguments: list[str], world_size: int, ok: bool) -> None:
    if ok:
        assert Config.parse(arguments).resolve("train", world_size).dp == world_size
        return
    text = message(arguments, world_size=world_size)
    config = Config.parse(arguments)
    assert text.startswith(
        f"batch_size={config.batch_size} is not divisible by dp={world_size} x microbatches={config.microbatches} "
        f"= {world_size * config.microbatches}"
    )
    Config.parse(arguments).resolve("eval", world_size)  # only training splits its batch


def test_layout_and_number_of_ranks() -> None:
    assert Config.parse([]).ranks("train") == 1
    assert Config.parse(["--dp", "4"]).ranks("train") == 4
    assert Config.parse(["--nproc", "2"]).ranks("eval") == 2
    assert Config.parse(["--nproc", "2"]).ranks("data") == 1
    resolved = Config.parse(["--nproc", "2"]).resolve("train", 2)
    assert (resolved.dp, resolved.nproc) == (2, None)
    assert message(["--dp", "4", "--nproc", "2"], world_size=2).startswith(
        "dp=4 needs 4 rank(s), but there would be 2:"
    )
    assert message([], command="data", world_size=2) == "data runs in one process, not in 2 ranks"


@pytest.mark.parametrize(
    ("arguments", "ranks", "expected"),
    [
        (
            ["--sp", "true"],
            1,
            "sp=true divides sequences over the ranks of tp, but tp=1: use tp=2 or more",
        ),
        (["--tp", "4", "--etp", "2"], 4, "etp=2 must be 1 or tp=4: a part of each expert's width, or none"),
        (["--tp", "2"], 3, "tp=2 needs a multiple of 2 ranks, but there would be 3: make nproc (or torchrun's"),
        (["--dp", "2", "--pp", "2"], 2, "dp=2 x pp=2 needs 4 rank(s), but there would be 2: make nproc (or torchrun's"),
        (
            ["--pp", "2", "--virtual_stages", "2"],
            2,
            "schedule=1f1b has 1 stage on a rank, not virtual_stages=2: use schedule=interleaved",
        ),
        (
            ["--pp", "2", "--schedule", "zbv", "--virtual_stages", "3"],
            2,
            "schedule=zbv has 2 stages on a rank, not virtual_stages=3",
        ),
        (["--tp", "2", "--compile"], 2, "compile=true goes with dp and zero only, not with tp, cp, pp or ep"),
        (
            ["--dp_replicate", "2", "--dp", "2", "--batch_size", "6"],
            4,
            "batch_size=6 is not divisible by dp x dp_replicate=4 x microbatches=1 = 4: every micro-batch must have",
        ),
    ],
)
def test_layouts_that_contradict_themselves(arguments: list[str], ranks: int, expected: str) -> None:
    assert message(arguments, world_size=ranks).startswith(expected)


def test_the_layout_says_how_many_ranks() -> None:
    config = Config.parse(["--tp", "2", "--pp", "2", "--schedule", "interleaved", "--ep", "2"])
    assert config.ranks("train") == 4
    layout = config.resolve("train", 8).layout()
    assert (layout.dp, layout.tp, layout.pp, layout.chunks, layout.ep, layout.etp, layout.ranks) == (
        2,
        2,
        2,
        2,
        2,
        2,
        8,
    )


def test_commands_that_need_a_key() -> None:
    assert message([], command="generate") == "generate needs a question: --prompt TEXT"
    assert message([], command="export") == "export needs a checkpoint: --resume DIRECTORY"


@pytest.mark.parametrize(("warmup", "expected"), [(0.0, 0), (0.03, 18), (0.5, 300), (1.0, 1), (20.0, 20)])
def test_warmup_is_steps_or_a_fraction(warmup: float, expected: int) -> None:
    assert Config(warmup=warmup).warmup_steps(600) == expected


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid(recipe: Path) -> None:
    config = Config.parse(["--config", str(recipe)])
    resolved = config.resolve("train", config.ranks("train"))
    assert (resolved.steps is None) != (resolved.epochs is None)
    assert resolved.output_dir.parts[0] == "runs"


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} >= {"demo", "gsm8k-nano", "gsm8k-phi-tiny"}
