"""The stage `train`: from a recipe and weights.json to RUN/checkpoints, RUN/lora and RUN/metrics.jsonl."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs, set_seed

from recast import identity, images, lock, processes, prompts, versions
from recast.config import Recipe
from recast.core import artifact, schedule, sinkhorn
from recast.core.weights import WeightMatrix
from recast.errors import RecastError, StaleError
from recast.flow import families
from recast.flow.generate import generate
from recast.flow.lora import FILE, Adapters
from recast.flow.policy import Policy
from recast.progress import OnProgress, ignore_progress
from recast.rewards import base
from recast.train import checkpoint, metrics, trackers, zero
from recast.train.reweigh import reweigh
from recast.train.trainer import StoppedError, Trainer
from recast.weigh import columns_of, effects_of, masses, static

__all__ = [
    "PREVIEWS",
    "Observer",
    "accelerator_of",
    "build",
    "check_stale",
    "check_weights",
    "finished",
    "tidy",
    "train",
]

PREVIEWS = 8
"""Prompts on a sample sheet: the first ones of the training set, with the seeds of evaluation."""
_PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Observer:
    """Callbacks of a run: a description of its batches at the start, its progress, and the metrics of each epoch."""

    start: Callable[[str], None] = lambda _: None
    on_progress: OnProgress = ignore_progress
    epoch: Callable[[Mapping[str, Any]], None] = lambda _: None


def train(recipe: Recipe, out: Path, weights: Path | None = None, observer: Observer | None = None) -> int:
    """Train until the recipe's last epoch, from the latest checkpoint in RUN if there is one.

    Every process of a launcher calls this. Writes the averaged adapter to RUN/lora and returns the number of finished
    epochs. W is read from `weights`, or by default from RUN/weights.json, which must then have the recipe's method and
    budget. A loss, gradient or reward that is not finite stops the run with an error, after a checkpoint of the state
    before it is saved. RUN is locked meanwhile.
    """
    _check(recipe, out)
    with lock.alone(out / ".train.lock", f"training in {out}"):
        return _train(recipe, out, weights, observer or Observer())


def _train(recipe: Recipe, out: Path, weights: Path | None, observer: Observer) -> int:
    accelerator = accelerator_of(recipe, out)
    set_seed((recipe.train.seed + accelerator.process_index) % 2**32)  # for rewards that draw from global generators
    matrix, policy = _weights(recipe, out, weights, accelerator)
    rows = prompts.load(recipe.train.prompts)
    parent = None if recipe.train.resume_from is None else checkpoint.last_of(recipe.train.resume_from)
    settings = _identity(recipe, matrix, rows, parent)
    folder = out / "checkpoints"
    found = checkpoint.all_of(folder)
    if found:  # before a model is loaded: other settings are an error at once
        position, state = checkpoint.read_state(found[-1], settings)
        done = position.epoch
        if done > recipe.train.epochs:
            raise RecastError(f"{out} has {done} epochs already, more than train.epochs = {recipe.train.epochs}")
        if accelerator.is_main_process:
            checkpoint.prune(folder, recipe.train.keep)  # a kill may have come between the last one and this
        if done == recipe.train.epochs and (out / "lora" / FILE).is_file():
            return done
        versions.require_same(state.get("settings", {}), settings, f"{found[-1]} was trained", "choose another --out")
    trainer = build(recipe, matrix, rows, accelerator, policy)
    if found:
        with _reading(found[-1], f"remove {found[-1]} to resume from the checkpoint before it"):
            trainer.load(found[-1], settings)
    elif parent is not None:
        with _reading(parent, "train.resume_from can name another checkpoint"):
            trainer.start_from(parent, adapters=recipe.train.lora is None)
    start = found[-1].name if found else parent and f"{parent}, after {trainer.position.step} optimizer steps"
    observer.start(trainer.batches.describe() + (f"; resuming from {start}" if start else ""))
    trackers.start(accelerator, recipe.train.trackers, out, settings, trainer.position.step, fresh=not found)
    try:
        _loop(recipe, out, trainer, settings, observer)
    except StoppedError as stop:
        saved = trainer.save(folder, settings, recipe.train.keep)
        remedy = f"other settings can start from there with train.lora={saved / 'default'} and a new --out"
        raise RecastError(f"{stop}; the state before it is in {saved}: {remedy}") from stop
    finally:
        trackers.finish(accelerator)
    return trainer.position.epoch


def _identity(recipe: Recipe, matrix: WeightMatrix, rows: list[prompts.Row], parent: Path | None) -> dict[str, Any]:
    """The settings that decide the trained adapters; a checkpoint to resume from is identified by its content."""
    found = identity.training(recipe, matrix, rows)
    return found if parent is None else found | {"train.resume_from": checkpoint.digest(parent)}


def check_stale(recipe: Recipe, out: Path, weights: WeightMatrix) -> None:
    """Raise `StaleError` if RUN has a checkpoint of other settings, or of more epochs than the recipe has."""
    found = checkpoint.all_of(out / "checkpoints")
    if not found:
        return
    try:
        parent = None if recipe.train.resume_from is None else checkpoint.last_of(recipe.train.resume_from)
    except RecastError as error:
        raise StaleError(f"{out} was trained from another checkpoint: {error}") from error
    wanted = _identity(recipe, weights, prompts.load(recipe.train.prompts), parent)
    if checkpoint.read_state(found[-1], wanted)[0].epoch > recipe.train.epochs:
        raise StaleError(f"{found[-1]} was trained for longer than train.epochs = {recipe.train.epochs}")


def finished(recipe: Recipe, out: Path) -> bool:
    """Whether RUN holds the adapter of the recipe's last epoch."""
    found = checkpoint.all_of(out / "checkpoints")
    last = checkpoint.name(checkpoint.Position(recipe.train.epochs))
    return bool(found) and found[-1].name == last and (out / "lora" / FILE).is_file()


