"""`recast run` killed again and again: python kill_run.py RECIPE OUT KILLS…, each so many files put in place first.

A process a start, forked from this one before torch has done anything. It kills itself with SIGKILL just before it
would put the file after those in place; the last start is left alone. Jobs are done in the same process.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401
import peft  # noqa: F401
import torch  # noqa: F401

from recast import cli, sweep


def start(recipe: str, out: str, kill: int | None) -> int:
    """The exit status of one start."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    place, left = os.replace, kill

    def replace(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if left is not None:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        place(*arguments, **options)

    def here(jobs: Any, path: Path, workers: int, watch: Any) -> None:
        for job in jobs:
            sweep.run_here(job, path)

    os.replace, sweep.run_jobs = replace, here  # type: ignore[assignment]
    sys.argv = ["recast", "run", recipe, "run.methods=[sinkhorn]", "--out", out]
    cli.main()
    raise AssertionError("main exits")


if __name__ == "__main__":
    recipe, out, *kills = sys.argv[1:]
    died = [os.WTERMSIG(start(recipe, out, int(kill))) for kill in kills]
    print("died of", *died, flush=True)
    sys.exit(os.waitstatus_to_exitcode(start(recipe, out, None)))
