"""`recast` commands in processes of their own, forked from one that has imported torch, which takes ten seconds."""

import importlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from recast import processes

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["recast.cli", "recast.train.stage", "recast.evaluate.stage", "recast.estimate.stage", "recast.flow.sd3"]
)


class Command:
    """A running command; what it prints is written to two files in `folder`."""

    def __init__(self, arguments: Sequence[str], folder: Path, **environment: str) -> None:
        self.places = [folder / f"{name}.txt" for name in ("out", "err")]
        folder.mkdir(parents=True, exist_ok=True)
        self.process = _FORKS.Process(target=_run, args=(list(arguments), list(map(str, self.places)), environment))
        self.process.start()

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.is_alive()

    def kill(self) -> int:
        """Send signal 9, and wait."""
        self.process.kill()
        return self.wait()

    def wait(self, timeout: float = 240) -> int:
        """Exit code, or minus the signal."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, "the command hangs"
        return self.process.exitcode

    @property
    def stdout(self) -> str:
        """What it printed."""
        return self.places[0].read_text()

    @property
    def stderr(self) -> str:
        """What it printed as an error."""
        return self.places[1].read_text()


def launched(arguments: Sequence[str], folder: Path, count: int = 2, **environment: str) -> list[Command]:
    """The command in several processes of one group, with the variables that torchrun sets for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [
        Command(
            arguments,
            folder / str(rank),
            **environment | address | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]


def _run(arguments: list[str], places: list[str], environment: Mapping[str, str]) -> None:
    """The command as `python -m recast` runs it, with one thread."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(environment)
    importlib.reload(processes)  # which has read the number of processes when it was imported
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    for number, place in enumerate(places, start=1):
        file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
    sys.argv = ["recast", *arguments]
    from recast.cli import main

    main()
