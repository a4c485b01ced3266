"""`recast selftest`: every stage of a recipe at tiny settings, on its own model, rewards and device."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from recast import device, prompts
from recast.config import Recipe
from recast.core import artifact
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.flow.lora import FILE
from recast.rewards import check as rewards
from recast.selftest import compare
from recast.selftest.commands import Launch, launch
from recast.selftest.report import Check, Report, machine

__all__ = ["PROMPTS", "STEPS", "selftest", "tiny"]

PROMPTS, STEPS, EPOCHS = 2, 3, 3
_MARK, _REPORT = ".recast-selftest", "selftest.md"
_PATIENCE = 3600.0
"""Seconds until a command counts as hanging."""
OnCheck = Callable[[Check], None]


def selftest(
    recipe: Recipe,
    out: Path,
    processes: int | None = None,
    on_check: OnCheck = lambda _: None,
    start: Launch = launch,
) -> Report:
    """Run all checks and write the report to OUT/selftest.md.

    Parameters
    ----------
    recipe : Recipe
        The policy, rewards and prompts that are tested; sizes are replaced by `tiny` ones.
    out : Path
        Folder of the artifacts. One of an earlier self-test is replaced; any other that exists is refused.
    processes : int, optional
        Processes of the check with several; by default 2 if there are two GPUs, else that check is not run.
    on_check : callable, optional
        Called with every check as soon as it is done.
    start : callable, optional
        Starts a `recast` command.

    Returns
    -------
    Report

    Raises
    ------
    RecastError
        If the recipe cannot be tested, or `out` is another folder.
    """
    where = device.pick(recipe.policy.device)
    _prepare(recipe, out)
    settings = tiny(recipe, out)
    settings.save(out / "recipe.yaml")
    if processes is None:
        processes = 2 if torch.cuda.device_count() > 1 else 1
    facts = machine(str(where)) | {"model": _name(recipe.policy.model), "dtype": recipe.policy.dtype}
    facts |= {"quantize": recipe.policy.quantize, "rewards": ", ".join(recipe.rewards)}
    found = []
    texts = [row["prompt"] for row in prompts.load(settings.prompts.source)]
    for check in _all(settings, out, texts, processes, start):
        found.append(check)
        on_check(check)
    report = Report(facts, found)
    artifact.write_text(out / _REPORT, report.text())
    return report


def _all(recipe: Recipe, out: Path, texts: Sequence[str], processes: int, start: Launch) -> Iterator[Check]:
    yield from compare.checks(recipe, texts)
    _free()
    for name, options in recipe.rewards.items():
        yield _measured(f"reward {name}", lambda name=name, options=options: _reward(name, options or {}))  # type: ignore[misc]
        _free()  # the stages below load the same models in processes of their own
    stages = _Stages(recipe, out, start)
    for name in ("propose", "estimate", "weigh", "train", "evaluate"):
        check = _measured(f"stage {name}", lambda name=name: stages.run(name))  # type: ignore[misc]
        yield check
        if check.outcome == "failed":
            return
    yield _measured("killed and resumed", stages.killed)
    if processes > 1:
        yield _measured(f"{processes} processes", lambda: stages.together(processes))
    else:
        yield Check("several processes", "not run", "there are no two GPUs; --processes 2 runs it on the CPU")


def _measured(name: str, call: Callable[[], Check]) -> Check:
    begun = time.perf_counter()
    try:
        made = call()
    except Exception as error:  # a failure of one check must not lose the report of the others
        words = str(error) if isinstance(error, RecastError) else f"{type(error).__name__}: {error}"
        made = Check(name, "failed", words.replace(str(Path.home()), "~"))
    return replace(made, name=name, seconds=time.perf_counter() - begun)


def _free() -> None:
    """Return the memory of models that are no longer used to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tiny(recipe: Recipe, out: Path) -> Recipe:
    """The recipe at the smallest settings that run every line: two prompts, three steps, three epochs of four images.

    Proposals are the policy's own images, and nothing that costs money is asked: held-out rewards are left out.
    """
    source = str(out / "prompts.jsonl")
    changes: dict[str, dict[str, Any]] = {
        "prompts": {"source": source, "count": None, "seed": None},
        "propose": {"source": "policy", "folder": None},
        "estimate": {"estimator": "coupled", "sampler": None, "steps": STEPS, "samples": 2, "noisings": 2},
        "weigh": {"method": "sinkhorn", "columns": "uniform"},
        "train": {"prompts": source, "resume_from": None, "lora": None, "epochs": EPOCHS, "steps": None}
        | {"prompts_per_epoch": PROMPTS, "images_per_prompt": 2, "batch": 2, "fraction": 1.0, "sample_batch": 2}
        | {"micro_batch": 3, "kl_every": 1, "save_every": 1, "preview_every": 0, "trackers": [], "reweigh_every": 0},
        "evaluate": {"prompts": source, "count": None, "repeats": 1, "steps": STEPS, "held_out": {}},
    }
    content = recipe.resolved()
    for section, values in changes.items():
        content[section] |= values
    return Recipe.model_validate(content)


