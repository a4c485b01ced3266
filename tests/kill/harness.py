"""Starts a stage, kills it with signal 9 at random moments, starts it again, and compares what it leaves.

A moment is a time, at which one of its processes or all are killed, or a file: each process of the stage kills itself
instead of renaming its n-th one.
A start is a process forked from this one, which has imported everything; so are the jobs of `recast run` and
`recast sweep`. A stage of two processes has a launcher that, like torchrun, ends the second one if the first one dies.
"""

import ctypes
import importlib
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.backends.backend_pdf  # noqa: F401
import peft  # noqa: F401
import torch
from matplotlib.figure import Figure
from stages import CONCURRENCY, Paid, Stage, same_files, serving

import recast.evaluate.stage
import recast.train.stage  # noqa: F401
from recast import cli, processes
from recast.report import figures
from recast.sweep import workers

__all__ = ["Outcome", "kill"]

LIMIT = 120.0
"""Seconds after which a start is said to hang."""
_DIED = "died"
"""The mark of a process that has killed itself."""
GONE = 10.0
"""Seconds after which the processes of a killed start are said to be left over."""


@dataclass
class Outcome:
    """What became of the kills of one stage."""

    name: str
    alone: int = 0
    group: int = 0
    renames: int = 0
    compared: int = 0
    differing: int = 0
    left: int = 0
    tracebacks: int = 0
    hangs: int = 0
    unpaid: int = 0
    detail: str = ""

    @property
    def kills(self) -> int:
        """How often a process was killed."""
        return self.alone + self.group + self.renames

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.differing or self.left or self.tracebacks or self.hangs or self.unpaid)


class _Job:
    """What `recast.sweep.workers` needs of a subprocess, for a forked one."""

    def __init__(self, words: Sequence[str], environment: dict[str, str]) -> None:
        read, write = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _main(words, os.open(os.devnull, os.O_WRONLY), write, environment)
        os.close(write)
        self.stderr = os.fdopen(read)

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


def _main(words: Sequence[str], out: int, err: int, environment: dict[str, str]) -> None:
    """The command in this process, which ends with it."""
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.update(environment)
        importlib.reload(processes)  # which has read the number of processes when it was imported
        sys.stdout, sys.stderr = (os.fdopen(k, "w", buffering=1, encoding="utf-8", closefd=False) for k in (1, 2))
        sys.argv = ["recast", *words]
        workers._begin = lambda words, slot, count, *_: _Job(words, workers.environment(slot, count))  # type: ignore
        figures.gain_figure = lambda *_: Figure(figsize=(1, 1))  # type: ignore[assignment]
        cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _launch(words: Sequence[str], said: int, ranks: int) -> None:
    """Run so many processes of one group; if one fails, the others are ended, as torchrun does it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "kill"}
    children = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        children.append(os.fork())
        if not children[-1]:
            _main(words, said, said, where | own)
    code = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not code:
            code = 1
            for other in children:
                os.kill(other, signal.SIGTERM)
    os._exit(code)


def _start(stage: Stage, folder: Path, url: str, renames: int | None = None) -> int:
    """The leader of a new process group that runs the stage in a folder, and dies after so many renamed files."""
    words = [*(word.format(url=url) for word in stage.command)]
    words += [] if stage.name == "judge" else ["--out", "run"]
    (folder.parent / _DIED).unlink(missing_ok=True)
    child = os.fork()
    if child:
        with suppress(OSError):  # it has ended already
            os.setpgid(child, child)
        return child
    os.setpgid(0, 0)
    os.chdir(folder)
    said = os.open(folder.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.environ.update(stage.environment)
    if renames is not None:
        _die_after(renames, folder.parent / _DIED)
    if stage.ranks > 1:
        _launch(words, said, stage.ranks)
    _main(words, said, said, {})
    raise AssertionError("it has ended")


def _die_after(renames: int, mark: Path) -> None:
    """Kill this process, and those it forks, instead of renaming a file once it has renamed so many; leave a mark."""
    place, left = os.replace, renames

    def replace(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if left == 0:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        place(*arguments, **options)

    os.replace = replace  # type: ignore[assignment]


def _members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgid = place.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if int(pgid) == group and state != "Z":
            found.append(int(place.parent.name))
    return found


def _ended(child: int, until: float) -> int | None:
    """The exit code of a process that ends before a moment, else None."""
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _strike(child: int, chance: random.Random, outcome: Outcome) -> None:
    """Kill one process of a start or all of them, and wait until none is left.

    A start goes on without a process that only shared the prompts of an estimate, and then ends by itself.
    """
    struck = child
    with suppress(ProcessLookupError):  # a job that has ended meanwhile
        if chance.random() < 0.5:
            outcome.group += 1
            os.killpg(child, signal.SIGKILL)
        else:
            outcome.alone += 1
            struck = chance.choice(_members(child) or [child])
            os.kill(struck, signal.SIGKILL)
    _clear(child, outcome, wait=GONE if struck == child else LIMIT)


def _clear(child: int, outcome: Outcome, reaped: bool = False, wait: float = GONE) -> None:
    """Wait until no process of a start is left, `wait` seconds for the first one of them."""
    reaped = reaped or _ended(child, time.monotonic() + wait) is not None
    until = time.monotonic() + GONE
    while reaped and time.monotonic() < until:
        try:
            if not os.waitpid(-child, os.WNOHANG)[0]:  # jobs, which are ours now
                time.sleep(0.01)
        except ChildProcessError:
            return
    if not reaped or _members(child):
        outcome.left += 1
        outcome.detail = f"{len(_members(child))} processes left after {GONE:g} seconds"
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not reaped:
            os.waitpid(child, 0)


def kill(stage: Stage, count: int, folder: Path, seed: int = 0) -> Outcome:
    """Kill a stage so often; between two kills it is started again, until it ends and its files are compared."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children, which can be waited for
    chance, outcome, paid = random.Random(f"{stage.name} {seed}"), Outcome(stage.name), Paid()
    server, url = serving(stage, paid) if stage.server else (0, "")
    calm, work = folder / "calm/work", folder / "killed/work"
    _fresh(stage, calm)
    begun = time.monotonic()
    code = _ended(_start(stage, calm, url), begun + LIMIT)
    assert code == 0, f"{stage.name}: {code}: {(calm.parent / 'said.txt').read_text()}"
    duration = time.monotonic() - begun
    while outcome.kills < count:
        _fresh(stage, work)
        paid.reset()
        struck = _chain(stage, work, url, duration, count, chance, outcome)
        if outcome.hangs or outcome.tracebacks:
            break
        outcome.compared += 1
        if found := same_files(calm, work):
            outcome.differing += 1
            outcome.detail = f"differ: {', '.join(found[:5])}"
        if stage.cost is not None:
            counted, least = stage.cost(work)
            if not paid.count <= counted <= least + struck * CONCURRENCY:
                outcome.unpaid += 1
                outcome.detail = f"{paid.count} requests, {counted} counted, {least} needed, {struck} kills"
    if server:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return outcome


