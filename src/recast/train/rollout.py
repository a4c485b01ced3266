"""Images of the old policy and their rewards: scored in a thread of its own while sampling goes on."""

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
from recast.flow.policy import Condition, Policy, conditioned
from recast.progress import OnProgress, ignore_progress
from recast.prompts import Row
from recast.rewards import base


@dataclass(frozen=True)
class Rollout:
    """Clean latents (n, c, h, w) of one process's images, their prompts' conditions, and their rewards (n, m)."""

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
) -> Rollout:
    """One image for every row and seed, along the flow ODE (dpm2), and the scores of all models.

    An image's start noise is that of its seed alone. A prompt is encoded once, however many images it has.
    """
    begun = time.perf_counter()
    places = {text: k for k, text in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    condition = policy.condition(list(places))
    prompt = torch.tensor([places[row["prompt"]] for row in rows])
    latents: list[Tensor] = []
    pending: list[Future[tuple[NDArray[np.float64], float]]] = []
    with device.worker(condition.embeds.device) as scorer:
        for start in range(0, len(rows), batch):
            part = slice(start, start + batch)
            clean = _sample(policy, condition.rows(prompt[part]), seeds[part], sigmas)
            if len(pending) > 1:  # images that wait for their scores take memory
                pending[-2].exception()  # raised below: processes must sample in step, whatever a reward does
            pending.append(scorer.submit(_score, models, policy.decode(clean), rows[part]))
            latents.append(clean)
            on_progress("sampling", min(start + batch, len(rows)), len(rows))
        sampled = time.perf_counter() - begun
        found = [future.result() for future in pending]
    seconds = {"sampling": sampled, "scoring": sum(spent for _, spent in found)}
    seconds["waiting"] = time.perf_counter() - begun - sampled
    return Rollout(torch.cat(latents), condition, prompt, np.concatenate([table for table, _ in found]), seconds)


def _sample(policy: Policy, condition: Condition, seeds: Sequence[int], sigmas: Sequence[float]) -> Tensor:
    noise = start_noise(policy.latent_shape, seeds).to(condition.embeds.device)
    return sampling.sample(conditioned(policy, condition), noise, sigmas, method="dpm2")


def _score(
    models: Mapping[str, base.Reward], images: Tensor, rows: Sequence[Mapping[str, Any]]
) -> tuple[NDArray[np.float64], float]:
    begun = time.perf_counter()
    with torch.no_grad():  # a thread starts with gradients on
        table = base.score(models, images, [row["prompt"] for row in rows], rows)
    return table.T, time.perf_counter() - begun
