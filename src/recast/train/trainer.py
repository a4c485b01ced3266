"""The training loop: sample with the old policy, score once, train on (image, level) pairs, update the old policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor

from recast.config import TrainConfig
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.flow.lora import Adapters
from recast.flow.policy import Policy
from recast.flow.sharded import part, whole
from recast.progress import OnProgress, ignore_progress
from recast.prompts import Row
from recast.rewards import base
from recast.train import advantage, checkpoint, groups, metrics, nft, optimizers, pairs, passes, zero
from recast.train.checkpoint import Position
from recast.train.decay import old_decay
from recast.train.pairs import Pairs
from recast.train.rollout import Rollout, rollout

__all__ = ["StoppedError", "Trainer"]

_LOSSES = ("total", "positive", "negative", "kl")
_PATIENCE = 10
"""Number of consecutive optimizer steps that may overflow in float16."""


class Trainer:
    """Policy, adapters, optimizer and their position in training; `epoch` trains for one epoch.

    `models` are the rewards, loaded, and `batches` the sizes of an epoch. All randomness comes from the seed, the epoch
    and an image's number, so an epoch can be repeated, and the number of processes changes results by rounding only.
    """

    def __init__(
        self,
        settings: TrainConfig,
        policy: Policy,
        adapters: Adapters,
        weights: WeightMatrix,
        models: Mapping[str, base.Reward],
        rows: Sequence[Row],
        accelerator: Any,
    ) -> None:
        self.settings, self.policy, self.adapters, self.weights = settings, policy, adapters, weights
        self.models, self.rows, self.accelerator = models, rows, accelerator
        self.sigmas = policy.sigmas(settings.steps or weights.steps)
        self.batches = _batches(settings, len(self.sigmas) - 1, accelerator.num_processes)
        accelerator.gradient_accumulation_steps = self.batches.accumulation
        self._zero = zero.used(accelerator)
        if self._zero:
            zero.configure(accelerator, self.batches, settings.clip_norm)
        if settings.checkpointing:
            policy.network.enable_gradient_checkpointing()
        optimizer = optimizers.make(settings, adapters.parameters)
        total = settings.epochs * self.batches.updates
        self.schedule = get_scheduler(
            settings.schedule, optimizer, num_warmup_steps=settings.warmup, num_training_steps=total
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # accelerate passes it
            policy.model, self.optimizer = accelerator.prepare(
                policy.network, optimizer, device_placement=None if self._zero else [False, True]
            )
        adapters.collect()
        self.ema = EMAModel(adapters.parameters, decay=settings.ema)
        self.position = Position()
        self._trained: list[Tensor] = []
        self._skipped = 0
        self._random: dict[str, Tensor] | None = None

    def epoch(self, on_progress: OnProgress = ignore_progress) -> dict[str, Any]:
        """Train for one epoch, or finish one that was interrupted; returns its metrics, the same in every process."""
        number = self.position.epoch
        self._random = checkpoint.random_tensors()  # an interrupted epoch is sampled and scored again
        data, rewards = self._rollout(number, on_progress)
        texts = [row["prompt"] for row in self._prompts(number)]
        members = torch.from_numpy(groups.members(texts, self.batches.images))
        parts = advantage.contributions(rewards, members, self.weights, self.settings.normalize, self.settings.spread)
        quality = advantage.optimality(parts.sum(1), self.settings.advantage_clip, self.settings.adv_mode).float()
        found = metrics.reward_metrics(list(self.models), rewards, members, parts)
        found["clipped"] = float((parts.sum(1).abs() > self.settings.advantage_clip).double().mean())
        begun = time.perf_counter()
        self._trained = []
        for update in range(self.position.update, self.batches.updates):
            self._update(data, quality, update, on_progress)
            self.position = replace(self.position, update=update + 1, step=self.position.step + 1)
        decay = old_decay(self.position.step, self.settings.decay)
        self.adapters.update_old(decay)
        self.position = replace(self.position, epoch=number + 1, update=0)
        self._random = None
        losses = torch.stack(self._trained).mean(0).tolist()
        names = ("loss", "loss/positive", "loss/negative", "loss/kl", "gradient_norm")
        seconds = {**data.seconds, "training": time.perf_counter() - begun}
        trained = self.batches.batch * self.batches.pairs * len(self._trained)
        return {
            "epoch": number + 1,
            "step": self.position.step,
            **found,
            **dict(zip(names, losses, strict=True)),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "old_decay": decay,
            **{f"seconds/{key}": value for key, value in seconds.items()},
            "images_per_second": self.batches.total / (seconds["sampling"] + seconds["waiting"]),
            "pairs_per_second": trained / seconds["training"],
        }

    def _prompts(self, epoch: int) -> list[Row]:
        """The prompts of the groups of an epoch."""
        numbers = groups.prompts(self.settings.seed, epoch, self.batches.groups, len(self.rows))
        return [self.rows[number] for number in numbers]

    def _rollout(self, epoch: int, on_progress: OnProgress) -> tuple[Rollout, Tensor]:
        """The images of this process in the order of training, and the rewards (N, m) of all images of the epoch."""
        batches, settings = self.batches, self.settings
        chosen = self._prompts(epoch)
        order = groups.order(settings.seed, epoch, batches.total)
        self._seeds = groups.seeds(settings.seed, epoch, batches.total, pairs.SEEDS + len(self.sigmas) - 1)
        rank = self.accelerator.process_index
        self._mine = [groups.mine(batches, order, update, rank) for update in range(batches.updates)]
        images = np.concatenate(self._mine)
        rows = [chosen[image // batches.images] for image in images]
        failure: Exception | None = None
        try:
            with self.adapters.using("old"):
                seeds = self._seeds[images, 0].tolist()
                data = rollout(
                    self.policy,
                    self.models,
                    rows,
                    seeds,
                    self.sigmas,
                    settings.sample_batch,
                    on_progress,
                    integer_timesteps=settings.integer_timesteps,
                )
        except RecastError as error:
            failure = error
        if self.anywhere(failure is not None):
            raise StoppedError(str(failure or "another process could not sample or score its images"))
        pair = [torch.from_numpy(values).to(self.accelerator.device) for values in (images, data.rewards.copy())]
        numbers, values = (self.accelerator.gather(tensor).cpu() for tensor in pair)
        rewards = torch.empty_like(values)
        rewards[numbers] = values
        if rewards.isnan().all():
            raise StoppedError(f"no reward applies to any image of epoch {epoch + 1}: there is nothing to train on")
        return data, rewards

    def _update(self, data: Rollout, quality: Tensor, update: int, on_progress: OnProgress = ignore_progress) -> None:
        """Make one optimizer step on all its pairs, accumulating gradients over micro-batches of equal size."""
        chosen, sizes = self._pairs(quality, update), self.batches
        needed = self._needed(update)
        losses: list[Tensor] = []
        for micro_batch in chosen.split(sizes.micro):
            with self.accelerator.accumulate(self.policy.model):
                terms = self._terms(data, micro_batch, needed)
                self._backward(terms.total.mean())
                losses.append(torch.stack([getattr(terms, name).detach() for name in _LOSSES]))
                if self.accelerator.sync_gradients:
                    norm = self._clip(torch.cat(losses, 1), chosen.sigma, update)
                self.optimizer.step()
                self.optimizer.zero_grad()
            on_progress("training", update * sizes.accumulation + len(losses), sizes.updates * sizes.accumulation)
        self._count_skipped()
        self.schedule.step()
        self.ema.step(self.adapters.parameters)
        means = self.accelerator.reduce(torch.cat(losses, 1).mean(1), "mean").cpu().double()
        self._trained.append(torch.cat([means, whole(norm.detach()).cpu().double().reshape(1)]))

    def _pairs(self, quality: Tensor, update: int) -> Pairs:
        """The pairs of this process in one optimizer step, given the optimality (N, T) of all images of the epoch."""
        images, first = self._mine[update], update * self.batches.share
        good = quality[torch.from_numpy(images)]
        anchor = self.settings.kl_every if self.settings.kl_weight > 0 else 0
        before = self.accelerator.process_index * self.batches.share
        seeds, count = self._seeds[images], self.batches.pairs
        return pairs.draw(seeds, first, good, self.weights, self.sigmas, count, anchor, before)

    def _needed(self, update: int) -> passes.Needed:
        """The passes of an optimizer step, the same in every process: only the first of an epoch can omit any."""
        if update > 0:
            return passes.Needed()
        flags = self.accelerator.gather(passes.differing(self.adapters)[None]).amax(0)
        return passes.Needed(*(flag > 0 for flag in flags.tolist()))

    def _terms(self, data: Rollout, chosen: Pairs, needed: passes.Needed) -> nft.Terms:
        """The loss of some pairs."""
        device, settings = data.latents.device, self.settings
        condition = data.condition.rows(data.prompt[chosen.row])
        clean, noise = data.latents[chosen.row.to(device)], chosen.noise(self.policy.latent_shape).to(device)
        sigma, r = chosen.sigma.to(device), chosen.r.to(device)
        level = sigma.reshape(-1, *(1 for _ in self.policy.latent_shape))
        x = (1 - level) * clean + level * noise
        found = passes.velocities(self.policy, self.adapters, x, sigma, condition, needed, chosen.anchored)
        return nft.loss(
            found.trained,
            found.old,
            clean,
            noise,
            sigma,
            r,
            beta=settings.beta,
            form=settings.form,
            clip=settings.advantage_clip,
            v_base=found.base,
            kl_weight=settings.kl_weight * pairs.weight(settings.kl_every, self.batches.batch * self.batches.pairs),
        )

    def _backward(self, loss: Tensor) -> None:
        """Accumulate gradients; accelerate would step DeepSpeed's optimizer at once, before gradients are checked."""
        if self._zero:
            self.policy.model.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
            self.policy.model.backward(loss)
        else:
            self.accelerator.backward(loss)

    def _clip(self, losses: Tensor, sigmas: Tensor, update: int) -> Tensor:
        """Clip the gradient and return its norm before; a loss or gradient that is not finite stops the run first.

        DeepSpeed clips as part of its step, which is made here.
        """
        where = f"is not finite in epoch {self.position.epoch + 1}, optimizer step {update + 1}"
        finite = torch.isfinite(losses).cpu()
        if self.anywhere(not bool(finite.all())):
            raise StoppedError(f"{_culprit(finite, sigmas)} {where}")
        if self._zero:
            if (norm := zero.step(self.policy.model, self.optimizer.optimizer)) is None:
                raise StoppedError(f"the gradient of an adapter {where}")
            return norm
        if self.accelerator.scaler is None:  # in float16 the scaler skips a step that overflows
            named = self.adapters.transformer.named_parameters()
            trained = {name: part(each.grad) for name, each in named if each.grad is not None}
            good = torch.stack([torch.isfinite(each).all() for each in trained.values()])
            if self.anywhere(not bool(good.all())):
                bad = [name for name, fine in zip(trained, good.tolist(), strict=True) if not fine]
                raise StoppedError(
                    f"the gradient of {bad[0] if bad else 'a parameter shard of another process'} {where}"
                )
        return self.accelerator.clip_grad_norm_(self.adapters.parameters, self.settings.clip_norm)

    def _count_skipped(self) -> None:
        """Stop a run in which every step overflows float16: the loss scale cannot get lower, and nothing is learned."""
        skipped = self.accelerator.scaler is not None and self.optimizer.step_was_skipped
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped >= _PATIENCE:
            raise StoppedError(f"the gradient overflowed float16 in {_PATIENCE} optimizer steps in a row")

    def anywhere(self, wrong: bool) -> bool:
        """Whether `wrong` holds in any process, so that all stop together and save a checkpoint."""
        flag = torch.tensor([float(wrong)], device=self.accelerator.device)
        return bool(self.accelerator.gather(flag).max() > 0)

    def save(self, folder: Path, settings: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint of the current state; all processes must call this."""
        final = folder / checkpoint.name(self.position)
        temporary = folder / f".{final.name}.tmp"
        wait, first = self.accelerator.wait_for_everyone, self.accelerator.is_main_process
        with checkpoint.draft(temporary, first):
            self.adapters.save(temporary / "default", "default", first)
            self.adapters.save(temporary / "old", "old", first)
            self.save_ema(temporary / "ema")
            if self._zero:
                moments = zero.optimizer_tensors(self.accelerator, self.optimizer.optimizer, self.adapters.parameters)
            else:
                moments = checkpoint.optimizer_tensors(self.optimizer.optimizer)
            if first:
                checkpoint.save_tensors(temporary / "optimizer.safetensors", moments)
                self.weights.save(temporary / "weights.json")
            wait()
            random = temporary / f"random-{self.accelerator.process_index}.safetensors"
            checkpoint.save_tensors(random, self._random or checkpoint.random_tensors())
            wait()
            if first:
                scaler = self.accelerator.scaler
                facts = {
                    "policy": self.policy.identity,
                    "schedule": {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"},
                    "scaler": {} if scaler is None else scaler.state_dict(),
                }
                checkpoint.write_state(temporary, self.position, settings, facts)
                checkpoint.publish(temporary, final, keep)
            wait()
        return final

    def load(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.position, facts = checkpoint.read_state(path, settings)
        checkpoint.verify(path, facts)
        if self.position.update >= max(self.batches.updates, 1):
            raise RecastError(
                f"{path} is damaged: an epoch has {self.batches.updates} steps, not {self.position.update}"
            )
        self._load_adapters(path)
        self._load_optimizer(path, facts)
        self.schedule.load_state_dict({**facts["schedule"], "lr_lambdas": [None]})
        for group, rate in zip(self.optimizer.param_groups, facts["schedule"]["_last_lr"], strict=True):
            group["lr"] = rate
        self.weights = WeightMatrix.load(path / "weights.json")
        random = path / f"random-{self.accelerator.process_index}.safetensors"
        if random.exists():  # absent if the run is resumed with more processes
            checkpoint.restore_random(checkpoint.load_tensors(random))

    def start_from(self, path: Path, adapters: bool = True) -> None:
        """Take over adapters, optimizer and step count of another run's checkpoint; epochs are counted anew.

        Without `adapters`, those that are loaded already stay, and their average starts from them.
        """
        position, facts = checkpoint.read_state(path)
        checkpoint.verify(path, facts)
        self.position = Position(step=position.step)
        if adapters:
            self._load_adapters(path)
        self.ema.optimization_step = position.step
        self._load_optimizer(path, facts)

    def _load_adapters(self, path: Path) -> None:
        self.adapters.load(path / "ema", "default")
        self.ema.shadow_params = [each.detach().clone() for each in self.adapters.parameters]
        self.ema.optimization_step = self.position.step
        self.adapters.load(path / "default", "default")
        self.adapters.load(path / "old", "old")

    def _load_optimizer(self, path: Path, facts: Mapping[str, Any]) -> None:
        tensors = checkpoint.load_moments(path / "optimizer.safetensors", len(self.adapters.parameters))
        if self._zero:
            zero.restore_optimizer(self.accelerator, self.optimizer.optimizer, tensors)
        else:
            checkpoint.restore_optimizer(self.optimizer.optimizer, tensors)
        if self.accelerator.scaler is not None and facts["scaler"]:
            self.accelerator.scaler.load_state_dict(facts["scaler"])

    def save_ema(self, folder: Path) -> None:
        """Write the averaged adapter, the one to evaluate, in diffusers' format; all processes must call this."""
        with self.averaged():
            self.adapters.save(folder, write=self.accelerator.is_main_process)

    def averaged(self) -> Any:
        """A context manager in which `default` holds the averaged parameters."""
        return _Averaged(self.ema, self.adapters.parameters)


class StoppedError(RecastError):
    """Training cannot continue; the state before the failure is saved."""


class _Averaged:
    def __init__(self, ema: EMAModel, parameters: Sequence[Tensor]) -> None:
        self._ema, self._parameters = ema, parameters

    def __enter__(self) -> None:
        self._kept = [each.detach().clone() for each in self._parameters]
        self._ema.copy_to(self._parameters)

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for each, kept in zip(self._parameters, self._kept, strict=True):
            each.copy_(kept)


def _batches(settings: TrainConfig, steps: int, processes: int) -> groups.Batches:
    """The sizes of an epoch for T = `steps`."""
    levels = settings.levels(steps)
    found = groups.batches(
        processes, settings.prompts_per_epoch, settings.images_per_prompt, settings.batch, levels, settings.micro_batch
    )
    if settings.kl_weight > 0 and settings.kl_every > found.micro:  # a sharded model is called equally often everywhere
        raise RecastError(
            f"train.kl_every = {settings.kl_every} is above the {found.micro} pairs of a micro-batch: use at most "
            f"{found.micro}, or set train.kl_weight=0"
        )
    return found


def _culprit(finite: Tensor, sigmas: Tensor) -> str:
    """The first term (rows, as `_LOSSES`) and pair (columns) that is not finite, if this process has one."""
    for name, row in list(zip(_LOSSES, finite, strict=True))[1:]:
        if not row.all():
            return f"the loss's {name} term at σ = {sigmas[~row][0]:.4g}"
    return "the loss of another process"