def _chain(
    stage: Stage, work: Path, url: str, duration: float, count: int, chance: random.Random, outcome: Outcome
) -> int:
    """Start and kill a stage until it ends; the number of kills."""
    struck = 0
    while True:
        more = outcome.kills < count
        renames = chance.randrange(12) if more and chance.random() < 0.3 else None
        child = _start(stage, work, url, renames)
        wait = chance.uniform(0, duration) if more and renames is None else LIMIT
        code = _ended(child, time.monotonic() + wait)
        if code is None and wait == LIMIT:
            outcome.hangs += 1
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return struck
        died = code != 0 and (work.parent / _DIED).exists()  # it, or a job of it
        if died:
            outcome.renames += 1
            _clear(child, outcome, reaped=True)
        elif code is None:
            _strike(child, chance, outcome)
        struck += died or code is None
        said = (work.parent / "said.txt").read_text(errors="replace") if (work.parent / "said.txt").exists() else ""
        if "Traceback" in said or not (died or code in (0, None)):
            outcome.tracebacks += 1
            outcome.detail = f"exit code {code}: {said.strip()[-600:]}"
        if code == 0 or (code is not None and not died):
            return struck


def _fresh(stage: Stage, folder: Path) -> None:
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    child = os.fork()  # which may use torch: this process must not, as long as it forks others
    if not child:
        stage.prepare(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts by stage."""
    names = (
        "one process",
        "all",
        "at a rename",
        "compared",
        "differing",
        "left over",
        "tracebacks",
        "hangs",
        "uncounted calls",
    )
    lines = [f"{'stage':20}" + "".join(f"{name:>17}" for name in names)]
    for each in outcomes:
        kills = (each.alone, each.group, each.renames)
        faults = (each.differing, each.left, each.tracebacks, each.hangs, each.unpaid)
        lines.append(f"{each.name:20}" + "".join(f"{n:17d}" for n in (*kills, each.compared, *faults)))
    return "\n".join(lines)
