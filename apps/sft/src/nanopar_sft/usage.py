"""The texts of --help, made from the configuration itself, so that they cannot disagree with it."""

import shutil
import textwrap
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nanopar_sft.commands import COMMANDS
from nanopar_sft.config import DEFAULTS_OF, Config

EXAMPLES = """\
  nanopar-sft train                                             learn generated problems: no network, no files
  nanopar-sft train --nproc 2 --config apps/sft/recipes/demo.yaml --steps 300
  nanopar-sft generate --model runs/sft --prompt "Ann has 3 cards. Ann finds 4 more. How many cards does Ann have?"
"""

NOTES = """\
Keys can be written with - or _, in the YAML file too. Lists: --freeze A --freeze B or --freeze A,B.
The command line wins over the file, the file over the defaults. Environment variables are not read.
Exit status: 0 done, 1 failed, 2 bad input (one line says what; nothing was started or written).
"""


def overview() -> str:
    """What `nanopar-sft --help` prints."""
    commands = "\n".join(f"  {name:10s}{command.summary}" for name, command in COMMANDS.items())
    return (
        "nanopar-sft: fine-tune Phi-MoE on question-and-answer data\n\n"
        "usage: nanopar-sft COMMAND [--config FILE.yaml] [--key value ...]\n"
        "       nanopar-sft COMMAND --help      all keys of a command, with defaults\n\n"
        f"commands:\n{commands}\n\nexamples:\n{EXAMPLES}\n{NOTES}"
    )


def of_command(command: str) -> str:
    """What `nanopar-sft COMMAND --help` prints: the keys that this command uses, under their headings."""
    width = min(shutil.get_terminal_size().columns, 120)
    groups: dict[str, list[str]] = {}
    for name, field in Config.model_fields.items():
        shown = field.json_schema_extra
        assert isinstance(shown, dict)
        if command in shown["commands"]:  # type: ignore[operator]  # a list, typed as any JSON value
            default = DEFAULTS_OF.get(command, {}).get(name, field.default)
            groups.setdefault(str(shown["group"]), []).append(_entry(name, field, default, width))
    keys = "\n".join(f"{group}\n{''.join(entries)}" for group, entries in groups.items())
    usage = f"usage: nanopar-sft {command} [--config FILE.yaml] [--key value ...]" if keys else ""
    body = f"{usage}\n\n{keys}\n{NOTES}" if keys else f"usage: nanopar-sft {command}\n"
    return f"nanopar-sft {command}: {COMMANDS[command].summary}\n\n{body}"


def _entry(name: str, field: FieldInfo, default: object, width: int) -> str:
    """`  --key VALUE     description  [default]`, wrapped to the width of the terminal."""
    column = 30
    head = f"  --{name} {_placeholder(field.annotation)}".ljust(column)
    gap = "" if len(head) == column else "\n" + " " * column
    text = f"{field.description}  [{_shown_default(default)}]"
    wrapped = textwrap.wrap(text, max(width - column, 30), break_long_words=False)
    return head + gap + ("\n" + " " * column).join(wrapped) + "\n"


def _placeholder(annotation: Any) -> str:
    """What stands for the value: N for an integer, X for a number, the choices where there are few."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return _placeholder(next(part for part in get_args(annotation) if part is not type(None)))
    if origin is Literal:
        return "|".join(get_args(annotation))
    if origin is tuple:
        return "A,B"
    return {int: "N", float: "X", bool: "true|false", Path: "DIR"}.get(annotation, "TEXT")


def _shown_default(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