def _prepare(recipe: Recipe, out: Path) -> None:
    """Check what is known before anything is loaded, and make an empty OUT with the prompts."""
    if recipe.world.kind != "images" or not recipe.rewards:
        raise RecastError("a self-test needs a recipe with world.kind = images and at least one reward")
    rows = prompts.load(recipe.train.prompts)
    chosen = list({row["prompt"]: row for row in rows}.values())[:PROMPTS]
    if len(chosen) < PROMPTS:
        raise RecastError(f"{recipe.train.prompts} has one prompt, but a self-test needs {PROMPTS} different ones")
    if out.exists():
        if not (out / _MARK).is_file():
            raise RecastError(f"{out} exists and is not the folder of a self-test: choose another --out")
        shutil.rmtree(out)
    artifact.write_text(out / _MARK, "The folder of a self-test, which the next one replaces.\n")
    artifact.write_text(out / "prompts.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen))


def _reward(name: str, options: dict[str, Any]) -> Check:
    """The trials of `recast rewards check`."""
    outcomes = rewards.run(name, options)
    wrong = [each.what for each in outcomes if not each.passed]
    if wrong:
        return Check("", "failed", f"{len(wrong)} of {len(outcomes)} trials, such as {wrong[0]}")
    return Check("", "passed", f"{len(outcomes)} trials")


class _Stages:
    """The stages of one recipe in OUT/run, and their repetitions in other folders beside it."""

    def __init__(self, recipe: Recipe, out: Path, start: Launch) -> None:
        self._recipe, self._out, self._start = recipe, out, start

    def run(self, verb: str) -> Check:
        """One stage, and what it must have written."""
        self._finish(verb, "run")
        folder = self._out / "run"
        if verb == "estimate":
            curves = GainCurves.load(folder / "gains.json")
            return Check("", "passed", f"{curves.steps} steps, {len(curves.rewards)} rewards")
        if verb == "weigh":
            W = WeightMatrix.load(folder / "weights.json")
            off = float(np.abs(W.matrix.sum(0) - 1 / W.steps).max())
            return Check.compared("", off, 1e-8, "columns of W against 1/T")
        if verb == "train":
            lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            losses = [json.loads(line)["loss"] for line in lines]
            moved = max(float(each.abs().max()) for name, each in self._adapter("run").items() if "lora_B" in name)
            fine = len(losses) == EPOCHS and bool(np.isfinite(losses).all()) and 0 < moved < float("inf")
            return Check("", "passed" if fine else "failed", f"losses {', '.join(f'{loss:.3g}' for loss in losses)}")
        return Check("", "passed")

    def killed(self) -> Check:
        """Training that is killed after its first epoch and started again, against one that was not."""
        command = self._command("train", "killed")
        folder = self._out / "killed/checkpoints"
        begun = time.monotonic()
        while command.running() and not list(folder.glob("[!.]*")):
            if time.monotonic() - begun > _PATIENCE:
                command.kill()
                raise RecastError(f"recast train wrote no checkpoint within {_PATIENCE / 60:.0f} minutes")
            time.sleep(0.005)
        ended = not command.running()
        code = command.kill()
        if ended and code:
            raise RecastError(f"recast train ended by itself: {_last(command.stderr)}")
        done = sorted(path.name for path in folder.glob("[!.]*"))[-1]
        self._finish("train", "killed")
        off = self._distance("killed")
        # Sums of a GPU's backward pass may be in another order each time.
        exact = device.pick(self._recipe.policy.device).type == "cpu"
        words = f"after {done}" + (", the last: it ended before it could be killed" if ended else "")
        return Check.compared("", off, 0.0 if exact else 1e-2, words)

    def together(self, processes: int) -> Check:
        """Training on several processes against that on one: only the order of sums differs."""
        self._finish("train", "together", processes)
        return Check.compared("", self._distance("together"), 1e-2, "adapters against those of one process")

    def _command(self, verb: str, folder: str, processes: int = 1) -> Any:
        run = self._out / folder
        if verb == "train" and folder != "run":
            run.mkdir(exist_ok=True)
            shutil.copy(self._out / "run/weights.json", run)
        target = [str(self._out / "recipe.yaml"), "--out", str(run)]
        return self._start([verb, *target], self._out / "logs" / f"{folder}-{verb}", processes)

    def _finish(self, verb: str, folder: str, processes: int = 1) -> None:
        command = self._command(verb, folder, processes)
        begun = time.monotonic()
        while command.running():
            if time.monotonic() - begun > _PATIENCE:
                command.kill()
                raise RecastError(f"recast {verb} did not end within {_PATIENCE / 60:.0f} minutes")
            time.sleep(0.01)
        if code := command.wait():
            raise RecastError(f"recast {verb} ended with {code}: {_last(command.stderr)}")

    def _adapter(self, folder: str) -> dict[str, torch.Tensor]:
        return load_file(self._out / folder / "lora" / FILE)

    def _distance(self, folder: str) -> float:
        """Relative distance of a repetition's adapter to the first one."""
        one, two = (torch.cat([each.flatten() for each in self._adapter(k).values()]) for k in (folder, "run"))
        return compare.relative(one, two)


def _name(model: str) -> str:
    """A hub name, or the last part of a folder's path."""
    return Path(model).expanduser().name if Path(model).expanduser().exists() else model


def _last(errors: str) -> str:
    """The last line of an error stream."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it printed no error"
