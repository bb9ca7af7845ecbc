"""The configuration: every key of nanopar-sft, with its type, default and one-line description.

    defaults  <-  --config FILE.yaml  <-  --key value        (the right one wins)
                                |
                       types and ranges              one field at a time, by pydantic
                                |
                     Config.resolve(command, world)  what only several keys together can get wrong
                                |
                         frozen Config               saved as YAML, read again by --config

Environment variables are never read. Whatever is wrong is an `InputError` of one line that names the key, the value
and the remedy. A key exists here only if nanopar-sft honours it: `PLANNED` holds the ones that are still to come, so
that asking for one is refused with the reason instead of being ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError
from pydantic.config import JsonDict
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from nanopar_sft.errors import InputError

if TYPE_CHECKING:
    from nanopar_sft.layout import Layout

DEFAULT_STEPS = 1200

# Where a command's default is not the key's own. compare: the protocol that its published figures follow. verify: what
# takes seconds, and leaves no doubt about rounding.
DEFAULTS_OF: dict[str, dict[str, object]] = {
    "compare": {
        "model": "dense",
        "seq_len": 256,
        "batch_size": 4,
        "nproc": 2,
        "threads": 1,
        "output_dir": Path("runs/compare"),
    },
    "verify": {"model": "tiny-0", "precision": "fp64", "seq_len": 40, "batch_size": 12, "steps": 3, "threads": 1},
}


class Planned:
    """A key that nanopar-sft will have: what it will do, and the only value that is right until then."""

    def __init__(self, what: str, neutral: object) -> None:
        self.what = what
        self.neutral = neutral

    def refuses(self, value: object) -> bool:
        """Whether `value` (a string from the command line or a YAML value) asks for more than exists."""
        return str(value).lower() != str(self.neutral).lower()


PLANNED: dict[str, Planned] = {
    "offload": Planned("offload to host memory", "none"),
    "profile_steps": Planned("profile steps", "none"),
}

# What other trainers call our keys, so that a newcomer's first guess is answered with ours.
OTHER_NAMES = {
    "dataset": "data",
    "dtype": "precision",
    "gradient_accumulation_steps": "microbatches",
    "gradient_checkpointing": "recompute",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_schedule",
    "max_grad_norm": "clip",
    "max_seq_length": "seq_len",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
}


def key(default: Any, group: str, commands: str, description: str, **limits: Any) -> Any:
    """A field of `Config`: its default, its heading in --help, the commands that use it, and what it means."""
    shown: JsonDict = {"group": group, "commands": list(commands.split())}
    return Field(default, description=description, json_schema_extra=shown, **limits)


def _none_word(value: object) -> object:
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


NoneWord = BeforeValidator(_none_word)
CommaSeparated = BeforeValidator(_split_commas)
OptionalInt = Annotated[int | None, NoneWord]
OptionalFloat = Annotated[float | None, NoneWord]
OptionalText = Annotated[str | None, NoneWord]
Patterns = Annotated[tuple[str, ...], NoDecode, CommaSeparated]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], NoDecode, CommaSeparated]

# Which commands use a key.
ALL = "train eval generate data trace verify"
MODEL = "train eval generate trace verify"
DATA = "train eval data trace"
RANKS = "train eval generate trace verify"
DECODE = "train eval generate"
STEP = "train trace verify"  # what one optimizer step depends on
COMPARE = "compare"
LAYOUT = "Layout"  # the heading of the axes in --help
SEVERAL_STAGES = ("interleaved", "zbv", "dualpipe_v")  # schedules with more than one stage on a rank
TWO_STAGES = ("zbv", "dualpipe_v")


class Config(BaseSettings):
    """All keys of nanopar-sft, checked and frozen.

    One configuration serves all commands: each uses the keys that its --help lists and ignores the others, so that the
    file saved by `train` also drives `eval` and `generate`.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    # Model
    model: str = key(
        "nano",
        "Model",
        f"{MODEL} {COMPARE}",
        "preset (nano, phi-tiny-moe, phi-mini-moe), directory in Hugging Face form, or hub id; for compare also dense "
        "(a Qwen3 of 25 M parameters) and moe (a Phi-MoE of 23 M), for verify tiny-N (odd sizes, drawn with N)",
    )
    tokenizer: OptionalText = key(
        None, "Model", ALL, "directory, hub id, or builtin (none: the model's own; builtin for a preset)"
    )
    layers: OptionalInt = key(None, "Model", MODEL, "keep only the model's first N layers (none: all)", ge=1)
    router_noise: bool = key(
        False,
        "Model",
        STEP,
        "stochastic routing in training, as transformers trains Phi-MoE; the default here is deterministic routing, "
        "the form that transformers uses in evaluation",
    )
    router_jitter_noise: OptionalFloat = key(
        None, "Model", MODEL, "sparsemixer's tolerance to near ties, instead of the checkpoint's own (none)", ge=0
    )
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = key(
        "fp32",
        "Model",
        MODEL,
        "arithmetic; bf16 and fp16 train with fp32 master weights, fp16 with a scaled loss; fp64 is for verify",
    )

    # Data
    data: str = key("synthetic", "Data", DATA, "synthetic, gsm8k, FILE.jsonl, directory, or hub id as org/name:split")
    eval_data: OptionalText = key(
        None, "Data", "train eval data", "held-back rows, named as in data (none: the test split that belongs to data)"
    )
    train_rows: OptionalInt = key(
        None, "Data", "train data trace", "use only the first N training rows (none: all)", ge=1
    )
    eval_rows: OptionalInt = key(
        None, "Data", "train eval data", "use only the first N held-back rows (none: all)", ge=1
    )
    seq_len: int = key(
        512,
        "Data",
        f"{DATA} generate verify {COMPARE}",
        "longest sequence, in tokens; longer rows are left out and counted (compare: every sequence has this length)",
        ge=2,
    )
    max_operand: int = key(20, "Data", DATA, "synthetic: largest operand (the smallest is 2)", ge=3)
    two_step: float = key(0.4, "Data", DATA, "synthetic: share of problems that take two steps", ge=0, le=1)
    three_step: float = key(0.0, "Data", DATA, "synthetic: share of problems that take three steps", ge=0, le=1)
    show: int = key(2, "Data", "data", "rows to print with the loss mask of their tokens", ge=0)

    # Optimisation
    steps: OptionalInt = key(
        None,
        "Optimisation",
        "train verify",
        f"stop at this optimizer step, counted from the very first one, also after a resume "
        f"(none: {DEFAULT_STEPS} unless epochs is set)",
        ge=1,
    )
    epochs: OptionalFloat = key(None, "Optimisation", "train", "passes over the training rows, instead of steps", gt=0)
    batch_size: int = key(
        32, "Optimisation", f"{DATA} verify {COMPARE}", "sequences per optimizer step, over all ranks", ge=1
    )
    microbatches: int = key(
        1, "Optimisation", f"{STEP} {COMPARE}", "gradient accumulation: parts of each rank's batch", ge=1
    )
    lr: float = key(2e-3, "Optimisation", STEP, "peak learning rate of AdamW", gt=0)
    lr_schedule: Literal["cosine", "linear", "constant"] = key(
        "cosine", "Optimisation", "train trace", "how the rate falls to 0 after the warm-up"
    )
    warmup: float = key(
        0.03,
        "Optimisation",
        "train trace",
        "linear warm-up: steps if 1 or more, a fraction of all steps if below",
        ge=0,
    )
    weight_decay: float = key(0.01, "Optimisation", STEP, "not applied to norms, biases and embeddings", ge=0)
    betas: Betas = key((0.9, 0.95), "Optimisation", STEP, "AdamW's two averaging factors")
    clip: OptionalFloat = key(1.0, "Optimisation", STEP, "largest global gradient norm (none: no clipping)", gt=0)
    freeze: Patterns = key((), "Optimisation", STEP, "name patterns of parameters not to train, as 'model.embed*'")
    packing: bool = key(
        False,
        "Data",
        STEP,
        "put several examples of a micro-batch into a row of at most seq_len tokens, each seeing itself only",
    )
    seed: int = key(
        0, "Optimisation", "train eval generate data trace verify", "of initial weights, data and sampling", ge=0
    )

    # Ranks and memory
    nproc: OptionalInt = key(
        None,
        "Ranks and memory",
        f"{RANKS} {COMPARE}",
        "ranks to start on this machine (none: as many as the layout needs); torchrun's number wins",
        ge=1,
    )
    dp: OptionalInt = key(None, LAYOUT, RANKS, "data-parallel ranks (none: all that the other axes leave)", ge=1)
    dp_replicate: int = key(1, LAYOUT, RANKS, "copies of what dp divides, each with batches of its own", ge=1)
    tp: int = key(1, LAYOUT, RANKS, "tensor-parallel ranks: each has some heads, and some width of every expert", ge=1)
    sp: bool = key(
        False, LAYOUT, RANKS, "sequence parallelism: ranks of tp divide the positions between the layers (less memory)"
    )
    cp: int = key(1, LAYOUT, RANKS, "context-parallel ranks: each has some positions of every sequence", ge=1)
    cp_method: Literal["all_gather", "ulysses", "ring"] = key(
        "all_gather", LAYOUT, STEP, "how attention reaches the positions of other ranks"
    )
    pp: int = key(1, LAYOUT, RANKS, "pipeline ranks: each has some of the layers; microbatches fill the pipeline", ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"] = key(
        "1f1b", LAYOUT, RANKS, "of the pipeline; python -m nanopar_pipeline draws them"
    )
    virtual_stages: OptionalInt = key(
        None, LAYOUT, RANKS, "stages on each pipeline rank (none: 2 where the schedule needs several, else 1)", ge=1
    )
    ep: int = key(1, LAYOUT, RANKS, "expert-parallel ranks, among those of dp, cp and tp: each has some experts", ge=1)
    etp: OptionalInt = key(
        None,
        LAYOUT,
        RANKS,
        "tp (none): its ranks have a part of every expert's width; 1: whole experts, and tokens divided over tp",
        ge=1,
    )
    zero: int = key(
        0,
        "Ranks and memory",
        STEP,
        "ZeRO stage: 0 keeps everything on every rank; 1 divides AdamW's states among the ranks, 2 gradients too, 3 "
        "weights too",
        ge=0,
        le=3,
    )
    recompute: bool = key(False, "Ranks and memory", STEP, "recompute activations in backward instead of keeping them")
    compile: bool = key(
        False,
        "Ranks and memory",
        "train trace",
        "have torch.compile compile the layers: some minutes at the first steps, faster ones afterwards (figures in "
        "docs/benchmarks/models.md); needs a C++ compiler",
    )
    threads: OptionalInt = key(
        None,
        "Ranks and memory",
        f"{RANKS} {COMPARE}",
        "CPU threads of each rank (none: cores divided by local ranks)",
        ge=1,
    )
    timeout_s: float = key(
        300.0,
        "Ranks and memory",
        f"{RANKS} {COMPARE}",
        "seconds after which a collective that a rank missed fails",
        gt=0,
    )

    # Comparison
    strategies: Patterns = key(
        (),
        "Comparison",
        COMPARE,
        "of nanopar, such as zero0 (ddp is another name of it) or zero3; plain local training comes first in any case "
        "(none: all that there are)",
    )
    peers: Patterns = key(
        (),
        "Comparison",
        COMPARE,
        "torch-ddp, zero-redundancy, fsdp2-keep, fsdp2-reshard, deepspeed0 to deepspeed3; for tensor parallelism "
        "torch-tp, megatron-tp (with -sp too), for expert parallelism megatron-ep, deepspeed-moe; one that is not "
        "installed is a row that says so",
    )
    pairs: int = key(5, "Comparison", COMPARE, "timed steps, each paired with a plain local one", ge=1)
    fused: bool = key(True, "Comparison", COMPARE, "AdamW in one kernel, on all sides; false: torch's default loop")

    fuzz: OptionalInt = key(
        None, "Comparison", "verify", "verify so many layouts, drawn with seed, of at most nproc (none: 4) ranks", ge=1
    )

    # Answers
    prompt: OptionalText = key(None, "Answers", "generate", "question to answer")
    max_new_tokens: int = key(
        256, "Answers", DECODE, "longest answer, in tokens; 0: measure the loss of held-back answers only", ge=0
    )
    temperature: float = key(0.0, "Answers", "generate", "0 takes the likeliest token; above 0 samples", ge=0)
    top_p: float = key(
        1.0, "Answers", "generate", "sample among the likeliest tokens of this total probability", gt=0, le=1
    )

    # Output
    output_dir: Path = key(
        Path("runs/sft"), "Output", "train eval export trace compare", "directory for everything that is written"
    )
    save_every: OptionalInt = key(None, "Output", "train", "steps between checkpoints (none: no checkpoints)", ge=1)
    keep: OptionalInt = key(None, "Output", "train", "newest checkpoints to keep (none: all)", ge=1)
    resume: OptionalText = key(
        None, "Output", "train export", "checkpoint directory, or auto for the newest one in output_dir"
    )
    eval_every: OptionalInt = key(
        None, "Output", "train", "steps between evaluations (none: before the first and after the last only)", ge=1
    )
    log: Literal["none", "tensorboard"] = key(
        "none",
        "Output",
        "train",
        "where metrics go besides metrics.jsonl (with torchrun say it in the YAML file: it takes --log for itself)",
    )
    plot: bool = key(True, "Output", "train", "draw the loss as loss.png")
    dry_run: bool = key(False, "Output", "train", "check configuration, layout, data and memory, then stop")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 (the signature is pydantic's)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: no environment variables, no dotenv file, no secrets."""
        return (init_settings,)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """The configuration that `--config FILE.yaml` and `--key value` arguments describe.

        Args:
            arguments: what follows the command's name on the command line.

        Raises:
            InputError: an unknown key, an unreadable file, or a value of the wrong type or range.
        """
        file, tokens = _split_arguments(arguments)
        from_file = _read_yaml(file) if file else {}
        # Every token is now `--key=value` with a known key, so argparse inside this source has nothing to refuse.
        from_line = CliSettingsSource(cls, cli_parse_args=tokens)()
        if from_line.keys() & {"steps", "epochs"}:  # the command line replaces the file's choice between the two
            from_file = {name: value for name, value in from_file.items() if name not in ("steps", "epochs")}
        try:
            return cls(**{**from_file, **from_line})
        except ValidationError as error:
            raise InputError(_one_line(error, file, from_line)) from None

    def save(self, path: Path) -> None:
        """Write all keys as YAML, for `--config`."""
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        path.write_text(text, encoding="utf-8")

    def ranks(self, command: str) -> int:
        """The number of ranks that the keys ask for, when nothing else has started any."""
        if command not in RANKS.split() or (command == "verify" and self.fuzz):
            return 1
        return self.nproc or (self.dp or 1) * self._ranks_beside_dp

    @property
    def _ranks_beside_dp(self) -> int:
        return self.pp * self.dp_replicate * self.cp * self.tp

    def layout(self) -> Layout:
        """The layout that the keys describe, once ``resolve`` has filled in ``dp``."""
        from nanopar_sft.layout import Layout

        return Layout(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp=self.dp or 1,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            etp=self.tp if self.etp is None else self.etp,
            sp=self.sp and self.tp > 1,
            cp_method=self.cp_method,
            chunks=1 if self.pp == 1 else self.virtual_stages or (2 if self.schedule in SEVERAL_STAGES else 1),
            microbatches=self.microbatches,
        )

    def warmup_steps(self, total_steps: int) -> int:
        """Steps of linear warm-up in a run of `total_steps`."""
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * total_steps)

    def resolve(self, command: str, world_size: int) -> Self:
        """Check what only several keys together can get wrong, and fill in what follows from the others.

        Args:
            command: the command that will run; only keys that it uses are checked.
            world_size: number of ranks that will run it.

        Returns:
            A configuration with the command's own defaults, `dp` set to the layout, `nproc` cleared (it follows from
            the layout; `compare` starts its ranks itself and keeps it), and for `train` either `steps` or `epochs` set.

        Raises:
            InputError: the keys contradict each other, or ask for something that is not available yet.
        """
        if self.two_step + self.three_step > 1:
            raise InputError(
                f"two_step={self.two_step:g} and three_step={self.three_step:g} are shares of the problems: "
                "together they may be at most 1"
            )
        if command == "generate" and not self.prompt:
            raise InputError("generate needs a question: --prompt TEXT")
        if command == "generate" and self.max_new_tokens == 0:
            raise InputError("max_new_tokens=0 lets generate say nothing: use --max-new-tokens 256")
        if command == "export" and not self.resume:
            raise InputError("export needs a checkpoint: --resume DIRECTORY")
        filled = self._with_defaults_of(command)
        if command == COMPARE:
            filled._resolved_dp(COMPARE, world_size)  # refuses to be one of several ranks
            filled._check_batch(filled.nproc or 1, "nproc")
            return filled
        return filled._resolved(command, world_size)

    def _with_defaults_of(self, command: str) -> Self:
        defaults = {
            name: value
            for name, value in DEFAULTS_OF.get(command, {}).items()
            if name not in self.model_fields_set or getattr(self, name) is None
        }
        return self.model_copy(update=defaults)

    def _resolved(self, command: str, world_size: int) -> Self:
        if command == "verify" and self.precision not in ("fp64", "fp32"):
            raise InputError(f"precision={self.precision}: verify compares in fp64, or in fp32 with a wide tolerance")
        if command == "verify" and self.fuzz:
            return self
        filled: dict[str, object] = {"nproc": None, "dp": self._resolved_dp(command, world_size)}
        if command in STEP.split():
            self._check_training(world_size)
            if self.steps is None and self.epochs is None:
                filled["steps"] = DEFAULT_STEPS
        return self.model_copy(update=filled)

    def _resolved_dp(self, command: str, world_size: int) -> int:
        if command not in RANKS.split():
            if world_size != 1:
                raise InputError(f"{command} runs in one process, not in {world_size} ranks")
            return 1
        beside = self._ranks_beside_dp
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "cp": self.cp, "tp": self.tp}
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        if world_size % beside or self.dp not in (None, world_size // beside):
            asked = " x ".join(filter(None, [f"dp={self.dp}" if self.dp else "", shown]))
            needed = f"{(self.dp or 1) * beside} rank(s)" if self.dp else f"a multiple of {beside} ranks"
            raise InputError(
                f"{asked} needs {needed}, but there would be {world_size}: make nproc (or torchrun's --nproc-per-node) "
                "and the layout equal, or leave dp out"
            )
        self._check_axes()
        return world_size // beside

    def _check_axes(self) -> None:
        """What the keys of the layout alone can get wrong."""
        if self.sp and self.tp == 1:
            raise InputError("sp=true divides sequences over the ranks of tp, but tp=1: use tp=2 or more, or sp=false")
        if self.etp not in (None, 1, self.tp):
            raise InputError(f"etp={self.etp} must be 1 or tp={self.tp}: a part of each expert's width, or none")
        stages = self.virtual_stages
        if self.schedule in TWO_STAGES and stages not in (None, 2):
            raise InputError(f"schedule={self.schedule} has 2 stages on a rank, not virtual_stages={stages}")
        if self.schedule not in SEVERAL_STAGES and stages not in (None, 1) and self.pp > 1 and self.schedule != "gpipe":
            raise InputError(
                f"schedule={self.schedule} has 1 stage on a rank, not virtual_stages={stages}: use schedule=interleaved"
            )
        if self.compile and (self.tp, self.cp, self.pp, self.ep) != (1, 1, 1, 1):
            raise InputError("compile=true goes with dp and zero only, not with tp, cp, pp or ep")

    def _check_training(self, world_size: int) -> None:
        if self.steps is not None and self.epochs is not None:
            raise InputError(f"steps={self.steps} and epochs={self.epochs:g} are both set: keep one of them")
        steps = DEFAULT_STEPS if self.steps is None and self.epochs is None else self.steps
        if steps is not None and self.warmup >= 1 and self.warmup_steps(steps) >= steps:
            raise InputError(
                f"warmup={self.warmup:g} leaves no step to train in steps={steps}: use fewer warm-up steps, "
                "or a fraction such as 0.03"
            )
        name = "dp" if self.dp_replicate == 1 else "dp x dp_replicate"
        self._check_batch(self.dp_replicate * (world_size // self._ranks_beside_dp), name)

    def _check_batch(self, ranks: int, key_of_ranks: str) -> None:
        if self.batch_size % (ranks * self.microbatches):
            raise InputError(
                f"batch_size={self.batch_size} is not divisible by {key_of_ranks}={ranks} x "
                f"microbatches={self.microbatches} = {ranks * self.microbatches}: every micro-batch must have the same "
                "number of sequences"
            )


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of `words` that looks most like `word`."""
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def _split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Bring arguments into one form: the YAML file, and `--key=value` tokens with known keys and underscores.

    >>> _split_arguments(["--config", "a.yaml", "--batch-size", "8", "--plot"])
    (PosixPath('a.yaml'), ['--batch_size=8', '--plot=true'])
    """
    file: Path | None = None
    tokens: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            raise InputError(f"unexpected argument '{argument}': keys are written --key value")
        written, equals, value = argument[2:].partition("=")
        name = written.replace("-", "_")
        if name != "config":
            _check_known(name, written, where="")
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif name in Config.model_fields and Config.model_fields[name].annotation is bool:
                value = "true"
            else:
                raise InputError(f"--{written} needs a value")
        if name == "config":
            if file is not None:
                raise InputError(f"--config is given twice ({file} and {value}): use one file")
            file = Path(value)
        elif not _is_neutral(name, value, where=""):
            tokens.append(f"--{name}={value}")
    return file, tokens


def _read_yaml(file: Path) -> dict[str, Any]:
    """The keys of a YAML file, with underscores."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read --config {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not a text file in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}" if mark else str(file)
        raise InputError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise InputError(f"{file}: expected lines of the form 'key: value', found a {type(content).__name__}")
    values: dict[str, Any] = {}
    for written, value in content.items():
        name = str(written).replace("-", "_")
        _check_known(name, str(written), where=f"{file}: ")
        if name in values:
            raise InputError(f"{file}: key '{name}' is given twice")
        if not _is_neutral(name, value, where=f"{file}: "):
            values[name] = value
    return values


def _check_known(name: str, written: str, where: str) -> None:
    known = [*Config.model_fields, *PLANNED]
    if name not in known:
        guess = nearest(name, [*known, *OTHER_NAMES])
        raise InputError(f"{where}unknown key '{written}'; did you mean '{OTHER_NAMES.get(guess, guess)}'?")


def _is_neutral(name: str, value: object, where: str) -> bool:
    """Whether `name` is a planned key at the value that changes nothing; any other value of such a key is refused."""
    if name not in PLANNED:
        return False
    planned = PLANNED[name]
    if planned.refuses(value):
        neutral = str(planned.neutral).lower()
        raise InputError(f"{where}{name}={value}: nanopar-sft cannot {planned.what} yet; use {name}={neutral}")
    return True


def _one_line(error: ValidationError, file: Path | None, from_line: Mapping[str, object]) -> str:
    """What pydantic found wrong, in one line: `FILE: key=value: reason; key=value: reason`."""
    parts = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0])
        where = "" if name in from_line or file is None else f"{file}: "
        if problem["type"] in ("missing", "too_long"):  # a fixed number of values, of which some lack or are too many
            parts.append(f"{where}{name} has the wrong number of values: it needs as many as its default, see --help")
            continue
        reason = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ").split(", unable to")[0]
        parts.append(f"{where}{name}={problem['input']}: must be {reason}")
    return "; ".join(parts)
