"""Running jobs on the local devices, each in a process of its own."""

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
from pathlib import Path
from typing import TYPE_CHECKING

from recast import processes
from recast.errors import RecastError

if TYPE_CHECKING:
    from recast.sweep.jobs import Job

PARENT = "RECAST_PARENT"
"""The process that a job ends with: set for jobs, so that none goes on when `recast run` was killed."""


def run_jobs(jobs: Sequence[Job], recipe: Path, workers: int, watch: Callable[[Mapping[Job, str]], None]) -> None:
    """Run jobs on the local devices, `workers` at a time; the first that fails stops new ones and is the error."""
    slots: queue.Queue[int] = queue.Queue()
    for slot in range(workers):
        slots.put(slot)
    running: dict[Job, str] = {}
    stop = threading.Event()

    def one(job: Job) -> None:
        slot = slots.get()
        try:
            for words in job.commands(recipe):
                if stop.is_set():
                    return
                running[job] = words[0]
                _call(words, slot, workers, stop)
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
    """Tell `watch` twice a second what is being done."""
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


def _call(words: Sequence[str], slot: int, workers: int, stop: threading.Event) -> None:
    """One command in a process of its own, which ends when this one does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "recast", *words],
        env=os.environ | environment(slot, workers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
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
        said = [line.strip() for line in lines if line.strip()]
        reason = next(
            (line.removeprefix("error: ") for line in said if line.startswith("error: ")), (said or ["?"])[-1]
        )
        raise RecastError(f"`recast {shlex.join(words)}` failed: {reason}")


def environment(slot: int, workers: int) -> dict[str, str]:
    """What gives a job its own GPU, or its share of the cores."""
    import torch

    found = {PARENT: str(os.getpid()), "TRANSFORMERS_VERBOSITY": "error"}
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
        return found | {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]}
    return found | {"OMP_NUM_THREADS": str(max(1, processes.cores() // workers))}


def workers_here() -> int:
    """Jobs at a time: one a GPU, or one a core."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else processes.cores()


def end_with_parent() -> None:
    """In a job: end as soon as the process that started it is gone."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
