"""torch.compile for this model: each layer by itself, in place, for sequences of any length.

    embed_tokens -> [layer 0] -> [layer 1] -> ... -> norm -> lm_head -> loss
                     compiled     the same code again

All layers run the same code, so one compilation serves them all; the model as a whole takes as long to compile as it
is deep, and stops being one graph where the batch's padding is looked at on the host. A module compiled in place stays
the module it was: parameter names, hooks and checkpoints do not change, as they would in ``torch.compile``'s wrapper.
"""

import os
import shutil
import sys
from collections.abc import Iterable

from torch import nn


def compile_in_place(layers: Iterable[nn.Module]) -> None:
    """Have torch compile ``layers`` at their first call, for inputs of any size.

    Raises:
        ValueError: no C++ compiler is found (`check_compiler`).
    """
    check_compiler()
    for layer in layers:
        layer.compile(dynamic=True)


def check_compiler() -> None:
    """Raise ``ValueError`` where torch.compile would find no C++ compiler, with the remedy.

    torch takes the one that the variable ``CXX`` names, else ``g++`` (``clang++`` on macOS, ``cl`` on Windows).
    """
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)
    if shutil.which(compiler) is None:
        raise ValueError(
            f"torch.compile needs a C++ compiler and finds no {compiler!r}: install one (Debian, Ubuntu: apt install "
            "g++), name yours in the environment variable CXX, or run without compilation"
        )
