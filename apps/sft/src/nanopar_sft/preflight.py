"""Checks that need more than the configuration: files, presets, data. They run before any rank is started."""

from pathlib import Path

from nanopar_models.compiling import check_compiler
from nanopar_sft import assemble, candidates, report, tiny, verify, workload
from nanopar_sft.checkpoints import checkpoint_of, newest_checkpoint
from nanopar_sft.config import Config, nearest
from nanopar_sft.errors import InputError


def check(command: str, config: Config) -> None:
    """Raise InputError if ``command`` cannot run with ``config``; reads little, writes nothing.

    Data files are read here row by row, so that a malformed row is named before ranks start; what takes a download, or
    the reading of weights, is left to the ranks, which also write nothing before they have read it.
    """
    if command in ("train", "eval", "generate", "trace") or (command == "verify" and not tiny.is_tiny(config.model)):
        _check_model(config.model)
    if command in ("train", "eval", "generate", "trace") and _is_here(config.model):
        make = assemble.model_to_train if command in ("train", "trace") else assemble.model_to_answer
        make(config, assemble.load_chat(config))
    if command == "verify" and not config.fuzz:
        assemble.check_layout(config, verify.shape_of(config), training=True)
    if command in ("train", "eval", "data", "trace"):
        _check_data(command, config)
    if command in ("train", "trace") and config.compile:
        _check_compiler()
    if command == "train" and config.resume not in (None, "auto"):
        checkpoint_of(str(config.resume), config.output_dir)
    if command == "train":
        report.check_log(config.log)
        _check_no_other_run(config)
    if command == "compare":
        candidates.chosen(config.strategies, config.peers)
        _check_workload(config)
    if command in ("train", "trace", "compare"):
        _check_output(config.output_dir)


def _check_model(model: str) -> None:
    if model in assemble.PRESETS or Path(model).is_dir():
        return
    if "/" not in model or model.startswith((".", "/")) or model.count("/") > 1:
        guess = nearest(model, assemble.PRESETS)
        raise InputError(
            f"model={model}: neither a preset ({', '.join(assemble.PRESETS)}), nor a directory, nor a hub id like "
            f"owner/name; did you mean {guess}?"
        )


def _is_here(model: str) -> bool:
    """Whether its sizes can be read without a download."""
    return model in assemble.PRESETS or (Path(model) / "config.json").is_file()


def _check_workload(config: Config) -> None:
    if config.model not in workload.GENERATED:
        _check_model(config.model)
    positions = workload.positions(config.model)
    if positions is not None and config.seq_len > positions:
        raise InputError(f"seq_len={config.seq_len} is longer than the {positions} positions of model={config.model}")


def _check_compiler() -> None:
    try:
        check_compiler()
    except ValueError as error:
        raise InputError(f"compile=true: {error}") from None


def _check_data(command: str, config: Config) -> None:
    files = assemble.FILE_ENDINGS
    if command != "eval" and config.data.endswith(files):
        assemble.training_rows(config)
    if command == "eval" and (config.eval_data or config.data).endswith(files):
        assemble.test_rows(config)
    if command == "train" and (config.eval_data or "").endswith(files):
        assemble.test_rows(config)


def _check_no_other_run(config: Config) -> None:
    """A new run must not lie among the checkpoints of an old one: resume=auto and export could not tell them apart."""
    newest = newest_checkpoint(config.output_dir)
    if newest is not None and config.resume is None:
        raise InputError(
            f"output_dir={config.output_dir} holds checkpoints of an earlier run, the newest is {newest.name}: go on "
            "with --resume auto, choose another --output-dir, or remove them"
        )


def _check_output(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output_dir={folder} exists and is not a directory")
