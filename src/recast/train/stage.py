"""`recast train`: from a recipe and weights.json to RUN/checkpoints, RUN/lora and RUN/metrics.jsonl."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs, set_seed

from recast import identity, images, processes, prompts
from recast.config import Recipe
from recast.core import artifact, schedule, sinkhorn
from recast.core.weights import WeightMatrix
from recast.errors import RecastError, StaleError
from recast.flow import sd3
from recast.flow.generate import generate
from recast.flow.lora import Adapters
from recast.progress import OnProgress, ignore_progress
from recast.rewards import base
from recast.train import checkpoint, metrics, trackers, zero
from recast.train.reweigh import reweigh
from recast.train.trainer import StoppedError, Trainer
from recast.weigh import static

PREVIEWS = 8
"""Prompts on a sample sheet: the first ones of the training set, with the seeds of evaluation."""
PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
Watch = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Observer:
    """Who is told how a run goes: the plan, how far an epoch is, and an epoch's metrics."""

    plan: Callable[[str], None] = lambda _: None
    on_progress: OnProgress = ignore_progress
    epoch: Watch = lambda _: None


def train(recipe: Recipe, out: Path, weights: Path | None = None, observer: Observer | None = None) -> int:
    """Train until the recipe's last epoch, from the latest checkpoint in `out` where there is one.

    Every process of a launcher calls it. Leaves the averaged adapter in RUN/lora, and returns the number of epochs
    done. W comes from `weights`, or from RUN/weights.json, which must then be what the recipe asks for. A run that
    must stop (a loss, a gradient or a reward that is not finite) leaves a checkpoint of the state before.
    """
    observer = observer or Observer()
    _check(recipe, out)
    accelerator = _accelerator(recipe, out)
    matrix = _weights(recipe, out, weights, accelerator)
    rows = prompts.load(recipe.train.prompts)
    settings = identity.training(recipe, matrix, rows)
    folder = out / "checkpoints"
    found = checkpoint.all_of(folder)
    if found:  # before any model is loaded: another config is known at once
        done = checkpoint.read_state(found[-1], settings)[0].epoch
        if done == recipe.train.epochs and (out / "lora").is_dir():  # nothing to load for
            return done
        if done > recipe.train.epochs:
            raise RecastError(f"{out} has {done} epochs already, more than train.epochs = {recipe.train.epochs}")
    set_seed((recipe.train.seed + accelerator.process_index) % 2**32)  # nothing here draws from it, but a reward may
    trainer = build(recipe, matrix, rows, accelerator)
    if found:
        _load(trainer, found[-1], settings)
    observer.plan(trainer.plan.describe() + (f"; going on after {found[-1].name}" if found else ""))
    trackers.start(accelerator, recipe.train.trackers, out, settings, trainer.position.step)
    try:
        _loop(recipe, out, trainer, settings, observer)
    except StoppedError as stop:
        saved = trainer.save(folder, settings, recipe.train.keep)
        remedy = f"other settings can start from there with train.lora={saved / 'default'} and a new --out"
        raise RecastError(f"{stop}; the state before it is in {saved}: {remedy}") from stop
    finally:
        trackers.finish(accelerator)
    return trainer.position.epoch


def check_stale(recipe: Recipe, out: Path, weights: WeightMatrix) -> None:
    """Raise `StaleError` if RUN holds a checkpoint of other settings, or of more epochs than the recipe asks for."""
    found = checkpoint.all_of(out / "checkpoints")
    if not found:
        return
    wanted = identity.training(recipe, weights, prompts.load(recipe.train.prompts))
    if checkpoint.read_state(found[-1], wanted)[0].epoch > recipe.train.epochs:
        raise StaleError(f"{found[-1]} was trained for longer than train.epochs = {recipe.train.epochs}")


def finished(recipe: Recipe, out: Path) -> bool:
    """Whether RUN holds the adapter of the recipe's last epoch."""
    found = checkpoint.all_of(out / "checkpoints")
    last = checkpoint.name(checkpoint.Position(recipe.train.epochs))
    return bool(found) and found[-1].name == last and (out / "lora").is_dir()


