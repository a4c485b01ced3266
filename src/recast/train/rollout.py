"""Images of the old policy and their rewards, which are computed in a separate thread during sampling."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast import device
from recast.flow import sampling
from recast.flow.generate import start_noise
from recast.flow.policy import Condition, Policy, Velocity, conditioned
from recast.progress import OnProgress, ignore_progress
from recast.prompts import Row
from recast.rewards import base

__all__ = ["Rollout", "rollout"]


@dataclass(frozen=True)
class Rollout:
    """Clean latents (n, c, h, w) of the images of one process, and their rewards (n, m).

    `condition` has one row per distinct prompt, and `prompt` (n,) the row of every image; `seconds` are by phase.
    """

    latents: Tensor
    condition: Condition
    prompt: Tensor
    rewards: NDArray[np.float64]
    seconds: Mapping[str, float]


@torch.no_grad()
def rollout(
    policy: Policy,
    models: Mapping[str, base.Reward],
    rows: Sequence[Row],
    seeds: Sequence[int],
    sigmas: Sequence[float],
    batch: int,
    on_progress: OnProgress = ignore_progress,
    integer_timesteps: bool = False,
) -> Rollout:
    """One image per row and seed, along the flow ODE (dpm2), and its scores under all rewards `models`.

    The start noise of an image depends on its seed alone. Every prompt is encoded once. With `integer_timesteps`, the
    network is told 1000 σ without its decimals, as in DiffusionNFT's sampler; the latents still follow the grid.
    """
    begun = time.perf_counter()
    places = {text: k for k, text in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    condition = policy.condition(list(places))
    prompt = torch.tensor([places[row["prompt"]] for row in rows])
    latents: list[Tensor] = []
    pending: list[Future[tuple[NDArray[np.float64], float]]] = []
    with device.worker(policy.device) as scorer:
        for start in range(0, len(rows), batch):
            part = slice(start, start + batch)
            clean = _sample(policy, condition.rows(prompt[part]), seeds[part], sigmas, integer_timesteps)
            if len(pending) > 1:  # images waiting for their scores take memory
                pending[-2].exception()  # raised below: a process whose reward fails must keep sampling with the others
            pending.append(scorer.submit(_score, models, policy.decode(clean), rows[part]))
            latents.append(clean)
            on_progress("sampling", min(start + batch, len(rows)), len(rows))
        sampled = time.perf_counter() - begun
        found = [future.result() for future in pending]
    seconds = {"sampling": sampled, "scoring": sum(spent for _, spent in found)}
    seconds["waiting"] = time.perf_counter() - begun - sampled
    return Rollout(torch.cat(latents), condition, prompt, np.concatenate([table for table, _ in found]), seconds)


def _sample(
    policy: Policy, condition: Condition, seeds: Sequence[int], sigmas: Sequence[float], integers: bool
) -> Tensor:
    noise = start_noise(policy.latent_shape, seeds).to(policy.device)
    velocity = conditioned(policy, condition)
    told = _truncated(velocity) if integers else velocity
    return sampling.sample(told, noise, sigmas, method="dpm2")


def _truncated(velocity: Velocity) -> Velocity:
    """The velocity at σ rounded down to a multiple of 1/1000, by way of float32, as DiffusionNFT computes it."""
    return lambda x, sigma: velocity(x, int(np.float32(sigma) * np.float32(1000)) / 1000)


def _score(
    models: Mapping[str, base.Reward], images: Tensor, rows: Sequence[Mapping[str, Any]]
) -> tuple[NDArray[np.float64], float]:
    begun = time.perf_counter()
    with torch.no_grad():  # a thread starts with gradients on
        table = base.score(models, images, [row["prompt"] for row in rows], rows)
    return table.T, time.perf_counter() - begun
