"""`recast` commands in processes of their own, which can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from recast import _start, processes

__all__ = ["Command", "Launch", "launch"]


class Command(Protocol):
    """A running command."""

    def running(self) -> bool:
        """Whether it has not ended yet."""
        ...

    def kill(self) -> int:
        """Send signal 9 and wait; returns the exit code, or minus the signal."""
        ...

    def wait(self) -> int:
        """Wait until it ends; returns the exit code, or minus the signal."""
        ...

    @property
    def stderr(self) -> str:
        """What it has printed as an error."""
        ...


Launch = Callable[[Sequence[str], Path, int], Command]
"""Starts a command, given its arguments, a folder for what it prints, and the number of processes."""


class _Process:
    def __init__(self, words: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / "stderr.txt"
        with self._errors.open("wb") as errors, (folder / "stdout.txt").open("wb") as output:
            own = os.environ | {processes.PARENT: str(os.getpid())}
            self._process = subprocess.Popen(list(words), stdout=output, stderr=errors, env=own)

    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> int:
        self._process.kill()
        return self._process.wait()

    def wait(self) -> int:
        try:
            return self._process.wait()
        except BaseException:  # an interrupt
            self._process.terminate()
            raise

    @property
    def stderr(self) -> str:
        return self._errors.read_text(encoding="utf-8", errors="replace")


def launch(arguments: Sequence[str], folder: Path, count: int = 1) -> Command:
    """The command with this interpreter, under torchrun if it has several processes."""
    words = [sys.executable, "-c", _start.COMMAND.format(module="recast.cli"), *arguments]
    torchrun = [sys.executable, "-c", _start.COMMAND.format(module="torch.distributed.run"), "--standalone"]
    torchrun += ["--nproc_per_node", str(count), "--no-python"]
    return _Process([*(torchrun if count > 1 else []), *words], folder)