def _check(recipe: Recipe, out: Path) -> None:
    """What can be known before anything is loaded."""
    if recipe.world.kind != "images":
        raise RecastError(f"training needs a policy that makes images, and world.kind = {recipe.world.kind} has none")
    if not recipe.rewards:
        raise RecastError("the recipe names no reward: put at least one under rewards")
    trackers.check(recipe.train.trackers)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecastError(f"{out}: cannot be the run's folder: {error.strerror or error}") from error


def _load(trainer: Trainer, path: Path, settings: Mapping[str, Any]) -> None:
    try:
        trainer.load(path, settings)
    except (RecastError, KeyError, ValueError, RuntimeError) as error:
        reason = (
            str(error) if isinstance(error, RecastError) else f"{path} is damaged ({type(error).__name__}: {error})"
        )
        hint = "" if "remove" in reason else f": remove {path} to go on from the one before"
        raise RecastError(reason + hint) from error


def _weights(recipe: Recipe, out: Path, weights: Path | None, accelerator: Any) -> WeightMatrix:
    """W from its file; a static one, which needs no curves, is made where the recipe asks for it and there is none."""
    path = out / "weights.json" if weights is None else weights
    if weights is None and recipe.weigh.method == "static":
        if accelerator.is_main_process and not path.exists():
            settings = recipe.train
            sigmas = sd3.load(recipe.policy).sigmas(settings.steps or recipe.estimate.steps)
            static(recipe.budget, sigmas).save(path)
        accelerator.wait_for_everyone()
    if not path.exists():
        raise RecastError(f"{path}: there is no W to train with: run recast weigh first, or name a file by --weights")
    matrix = WeightMatrix.load(path)
    if weights is None:
        _compare(recipe, matrix, path)
    elif idle := [name for name in recipe.rewards if name not in matrix.rewards]:
        warnings.warn(f"{path} gives no weight to {', '.join(idle)}: not trained with", stacklevel=2)
    return matrix


def _compare(recipe: Recipe, matrix: WeightMatrix, path: Path) -> None:
    """A W of another method or budget than the recipe's would be trained in silence."""
    share = sinkhorn.simplex(list(recipe.budget.values()), len(recipe.budget), "budget")
    asked = {name: round(float(value), 6) for name, value in zip(recipe.budget, share, strict=True)}
    has = {name: round(float(value), 6) for name, value in zip(matrix.rewards, matrix.budget, strict=True)}
    for what, wanted, found in (("weigh.method", recipe.weigh.method, matrix.method), ("the budget", asked, has)):
        if wanted != found:
            raise RecastError(
                f"{path} was made with {what} = {found}, but the recipe says {wanted}: run recast weigh again, "
                "or name the file by --weights"
            )


def build(recipe: Recipe, matrix: WeightMatrix, rows: list[prompts.Row], accelerator: Any) -> Trainer:
    """Policy, adapters and rewards of a recipe; `train.lora` or `policy.lora` is where training starts from."""
    settings = recipe.train
    missing = [name for name in matrix.rewards if name not in recipe.rewards]
    if missing:
        raise RecastError(
            f"W weighs the reward {missing[0]!r}, but the recipe's rewards are {', '.join(recipe.rewards)}"
        )
    policy = sd3.load(recipe.policy.model_copy(update={"lora": None}))
    grid = policy.sigmas(settings.steps or matrix.steps)
    if not schedule.same(grid, matrix.sigmas):
        raise RecastError(
            f"W has {matrix.steps} steps from σ = {matrix.sigmas[1]:.4g}, but the policy's grid has {len(grid) - 1} "
            f"from {grid[1]:.4g}: estimate the curves on this policy with estimate.steps={len(grid) - 1}"
        )
    adapters = Adapters(policy.pipe.transformer, settings.rank, settings.alpha, settings.seed)
    start = settings.lora or recipe.policy.lora
    if start is not None:
        adapters.load(Path(start).expanduser())
        adapters.update_old()
    models = {name: base.load(name, **(recipe.rewards[name] or {})) for name in matrix.rewards}
    return Trainer(settings, policy, adapters, matrix, models, rows, accelerator)


