"""Every method, budget and seed of a comparison: planned, run on the local devices, and set aside where it is stale.

A job is one trained policy in a folder of its own, `RUN/[BUDGET/]METHOD-sSEED`; RUN/base is the untrained one. Jobs are
the public commands `recast train` and `recast evaluate`, so that a queue can run them just as well.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recast import config, processes
from recast.config import Recipe
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import RecastError, StaleError
from recast.weigh import Method, weigh

PARENT = "RECAST_PARENT"
"""The process that a job ends with: set for jobs, so that none goes on when `recast run` was killed."""


@dataclass(frozen=True)
class Job:
    """One policy to train and evaluate, or, without a method, the base to evaluate."""

    folder: Path
    method: Method | None
    budget: tuple[tuple[str, float], ...]
    seed: int
    overrides: tuple[str, ...]

    def commands(self, recipe: Path) -> list[list[str]]:
        """What `recast` is called with, one after the other."""
        tail = [str(recipe), *self.overrides, "--out", str(self.folder)]
        if self.method is None:
            return [["evaluate", *tail, "--base"]]
        return [["train", *tail], ["evaluate", *tail]]


def budgets_of(recipe: Recipe, given: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The given budgets; else, as in the paper, every reward alike and then each of them doubled, the last first."""
    if recipe.world.kind != "images":
        raise RecastError(f"a sweep trains policies that make images, and world.kind = {recipe.world.kind} has none")
    names = list(recipe.rewards)
    for name in (name for budget in given for name in budget):
        if name not in names:
            raise RecastError(f"sweep.budgets names {name!r}, but the recipe's rewards are {', '.join(names)}")
    if given:
        return [dict(budget) for budget in given]
    even = dict.fromkeys(names, 1.0)
    return [even, *(even | {name: 2.0} for name in reversed(names))]


def plan(
    recipe: Recipe, out: Path, methods: Sequence[Method], seeds: Sequence[int], budgets: Sequence[Mapping[str, float]]
) -> list[Job]:
    """The base, then every (seed, budget, method), matched by construction: only W differs within a pair."""
    jobs = [Job(out / "base", None, (), recipe.train.seed, ())]
    for seed in seeds:
        for budget in budgets:
            name = "b" + "-".join(f"{weight:g}" for weight in budget.values())
            parent = out / name if len(budgets) > 1 else out
            for method in methods:
                shares = ", ".join(f"{reward}: {weight:g}" for reward, weight in budget.items())
                overrides = (f"weigh.method={method}", f"weigh.budget={{{shares}}}", f"train.seed={seed}")
                jobs.append(Job(parent / f"{method}-s{seed}", method, tuple(budget.items()), seed, overrides))
    return jobs


def prepare(recipe: Recipe, path: Path, curves: GainCurves, job: Job) -> str | None:
    """W of a job in its folder; what was made with other settings is set aside, and the sentence says so."""
    settings = config.load(path, job.overrides)
    said = None
    if job.method is not None:
        entropic = job.method in ("sinkhorn", "reversed", "shuffled")
        matrix = weigh(
            curves,
            dict(job.budget),
            job.method,
            tau=recipe.weigh.tau if entropic else 1.0,
            shrink=recipe.weigh.shrink and job.method != "static",
            seed=recipe.weigh.seed,
        )
        said = _refresh_training(settings, job.folder, matrix)
        matrix.save(job.folder / "weights.json")
    return _refresh_scores(settings, job) or said


def _refresh_training(settings: Recipe, folder: Path, matrix: WeightMatrix) -> str | None:
    from recast import prompts
    from recast.train import checkpoint, stage

    found = checkpoint.all_of(folder / "checkpoints")
    if not found:
        return None
    try:
        wanted = stage.identity(settings, matrix, prompts.load(settings.train.prompts))
        if checkpoint.read_state(found[-1], wanted)[0].epoch > settings.train.epochs:
            raise StaleError(f"{found[-1]} was trained for longer than train.epochs = {settings.train.epochs}")
    except StaleError as error:
        return set_aside(folder, error)
    return None


def _refresh_scores(settings: Recipe, job: Job) -> str | None:
    from recast import evaluate

    folder, lora = job.folder / "scores", None if job.method is None else job.folder / "lora"
    if not folder.is_dir():
        return None
    try:
        if not _trained(settings, job):
            raise StaleError(f"{folder} holds images of an earlier epoch")
        evaluate.check_stale(settings, folder, lora)
    except StaleError as error:
        return set_aside(folder, error)
    return None


def _trained(settings: Recipe, job: Job) -> bool:
    """Whether a job's last epoch is done; the base has none."""
    from recast.train import checkpoint

    if job.method is None:
        return True
    found = checkpoint.all_of(job.folder / "checkpoints")
    last = checkpoint.name(checkpoint.Position(settings.train.epochs))
    return bool(found) and found[-1].name == last and (job.folder / "lora").is_dir()


def finished(path: Path, job: Job) -> bool:
    """Whether a job that `prepare` has looked at has nothing left to do."""
    from recast import evaluate

    settings = config.load(path, job.overrides)
    return _trained(settings, job) and evaluate.complete(settings, job.folder / "scores")


def set_aside(folder: Path, reason: Exception) -> str:
    """Rename what is stale; nothing is deleted, since images may have been paid for."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.stale-{number}")).exists():
        number += 1
    folder.rename(target)
    return f"{str(reason).partition(': choose')[0]}; it is now {target.name}, and is made anew"


def command_lines(jobs: Sequence[Job], recipe: Path) -> list[str]:
    """One line a job for a queue; matched jobs are neighbours."""
    return [" && ".join("recast " + shlex.join(words) for words in job.commands(recipe)) for job in jobs]


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


def run_here(job: Job, recipe: Path) -> None:
    """A job in this process, as one of a launcher's."""
    from recast import evaluate
    from recast.train import stage

    settings = config.load(recipe, job.overrides)
    if job.method is not None:
        stage.train(settings, job.folder)
    lora = None if job.method is None else job.folder / "lora"
    evaluate.evaluate(settings, job.folder, lora, lambda items, *_: items)


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


def epochs_done(job: Job) -> int:
    """Epochs of a job that are logged."""
    path = job.folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def facts(jobs: Sequence[Job]) -> dict[str, Any]:
    """How many of what, for a line before the work begins."""
    trained = [job for job in jobs if job.method is not None]
    return {
        "methods": len({job.method for job in trained}),
        "budgets": len({job.budget for job in trained}),
        "seeds": len({job.seed for job in trained}),
        "runs": len(trained),
    }
