"""Gradients of every reward at every noise level, before training: RUN/effects.json (`recast doctor --gradients`).

Images of the old policy are divided into splits of whole prompts. For every split and level the loss is differentiated
once per reward, with that reward's standardized advantage alone; `recast.core.effects` says what follows from the inner
products. Two details of training are left out: the weight of a reward that does not apply to an image is not given to
the others, and with train.spread = group the mixed reward is not divided by each prompt's own deviation.

Every split is one file in RUN/effects until the last is done, so that a measurement can be resumed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType, gather_object, set_seed
from torch import Tensor

from recast import identity, lock, processes, prompts, versions
from recast.config import Recipe
from recast.core import artifact, strict
from recast.core.effects import FEWEST, Effects
from recast.errors import RecastError
from recast.flow import families
from recast.flow.generate import start_noise
from recast.progress import OnProgress, ignore_progress
from recast.train import advantage, checkpoint, groups, nft, sketch, stage
from recast.train.pairs import SEEDS
from recast.train.rollout import Rollout, rollout
from recast.train.sketch import Sketch
from recast.train.trainer import Trainer
from recast.weigh import static

__all__ = ["IMAGES", "PROMPTS", "effects", "split_count"]

PROMPTS, IMAGES = 64, 8
"""Prompts, and images of each, if the caller does not say how many."""
_SPLITS = 16
_SKETCH = 65536
"""Numbers kept of a gradient: inner products have a relative error of about 1/256."""


_FORMAT = "recast.splits"


class _Settings(strict.Strict):
    """settings.json of the splits."""

    settings: dict[str, Any]


@dataclass(frozen=True)
class _Plan:
    """What is measured: prompts with `images` images each, in `splits` splits of equal size."""

    rows: list[prompts.Row]
    images: int
    splits: int

    @property
    def each(self) -> int:
        """Images per split."""
        return len(self.rows) * self.images // self.splits


def split_count(prompts: int) -> int:
    """The number of splits of so many prompts: the largest divisor up to 16.

    >>> split_count(32), split_count(20), split_count(7)
    (16, 10, 7)
    """
    count = max(size for size in range(1, _SPLITS + 1) if prompts % size == 0)
    if count < FEWEST:
        raise RecastError(
            f"{prompts} prompts cannot be divided into {FEWEST} to {_SPLITS} splits of equal size, which the errors "
            f"need: use --prompts {max(FEWEST, prompts - prompts % FEWEST)}"
        )
    return count


def _cost(recipe: Recipe, plan: _Plan) -> dict[str, int]:
    """What a measurement takes, known before anything is loaded."""
    total = len(plan.rows) * plan.images
    steps = recipe.train.steps or recipe.estimate.steps
    return {
        "images": total,
        "velocity evaluations, sampling": total * steps,
        "velocity evaluations, loss": 2 * total * steps,
        "backward passes": total * steps * len(recipe.budget),
    }


def effects(
    recipe: Recipe,
    out: Path,
    count: int | None = None,
    images: int | None = None,
    on_progress: OnProgress = ignore_progress,
    on_cost: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> Effects:
    """The effects of the recipe's rewards and levels at the start of its training.

    Every process of a launcher calls this. RUN/effects.json is returned if it was measured with the same settings,
    and else measured and written.

    Parameters
    ----------
    recipe : Recipe
        Policy, rewards, and the settings of `train`; its batch, fraction and normalization may differ from those of the
        file, since they change only what follows from it.
    out : Path
        RUN.
    count, images : int, optional
        Prompts, and images of each; by default those of the file, or else 64 and 8.
    on_progress : callable, optional
        Called with a phase, what is done of it, and its total.
    on_cost : callable, optional
        Called with what the measurement takes before it begins, by the first process.

    Returns
    -------
    Effects

    Raises
    ------
    RecastError
        If the recipe cannot be trained, the prompts are too few, or the launcher shards the model.
    """
    _check(recipe)
    plan = _plan(recipe, PROMPTS if count is None else count, IMAGES if images is None else images)
    settings = _settings(recipe, plan)
    free = {} if count or images else {"doctor.prompts", "doctor.images_per_prompt"}
    with lock.alone(out / ".effects.lock", f"measuring gradients in {out}"):
        found = _known(recipe, out, settings, free)
        if found is not None:
            return found
        if processes.RANK == 0:
            on_cost(_cost(recipe, plan))
        return _measured(recipe, out, plan, settings, on_progress)


def _measured(recipe: Recipe, out: Path, plan: _Plan, settings: dict[str, Any], on_progress: OnProgress) -> Effects:
    """The effects, measured by all processes and written by the first."""
    accelerator = _accelerator(recipe, out, plan)
    set_seed((recipe.train.seed + accelerator.process_index) % 2**32)  # for rewards that draw from global generators
    trainer = _trainer(recipe, accelerator)
    folder = _folder(out, settings, accelerator)
    mine = list(range(accelerator.process_index, plan.splits, accelerator.num_processes))
    data, rewards = _images(trainer, plan, mine, on_progress)
    members = torch.from_numpy(groups.members([row["prompt"] for row in plan.rows], plan.images))
    values, scales = _standardized(rewards, members, recipe.train.spread)
    good = advantage.optimality(values, recipe.train.advantage_clip).float()
    _measure(trainer, plan, mine, data, good, folder, on_progress)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        made = Effects.measured(
            tuple(trainer.models),
            trainer.sigmas,
            sketch.products(folder, plan.splits),
            plan.each,
            **_training(recipe, len(trainer.sigmas) - 1),
            scales=scales.numpy(),
            covariance=_covariance(rewards, members, recipe.train.spread),
            settings=settings,
        )
        made.save(out / "effects.json")
        shutil.rmtree(folder)
    accelerator.wait_for_everyone()
    return Effects.load(out / "effects.json")


def _accelerator(recipe: Recipe, out: Path, plan: _Plan) -> Any:
    """The accelerator of training; an error for launchers that shard the model, or have a process without a split."""
    accelerator = stage.accelerator_of(recipe, out)
    kind, count = accelerator.distributed_type, accelerator.num_processes
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise RecastError(f"gradients are not measured under {kind.value}: use torchrun alone, or one GPU")
    if count > plan.splits:
        raise RecastError(f"{count} processes cannot share {plan.splits} splits of the images: start {plan.splits}")
    return accelerator


def _check(recipe: Recipe) -> None:
    if recipe.world.kind != "images":
        raise RecastError(f"gradients need world.kind = images, not {recipe.world.kind}, which has no policy to train")
    if not recipe.rewards:
        raise RecastError("the recipe names no reward: put at least one under rewards")
    if recipe.train.precision == "float16":
        raise RecastError("small gradients vanish in float16: measure them with train.precision=bfloat16 or float32")


def _plan(recipe: Recipe, count: int, images: int) -> _Plan:
    """Distinct prompts in the order of training; those of one split must not occur in another."""
    if images < 2:
        raise RecastError(f"--images-per-prompt {images}: advantages compare images of one prompt, use at least 2")
    splits = split_count(count)
    rows = list({row["prompt"]: row for row in prompts.load(recipe.train.prompts)}.values())
    if count > len(rows):
        raise RecastError(
            f"train.prompts = {recipe.train.prompts} has {len(rows)} different prompts, fewer than {count}: use "
            f"--prompts {len(rows) - len(rows) % FEWEST}"
        )
    return _Plan([rows[k] for k in groups.prompts(recipe.train.seed, 0, count, len(rows))], images, splits)


def _settings(recipe: Recipe, plan: _Plan) -> dict[str, Any]:
    """The settings that decide the inner products, by their dotted names."""
    train = recipe.train
    keys = ("rank", "alpha", "beta", "form", "spread", "advantage_clip", "precision", "seed")
    rewards = {name: recipe.rewards.get(name) or {} for name in recipe.budget}
    facts: dict[str, Any] = {
        "policy": identity.policy(recipe),
        "rewards": rewards,
        "order": list(rewards),
        "train": {key: getattr(train, key) for key in keys} | {"steps": train.steps or recipe.estimate.steps},
        "doctor": {"prompts": identity.prompts_hash(plan.rows), "images_per_prompt": plan.images},
    }
    if train.lora is not None:
        facts["train"]["lora"] = identity.adapter_hash(train.lora)
    if train.resume_from is not None:
        facts["train"]["resume_from"] = checkpoint.digest(checkpoint.last_of(train.resume_from))
    known = {name: options for name, options in rewards.items() if name in recipe.rewards}
    return dict(artifact.plain(identity.flatten(facts) | versions.flat(versions.of(known))))


def _training(recipe: Recipe, steps: int) -> dict[str, Any]:
    """What the recipe's training does with the gradients."""
    return {"batch": recipe.train.batch, "levels": recipe.train.levels(steps), "normalize": recipe.train.normalize}