def _loop(recipe: Recipe, out: Path, trainer: Trainer, settings: Mapping[str, Any], observer: Observer) -> None:
    train, folder, accelerator = recipe.train, out / "checkpoints", trainer.accelerator
    log = metrics.Log(out / "metrics.jsonl", trainer.position.epoch) if accelerator.is_main_process else None
    if accelerator.is_main_process:
        recipe.save(out / "recipe.yaml")
    while trainer.position.epoch < train.epochs:
        if due(train.reweigh_every, trainer.position.epoch) and trainer.position.update == 0:
            trainer.weights = reweigh(recipe, out, trainer)
        values = trainer.epoch(observer.on_progress)
        done = trainer.position.epoch
        if log is not None:
            log.write(values)
            accelerator.log(metrics.scalars(values), step=trainer.position.step)
            observer.epoch(values)
        if due(train.preview_every, done) or (train.preview_every and done == train.epochs):
            _preview(trainer, out / "samples" / f"epoch-{done:05d}.png")
        if due(train.save_every, done) or done == train.epochs:  # last: what is told before is told again after a kill
            trainer.save(folder, settings, train.keep)
    trainer.save_ema(out / "lora")
    accelerator.wait_for_everyone()


def due(every: int, epoch: int) -> bool:
    """Whether something that happens every so many epochs happens after this one.

    >>> due(0, 4), due(2, 0), due(2, 3), due(2, 4)
    (False, False, False, True)
    """
    return every > 0 and epoch > 0 and epoch % every == 0


def _preview(trainer: Trainer, path: Path) -> None:
    texts = [row["prompt"] for row in trainer.rows[:PREVIEWS]]
    with trainer.averaged():
        samples = generate(trainer.policy, texts, [42 + k for k in range(len(texts))], steps=len(trainer.sigmas) - 1)
    if not trainer.accelerator.is_main_process:
        return
    artifact.write_bytes(path, images.to_png(torch.cat(list(samples), dim=2)))
    trackers.show(trainer.accelerator, samples, path, trainer.position.step)


def _accelerator(recipe: Recipe, out: Path) -> Any:
    settings = recipe.train
    cpu = recipe.policy.device == "cpu" or not torch.cuda.is_available()
    if settings.precision == "float16" and cpu:
        raise RecastError("train.precision = float16 needs a GPU: choose bfloat16 or float32")
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" and not torch.cuda.is_available()
    handlers = [
        DistributedDataParallelKwargs(broadcast_buffers=False),  # they never change
        InitProcessGroupKwargs(timeout=processes.PATIENCE, **({"backend": "gloo"} if deepspeed else {})),
    ]
    accelerator = Accelerator(
        cpu=cpu and not deepspeed,  # told to use a CPU, accelerate would leave DeepSpeed out without a word
        mixed_precision=PRECISIONS[settings.precision],
        log_with=list(settings.trackers) or None,
        project_dir=out / "logs",
        kwargs_handlers=handlers,
    )
    kind = accelerator.distributed_type
    if kind == DistributedType.MEGATRON_LM:
        raise RecastError(f"training does not run under {kind.value}: use torchrun alone, or FSDP (docs/scale.md)")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise RecastError("training runs under FSDP's second version only: set fsdp_version: 2 in accelerate's config")
    if zero.used(accelerator):
        zero.check(accelerator)
    if kind == DistributedType.FSDP and settings.precision != "float32":
        raise RecastError(
            f"under FSDP, train.precision = {settings.precision} would round the time steps: set it to float32; "
            "policy.dtype = bfloat16 saves the memory"
        )
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED) and settings.reweigh_every:
        raise RecastError(f"train.reweigh_every does not run under {kind.value}: set it to 0, or use torchrun alone")
    return accelerator
