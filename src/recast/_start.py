"""What must hold before anything else is imported, if this process is the command `recast`.

The imports of the package take half a second, in which an interrupt would be a traceback. `python -m recast` puts the
working folder before all others on the import path, where a file such as yaml.py would replace the library.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

__all__ = ["COMMAND", "INTERRUPTED", "interrupt", "prepare"]

INTERRUPTED = "interrupted: run the same command again to resume"
COMMAND = (
    "import sys; sys.argv[0] = 'recast'; sys.path[:] = sys.path[sys.path[:1] == ['']:]; "
    "from {module} import main; main()"
)
"""Code for `python -c` that runs a module's `main` without the working folder on the import path, in any Python."""


def prepare() -> None:
    """Set the process up if it is about to run the command; do nothing if the package is imported as a library."""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    if program not in ("-m", "recast", "recast.exe") or (program == "-m" and not _is_module()):
        return
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have told it to ignore Ctrl-C
            signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread: another program runs this one
        return
    if program != "-m" or getattr(sys.flags, "safe_path", False):
        return
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        here = os.getcwd()
    except OSError:  # it is gone; the command line says so
        return
    if sys.path[:1] == [here] and here != home:
        del sys.path[0]


def _is_module() -> bool:
    """Whether the process is `python -m recast`, and not another module, which may import this package first."""
    words = getattr(sys, "orig_argv", [])
    return "-m" in words and words[words.index("-m") + 1 : words.index("-m") + 2] == ["recast"]


def interrupt(*_: Any) -> None:
    """End with a sentence, before there is anything to clean up."""
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(130)