def _known(recipe: Recipe, out: Path, settings: dict[str, Any], free: Any) -> Effects | None:
    """RUN/effects.json if it has these settings, except those in `free`; written anew if the training has changed."""
    path = out / "effects.json"
    if not path.exists():
        return None
    found = Effects.load(path)
    if any(found.settings.get(key) != settings.get(key) for key in {*found.settings, *settings} - set(free)):
        return None
    training = _training(recipe, found.steps)
    if processes.RANK == 0 and any(getattr(found, key) != value for key, value in training.items()):
        replace(found, **training).save(path)
    return replace(found, **training)


def _trainer(recipe: Recipe, accelerator: Any) -> Trainer:
    """The recipe's trainer at the start of training, with its adapters."""
    policy = families.load(recipe.policy.model_copy(update={"lora": None}))
    matrix = static(recipe.budget, policy.sigmas(recipe.train.steps or recipe.estimate.steps))
    trainer = stage.build(recipe, matrix, prompts.load(recipe.train.prompts), accelerator, policy)
    if recipe.train.resume_from is not None:
        parent = checkpoint.last_of(recipe.train.resume_from)
        trainer.start_from(parent, adapters=recipe.train.lora is None)
    policy.model = policy.network  # without DDP, which would average the splits of different processes
    return trainer


