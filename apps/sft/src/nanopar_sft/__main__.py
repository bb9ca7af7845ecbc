"""The command line: `nanopar-sft COMMAND [--config FILE.yaml] [--key value ...]`.

    nanopar-sft ...           parse -> resolve -> preflight -+- one rank ----> the command runs here
    python -m nanopar_sft ... (any error: one line, exit 2)  |
                                                             +- N ranks -----> launcher starts N processes, each
    torchrun -m nanopar_sft ...  each process is one rank <---------------------- one again from the left

Exit status: 0 done, 1 failed, 2 bad input; 128 + n when signal n ended the run (130 for Ctrl-C).
"""

import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence

from nanopar_sft.errors import InputError

OTHER_RANKS_WAIT_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status (errors of the program itself are raised)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except InputError as error:
        if os.environ.get("RANK", "0") != "0":
            # Nearly always rank 0 meets the same error, says so, and torchrun ends this rank while it waits here.
            time.sleep(OTHER_RANKS_WAIT_S)
        print(f"nanopar-sft: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    from nanopar_sft import usage
    from nanopar_sft.commands import COMMANDS
    from nanopar_sft.config import Config, nearest

    command, *rest = arguments or [""]
    if command in ("--help", "-h"):
        print(usage.overview(), end="")
        return 0
    if command == "--version":
        print(f"nanopar-sft {importlib.metadata.version('nanopar-sft')}")
        return 0
    if command not in COMMANDS:
        names = ", ".join(COMMANDS)
        if not command or command.startswith("-"):
            raise InputError(f"the command comes first, one of {names}; see nanopar-sft --help")
        raise InputError(f"unknown command '{command}'; did you mean '{nearest(command, COMMANDS)}'? There are {names}")
    if "--help" in rest or "-h" in rest:
        print(usage.of_command(command), end="")
        return 0

    from nanopar_sft import launcher, preflight

    is_rank = launcher.in_rank()
    if is_rank:
        launcher.end_with_launcher()
    config = Config.parse(rest)
    world_size = launcher.world_size() if is_rank else config.ranks(command)
    config = config.resolve(command, world_size)
    preflight.check(command, config)
    if world_size > 1 and not is_rank and not (command == "train" and config.dry_run):
        shutdown_s = launcher.SAVING_S if command == "train" else launcher.SHUTDOWN_S
        return launcher.launch(world_size, arguments, threads=config.threads, shutdown_s=shutdown_s)
    COMMANDS[command].run(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
