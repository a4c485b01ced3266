"""Run jobs on the local devices, each in a separate process."""

from __future__ import annotations

import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from recast import _start, processes
from recast.errors import RecastError

if TYPE_CHECKING:
    from recast.sweep.jobs import Job

__all__ = ["beside", "end_with_parent", "environment", "run_jobs", "workers_here"]


def run_jobs(jobs: Sequence[Job], workers: int, watch: Callable[[Mapping[Job, str]], None]) -> None:
    """Run jobs on the local devices, `workers` at a time; the first failure stops all of them and is raised.

    A job starts once the one that it resumes from is done, which must come before it in `jobs`. `watch` is called twice
    a second with the running jobs and their current command.
    """
    slots: queue.Queue[int] = queue.Queue()
    for slot in range(workers):
        slots.put(slot)
    running: dict[Job, str] = {}
    stop = threading.Event()
    done = {job.folder: threading.Event() for job in jobs}

    def one(job: Job) -> None:
        while job.after in done and not done[job.after].wait(0.1):
            if stop.is_set():
                return
        slot = slots.get()
        try:
            for words in job.commands():
                if stop.is_set():
                    return
                running[job] = words[0]
                _call(words, slot, workers, stop)
            done[job.folder].set()
        except BaseException:
            stop.set()
            raise
        finally:
            running.pop(job, None)
            slots.put(slot)

    with _looking(running, watch), ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(one, job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop.set()
            raise


@contextmanager
def _looking(running: Mapping[Job, str], watch: Callable[[Mapping[Job, str]], None]) -> Iterator[None]:
    """Call `watch` twice a second with the running jobs."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            watch(dict(running))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        watch({})


@contextmanager
def beside(words: Sequence[str], workers: int) -> Iterator[None]:
    """Run a command on all local devices but the first, which the block uses, for work that processes share.

    The block ends when all of them have. They are stopped if the block fails; an error of their own is ignored, because
    the block then does their part.
    """
    # A pipe that nobody reads would stop a process that prints much.
    others = [_begin(words, slot, workers, subprocess.DEVNULL) for slot in range(1, workers)]
    try:
        yield
    except BaseException:
        for process in others:
            process.kill()
        raise
    finally:
        for process in others:
            process.wait()


def _begin(words: Sequence[str], slot: int, workers: int, errors: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _start.COMMAND.format(module="recast.cli"), *words],
        env=os.environ | environment(slot, workers),
        stdout=subprocess.DEVNULL,
        stderr=errors,
        text=True,
    )


def _call(words: Sequence[str], slot: int, workers: int, stop: threading.Event) -> None:
    """Run one command in a separate process, which ends when this one does; its error is raised as RecastError."""
    process = _begin(words, slot, workers)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            if stop.is_set():
                process.terminate()
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.kill()
    reader.join(10)
    if process.returncode and not stop.is_set():
        output = [line.strip() for line in lines if line.strip()]
        errors = [line.removeprefix("error: ") for line in output if line.startswith("error: ")]
        reason = (errors[:1] or output[-1:] or ["it printed no error"])[0]
        raise RecastError(f"`recast {shlex.join(words)}` failed: {reason}")


def environment(slot: int, workers: int) -> dict[str, str]:
    """Environment variables that give a job its own GPU, or its share of the cores."""
    import torch

    found = {processes.PARENT: str(os.getpid()), "TRANSFORMERS_VERBOSITY": "error"}
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
        return found | {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]}
    return found | {"OMP_NUM_THREADS": str(max(1, processes.cores() // workers))}


def workers_here() -> int:
    """The number of jobs to run at a time: one per GPU, or one per core."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else processes.cores()


def end_with_parent() -> None:
    """End this process, if it is a job or a worker of torchrun, as soon as the process that started it has ended.

    A worker whose launcher was killed would wait for the others for minutes and occupy their port.
    """
    if os.name == "nt":  # where the interpreter of a virtual environment is the child of another process
        return
    named = os.environ.get(processes.PARENT, "")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
    elif named.isascii() and named.isdigit():
        parent = int(named)
    else:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
