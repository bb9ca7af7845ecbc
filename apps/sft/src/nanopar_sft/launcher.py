"""Starting ranks on this machine, through torchrun's own launcher.

    nanopar-sft train --nproc 2
      |  launch(2, ["train", "--nproc", "2"])          this process only waits, and passes the verdict on
      +-- python -m nanopar_sft train --nproc 2        RANK=0 WORLD_SIZE=2 MASTER_PORT=... OMP_NUM_THREADS=...
      +-- python -m nanopar_sft train --nproc 2        RANK=1 ...

The first rank that fails ends the run: the launcher stops the others at once, and only the failed rank has printed a
traceback. No rank outlives the launcher: each asks the kernel to be killed with its parent (on Linux), and a signal to
the launcher (Ctrl-C, SIGTERM) is passed on to all of them.
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence

# What glibc's malloc is told on the ranks: keep freed memory. By default every step gives its large tensors back to the
# kernel and faults them in again, page by page, which can take a tenth of a step on a CPU.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal that this process gets when its parent dies
SHUTDOWN_S = 10  # ranks that ignore a signal this long are killed, where they need not save
SAVING_S = 120  # where they may


def in_rank() -> bool:
    """Whether torchrun, or `launch`, has started this process as one rank."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def world_size() -> int:
    """The number of ranks that this process is one of."""
    return int(os.environ["WORLD_SIZE"])


def end_with_launcher() -> None:
    """Make this rank end at once, without a traceback, on Ctrl-C and when its launcher dies.

    Python's own answer to Ctrl-C, a KeyboardInterrupt, waits until a collective that blocks in C++ returns, and prints
    one traceback per rank.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def launch(
    nproc: int,
    arguments: Sequence[str],
    *,
    threads: int | None = None,
    shutdown_s: int = SHUTDOWN_S,
    module: str = "nanopar_sft",
) -> int:
    """Run `python -m MODULE ARGUMENTS` as `nproc` ranks and wait for them.

    Args:
        nproc: number of ranks.
        arguments: the command line that every rank gets.
        threads: CPU threads of each rank. None: OMP_NUM_THREADS if it is set, else this machine's cores shared out.
        shutdown_s: ranks that have not ended so long after a signal are killed.
        module: what to run.

    Returns:
        The exit status: 0 if all ranks ended well, 2 if one exited with 2 (bad input), 1 if one failed in another way,
        128 + n if signal n ended this process.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks speak for themselves; the launcher's own account of the same failure would only bury it.
    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(logging.NullHandler())
    log.propagate = False

    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads or max(1, usable_cores() // nproc))
    os.environ.update({name: value for name, value in KEEP_MEMORY.items() if name not in os.environ})
    with tempfile.TemporaryDirectory(prefix="nanopar-sft-") as log_dir:
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # port 0: any free one
            local_addr="localhost",  # a machine that cannot resolve its own name can still train
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            shutdown_timeout=shutdown_s,
        )
        try:
            elastic_launch(launch_config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            return _status({rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _status(exit_codes: Mapping[int, int]) -> int:
    """The launcher's exit status, from those of the ranks that did not end well (-n: killed by signal n).

    A rank that was killed could not say so itself, unless it was by SIGTERM: that is how the launcher stops the others.
    """
    for rank, code in exit_codes.items():
        if code < 0 and -code != signal.SIGTERM:
            print(f"nanopar-sft: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
    return 2 if 2 in exit_codes.values() else 1


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