def tidy(recipe: Recipe, out: Path) -> bool:
    """Whether a finished training has left nothing to remove, as it does if it is killed in its last moment."""
    return checkpoint.pruned(out / "checkpoints", recipe.train.keep)


def _check(recipe: Recipe, out: Path) -> None:
    """Check what is known before anything is loaded, and make RUN."""
    if recipe.world.kind != "images":
        raise RecastError(f"training needs world.kind = images, not {recipe.world.kind}, which has no policy to train")
    if not recipe.rewards:
        raise RecastError("the recipe names no reward: put at least one under rewards")
    trackers.check(recipe.train.trackers)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecastError(f"{out}: cannot be used as the run's folder: {error.strerror or error}") from error


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    """Turn what a damaged checkpoint raises into one sentence."""
    try:
        yield
    except (RecastError, KeyError, ValueError, RuntimeError) as error:
        reason = (
            str(error) if isinstance(error, RecastError) else f"{path} is damaged ({type(error).__name__}: {error})"
        )
        raise RecastError(reason if "remove" in reason else f"{reason}: {remedy}") from error


def _weights(recipe: Recipe, out: Path, weights: Path | None, accelerator: Any) -> tuple[WeightMatrix, Policy | None]:
    """W from its file, and the policy if it was loaded: a static W, which needs no curves, is made on its grid."""
    path = out / "weights.json" if weights is None else weights
    policy = None
    if weights is None and recipe.weigh.method == "static":
        if accelerator.is_main_process and not path.exists():
            policy = _load_policy(recipe)
            grid = policy.sigmas(recipe.train.steps or recipe.estimate.steps)
            # Its factors do not depend on ν, so there is nothing to measure for it.
            columns = None if recipe.weigh.columns == "effect" else columns_of(recipe, grid)
            static(recipe.budget, grid, columns).save(path)
        accelerator.wait_for_everyone()
    if not path.exists():
        raise RecastError(f"{path} does not exist: run recast weigh first, or name another file with --weights")
    matrix = WeightMatrix.load(path)
    if weights is None:
        check_weights(recipe, matrix, path)
    elif idle := [name for name in recipe.rewards if name not in matrix.rewards]:
        warnings.warn(f"{path} has no weight for {', '.join(idle)}: not used in training", stacklevel=2)
    return matrix, policy


def _load_policy(recipe: Recipe) -> Policy:
    """The recipe's policy without its adapter, which training loads into its own."""
    return families.load(recipe.policy.model_copy(update={"lora": None}))


def check_weights(recipe: Recipe, matrix: WeightMatrix, path: Path) -> None:
    """Raise `StaleError` if W has another method, budget or ν than the recipe."""
    share = sinkhorn.simplex(list(recipe.budget.values()), len(recipe.budget), "budget")
    asked = {name: round(float(value), 6) for name, value in zip(recipe.budget, share, strict=True)}
    has = {name: round(float(value), 6) for name, value in zip(matrix.rewards, matrix.budget, strict=True)}
    facts: list[tuple[str, Any, Any]] = [("weigh.method", recipe.weigh.method, matrix.method)]
    facts += [("the budget", asked, has), ("weigh.columns", *_columns(recipe, matrix, path))]
    for what, wanted, found in facts:
        if wanted != found:
            raise StaleError(
                f"{path} was made with {what} = {found}, but the recipe has {wanted}: run recast weigh again, "
                "or name the file with --weights"
            )


