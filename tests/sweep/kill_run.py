"""`recast run` killed again and again: python kill_run.py RECIPE CALM KILLED KILLS…, each after so many written files.

CALM is a run that nobody kills, KILLED one that is started once per number and then once more. Every start is a process
forked from this one before torch has done anything. It kills itself with SIGKILL just before it would rename the next
file into place; the last start runs to its end. Jobs run in the same process, and the figure of the curves is blank.
"""

import os
import signal
import sys
from typing import Any

import diffusers  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.backends.backend_pdf  # noqa: F401
import peft  # noqa: F401
import torch  # noqa: F401
from matplotlib.figure import Figure

from recast import cli
from recast.report import figures
from recast.sweep import jobs, workers


def start(recipe: str, out: str, kill: int | None) -> int:
    """The process of one start."""
    child = os.fork()
    if child:
        return child
    place, left = os.replace, kill

    def replace(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if left is not None:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        place(*arguments, **options)

    def here(order: Any, count: int, watch: Any) -> None:
        for job in order:
            jobs.run_here(job)

    os.replace, workers.run_jobs = replace, here  # type: ignore[assignment]
    figures.gain_figure = lambda *_: Figure(figsize=(1, 1))  # type: ignore[assignment]
    sys.argv = ["recast", "run", recipe, "run.methods=[sinkhorn]", "--out", out]
    cli.main()
    raise AssertionError("main exits")


def status(child: int) -> int:
    """The status of a process once it has ended."""
    return os.waitpid(child, 0)[1]


if __name__ == "__main__":
    recipe, calm, killed, *kills = sys.argv[1:]
    beside = start(recipe, calm, None)
    died = [os.WTERMSIG(status(start(recipe, killed, int(kill)))) for kill in kills]
    print("died of", *died, flush=True)
    ended = [os.waitstatus_to_exitcode(status(child)) for child in (start(recipe, killed, None), beside)]
    sys.exit(max(map(abs, ended)))