def _folder(out: Path, settings: dict[str, Any], accelerator: Any) -> Path:
    """RUN/effects, emptied if it holds the splits of other settings."""
    folder = out / "effects"
    if accelerator.is_main_process:
        path, remedy = folder / "settings.json", f"remove {folder}"
        known = strict.read(path, _FORMAT, _Settings, remedy) if path.exists() else {}
        if known.get("settings") != settings:
            shutil.rmtree(folder, ignore_errors=True)
            strict.write(path, _FORMAT, _Settings, {"settings": settings})
    accelerator.wait_for_everyone()
    return folder


def _images(trainer: Trainer, plan: _Plan, mine: list[int], on_progress: OnProgress) -> tuple[Rollout, Tensor]:
    """The images of this process's splits, and the rewards (N, m) of all images."""
    total = len(plan.rows) * plan.images
    numbers = np.concatenate([np.arange(split * plan.each, (split + 1) * plan.each) for split in mine])
    seeds = _seeds(trainer, total)[numbers, 0].tolist()
    rows = [plan.rows[number // plan.images] for number in numbers]
    failure: RecastError | None = None
    try:
        with trainer.adapters.using("old"):
            batch = trainer.settings.sample_batch
            integers = trainer.settings.integer_timesteps
            data = rollout(trainer.policy, trainer.models, rows, seeds, trainer.sigmas, batch, on_progress, integers)
    except RecastError as error:
        failure = error
    if trainer.anywhere(failure is not None):
        raise failure or RecastError("another process could not sample or score its images")
    rewards = torch.full((total, len(trainer.models)), float("nan"), dtype=torch.float64)
    for places, values in gather_object([(numbers, data.rewards)]):
        rewards[torch.from_numpy(places)] = torch.from_numpy(values.copy())
    return data, rewards


def _seeds(trainer: Trainer, total: int) -> Any:
    """Seeds (N, SEEDS + T) by the rule of training: one for the image, one that is not used here, one per level."""
    return groups.seeds(trainer.settings.seed, 0, total, SEEDS + len(trainer.sigmas) - 1)


def _standardized(rewards: Tensor, members: Tensor, spread: advantage.Spread) -> tuple[Tensor, Tensor]:
    """Advantages (N, m) of each reward alone, 0 where it does not apply, and the standard deviations (m,)."""
    values = rewards.double() - advantage.group_mean(rewards.double(), members)
    whole = advantage.group_std(values, torch.zeros_like(members))[0]
    scales = advantage.group_std(values, members) if spread == "group" else whole
    return (values / (scales + advantage.EPSILON)).nan_to_num(0.0), whole.nan_to_num(0.0) + advantage.EPSILON


def _covariance(rewards: Tensor, members: Tensor, spread: advantage.Spread) -> Any:
    """Covariance (m, m) of the rewards, missing ones at their mean; within prompts if deviations are taken there."""
    known = torch.where(rewards.isnan(), rewards.nanmean(0).nan_to_num(0.0), rewards)
    center = advantage.group_mean(known, members) if spread == "group" else known.mean(0)
    return ((known - center).T @ (known - center) / len(known)).numpy()


def _measure(
    trainer: Trainer,
    plan: _Plan,
    mine: list[int],
    data: Rollout,
    good: Tensor,
    folder: Path,
    on_progress: OnProgress,
) -> None:
    """Write the gradients (m, T, k) of every split of this process that has no file yet."""
    size = sum(each.numel() for each in trainer.adapters.parameters)
    reduce = Sketch(size, _SKETCH, data.latents.device)
    steps = len(trainer.sigmas) - 1
    for place, split in enumerate(mine):
        if not sketch.file(folder, split).exists():
            images = range(place * plan.each, (place + 1) * plan.each)  # rows of `data`
            first = split * plan.each
            seeds = _seeds(trainer, len(good))[first : first + plan.each, SEEDS:]
            found = torch.zeros(good.shape[1], steps, reduce.size)
            for t in range(1, steps + 1):
                r = good[first : first + plan.each]
                found[:, t - 1] = _gradients(trainer, data, images, seeds[:, t - 1].tolist(), r, t, reduce)
                on_progress("gradients", place * steps + t, len(mine) * steps)
            sketch.save(folder, split, found)


def _gradients(
    trainer: Trainer,
    data: Rollout,
    images: Sequence[int],
    seeds: Sequence[int],
    r: Tensor,
    t: int,
    reduce: Sketch,
) -> Tensor:
    """Sketched gradients (m, k) at level t of the mean loss of some rows of `data`, one per column of `r` (n, m)."""
    policy, settings, device = trainer.policy, trainer.settings, data.latents.device
    parameters, size = trainer.adapters.parameters, settings.micro_batch
    found = torch.zeros(r.shape[1], reduce.size, device=device)
    for start in range(0, len(images), size):
        part = torch.tensor(images[start : start + size])
        clean = data.latents[part.to(device)]
        noise = start_noise(policy.latent_shape, seeds[start : start + size]).to(device)
        condition = data.condition.rows(data.prompt[part])
        sigma = torch.full((len(part),), trainer.sigmas[t], device=device)
        x = (1 - sigma[0]) * clean + sigma[0] * noise
        with torch.no_grad():
            trainer.adapters.use("old")
            old = policy.velocity(x, sigma, condition)
        trainer.adapters.use("default")
        v = policy.velocity(x, sigma, condition)
        kind: dict[str, Any] = {"beta": settings.beta, "form": settings.form, "clip": settings.advantage_clip}
        one = torch.ones(len(part), device=device)
        losses = [nft.loss(v, old, clean, noise, sigma, level * one, **kind).policy for level in (1.0, 0.0)]
        slope = losses[0] - losses[1]  # the loss is linear in r; what does not depend on it is left out
        for i, column in enumerate(r[start : start + size].to(device).T):
            loss = ((column - 0.5) * slope).sum() / len(images)
            grads = torch.autograd.grad(loss, parameters, retain_graph=i + 1 < len(found))
            found[i] += reduce(torch.cat([each.flatten() for each in grads]))
    return found.cpu()