def _columns(recipe: Recipe, matrix: WeightMatrix, path: Path) -> tuple[Any, Any]:
    """The recipe's `weigh.columns` and that of W, equal if they fit; a static W fits any effects."""
    asked, source = recipe.weigh.columns, matrix.info.get("columns")
    has = "uniform" if matrix.uniform else [round(float(value), 6) for value in matrix.nu]
    if asked == "uniform":
        return asked, source or has
    if asked != "effect":
        nu = masses(asked, matrix.steps, "weigh.columns")
        return "uniform" if nu is None else [round(float(value), 6) for value in nu], source or has
    if matrix.method == "static":
        return asked, asked
    if not (path.parent / "effects.json").is_file():
        return asked, source or has
    measured = columns_of(recipe, matrix.sigmas, effects_of(recipe, path.parent))
    if np.allclose(matrix.nu, 1 / matrix.steps if measured is None else measured, rtol=0, atol=1e-9):
        return asked, asked
    return asked, "effect of another measurement" if source else has


def build(
    recipe: Recipe,
    matrix: WeightMatrix,
    rows: list[prompts.Row],
    accelerator: Any,
    policy: Policy | None = None,
) -> Trainer:
    """The trainer of a recipe; loads the rewards and, by default, the policy.

    The adapters start from `train.lora` or else `policy.lora`; `policy` must be without it. `train` replaces them by
    those of `train.resume_from`.
    """
    settings = recipe.train
    missing = [name for name in matrix.rewards if name not in recipe.rewards]
    if missing:
        raise RecastError(
            f"W has a row for the reward {missing[0]!r}, but the recipe's rewards are {', '.join(recipe.rewards)}"
        )
    policy = policy or _load_policy(recipe)
    grid = policy.sigmas(settings.steps or matrix.steps)
    if not schedule.same(grid, matrix.sigmas):
        raise RecastError(
            f"W has {matrix.steps} steps from σ = {matrix.sigmas[1]:.4g}, but the policy's grid has {len(grid) - 1} "
            f"from {grid[1]:.4g}: estimate the curves on this policy with estimate.steps={len(grid) - 1}"
        )
    adapters = Adapters(policy.network, policy.targets, settings.rank, settings.alpha, settings.seed)
    start = settings.lora or recipe.policy.lora
    if start is not None:
        adapters.load(Path(start).expanduser())
        adapters.update_old()
    models = {name: base.load(name, **_options(recipe, name)) for name in matrix.rewards}
    return Trainer(settings, policy, adapters, matrix, models, rows, accelerator)


def _options(recipe: Recipe, name: str) -> dict[str, Any]:
    """The options of a reward; with `train.offload_rewards`, `offload` where it is an option that is not set."""
    options = dict(recipe.rewards[name] or {})
    if recipe.train.offload_rewards and "offload" in inspect.signature(base.loadable(name)).parameters:
        options.setdefault("offload", True)
    return options


def _loop(recipe: Recipe, out: Path, trainer: Trainer, settings: Mapping[str, Any], observer: Observer) -> None:
    train, folder, accelerator = recipe.train, out / "checkpoints", trainer.accelerator
    log = metrics.Log(out / "metrics.jsonl", trainer.position.epoch) if accelerator.is_main_process else None
    if accelerator.is_main_process:
        recipe.save(out / "recipe.yaml")
    while trainer.position.epoch < train.epochs:
        if _due(train.reweigh_every, trainer.position.epoch) and trainer.position.update == 0:
            trainer.weights = reweigh(recipe, out, trainer)
        values = trainer.epoch(observer.on_progress)
        done = trainer.position.epoch
        if log is not None:
            log.write(values)
            accelerator.log(metrics.scalars(values), step=trainer.position.step)
            observer.epoch(values)
        if _due(train.preview_every, done) or (train.preview_every and done == train.epochs):
            _preview(trainer, out / "samples" / f"epoch-{done:05d}.png")
        if _due(train.save_every, done) or done == train.epochs:  # last: after a kill, the rest is repeated
            trainer.save(folder, settings, train.keep)
    trainer.save_ema(out / "lora")
    accelerator.wait_for_everyone()


def _due(every: int, epoch: int) -> bool:
    """Whether something that is done every so many epochs is due after this one; never for 0.

    >>> _due(0, 4), _due(2, 0), _due(2, 3), _due(2, 4)
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


def accelerator_of(recipe: Recipe, out: Path) -> Any:
    """The accelerator of a run; an error if training does not support the launcher's settings."""
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
        cpu=cpu and not deepspeed,  # with cpu=True accelerate would skip DeepSpeed silently
        mixed_precision=_PRECISIONS[settings.precision],
        log_with=list(settings.trackers) or None,
        project_dir=out / "logs",
        kwargs_handlers=handlers,
    )
    kind = accelerator.distributed_type
    if kind == DistributedType.MEGATRON_LM:
        raise RecastError(
            f"training does not run under {kind.value}: use torchrun alone, or FSDP (docs/guides/scale.md)"
        )
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
