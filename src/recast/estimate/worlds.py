"""What a run draws on, prompt by prompt: proposals, a velocity, a scorer. Mixtures, or images of a policy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from recast import identity, images, processes, prompts
from recast.config import Recipe
from recast.core import schedule
from recast.errors import RecastError
from recast.estimate.rollout import Scorer
from recast.flow import mixture, mixture_prompts, sd3
from recast.flow.generate import TILE, batched
from recast.flow.policy import Velocity, conditioned
from recast.propose import Store
from recast.rewards import base

SCORED = 64
"""Images that are decoded and scored at a time."""


class World(Protocol):
    """The prompts of a run by name, and what the estimator needs of each."""

    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the rewards, in order."""
        ...

    @property
    def models(self) -> Mapping[str, base.Reward]:
        """The reward models by name, where there are any."""
        ...

    @property
    def sigmas(self) -> list[float]:
        """The grid σ_0..σ_T."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """One name a prompt."""
        ...

    @property
    def device(self) -> torch.device:
        """Where rollouts and scores are computed."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether one prompt's scoring may run beside the next one's sampling."""
        ...

    def inputs(self, name: str) -> str:
        """Hash of a prompt's proposals and metadata."""
        ...

    def seed(self, name: str) -> int:
        """The seed of a prompt's noise, whatever other prompts there are."""
        ...

    def clean(self, name: str) -> Tensor:
        """Proposals (N, ...)."""
        ...

    def velocity(self, name: str) -> Velocity:
        """The policy's velocity for a prompt."""
        ...

    def scorer(self, name: str) -> Scorer:
        """All rewards on clean samples, (B, ...) to (m, B)."""
        ...


def open_world(recipe: Recipe, out: Path) -> World:
    """The world that a recipe names; images need the proposals in OUT."""
    return MixtureWorld(recipe) if recipe.world.kind == "mixture" else ImageWorld(recipe, out)


class MixtureWorld:
    """Random Gaussian mixtures, one a prompt, with exact curves beside the estimated ones."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.rewards, self.models = mixture_prompts.REWARDS, dict[str, base.Reward]()
        self.sigmas = schedule.from_shift(recipe.estimate.steps, recipe.estimate.shift).tolist()
        self.names = [str(k) for k in range(recipe.world.prompts)]

    def prompt(self, name: str) -> mixture_prompts.MixturePrompt:
        """The mixture that stands for a prompt."""
        setup = self._recipe.world
        return mixture_prompts.mixture_prompt(setup.dimension, setup.modes, setup.seed * 100_003 + int(name))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return (self._recipe.world.dimension,)

    dtype = torch.float64
    device = torch.device("cpu")
    overlaps = False

    def inputs(self, name: str) -> str:
        """The world's own: proposals are made from its seed."""
        return name

    def seeds(self, name: str) -> list[int]:
        """Of the proposals, of their noise, and of the exact curve's."""
        entropy = [self._recipe.world.seed, self._recipe.estimate.seed, int(name)]
        return [int(word) for word in np.random.SeedSequence(entropy).generate_state(3)]

    def seed(self, name: str) -> int:
        """Of the noise."""
        return self.seeds(name)[1]

    def clean(self, name: str) -> Tensor:
        """Exact samples of π⁺."""
        generator = torch.Generator().manual_seed(self.seeds(name)[0])
        return self.prompt(name).proposal.sample(self._recipe.estimate.samples, generator)

    def velocity(self, name: str) -> Velocity:
        """Exact."""
        return self.prompt(name).policy

    def scorer(self, name: str) -> Scorer:
        """The three rewards."""
        return mixture.score_all(list(self.prompt(name).rewards))


class ImageWorld:
    """A text-to-image policy, reward models, and proposals from RUN/proposals."""

    dtype = torch.float32

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        proposed: bool = True,
        policy: sd3.SD3Policy | None = None,
        models: Mapping[str, base.Reward] | None = None,
    ) -> None:
        self._recipe = recipe
        rows = prompts.load(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)
        self._rows = {row["prompt"]: row for row in rows}
        self.names = list(self._rows)
        self.rewards = tuple(recipe.rewards)
        if not self.rewards:
            raise RecastError("the recipe names no reward: put at least one under rewards")
        if proposed:
            self._store = Store.open(out / "proposals", identity.proposals(recipe), recipe.propose.smallest)
            for name in self.names:  # before any model is loaded: a missing proposal is known at once
                self._files(name)
        self._policy = sd3.load(recipe.policy) if policy is None else policy
        known = models or {}
        self.models = {
            name: known.get(name) or base.load(name, **(options or {})) for name, options in recipe.rewards.items()
        }
        self.sigmas = self._policy.sigmas(recipe.estimate.steps)
        self.device = self._policy.device
        # Without a core to spare the two would only take each other's.
        self.overlaps = self.device.type != "cpu" or processes.spare_core()
        self._batch = rows_within(recipe.estimate.memory, self._policy.row_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image's latents."""
        return self._policy.latent_shape

    def _files(self, name: str) -> list[Path]:
        return [self._store.path(name, k) for k in range(self._recipe.estimate.samples)]

    def inputs(self, name: str) -> str:
        """SHA-256 over the prompt's metadata, which rewards may read, and the proposals' files."""
        found = hashlib.sha256(json.dumps(self._rows[name], sort_keys=True).encode())
        for path in self._files(name):
            found.update(hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()

    def seed(self, name: str) -> int:
        """From the prompt's words and the recipe's seed."""
        return identity.seed_of(self._recipe.estimate.seed, name, 0, "noise")

    def clean(self, name: str) -> Tensor:
        """Latents of the proposals."""
        side = self._policy.side * self._policy.pipe.vae_scale_factor
        pixels = np.stack([images.to_array(path.read_bytes(), side) for path in self._files(name)])
        return self._policy.encode(torch.from_numpy(pixels))

    def velocity(self, name: str) -> Velocity:
        """The policy's, conditioned on the prompt, as many rows at a time as fit `estimate.memory`."""
        return batched(conditioned(self._policy, self._policy.condition([name])), self._batch)

    def scorer(self, name: str) -> Scorer:
        """Decode and score, a batch at a time."""
        row = self._rows[name]

        def score(latents: Tensor) -> np.ndarray:
            tables = []
            for part in latents.split(SCORED):
                images = self._policy.decode(part)
                tables.append(base.score(self.models, images, [name] * len(images), [row] * len(images)))
            return np.concatenate(tables, axis=1)

        return score


def rows_within(memory: float, row_bytes: int) -> int:
    """Rows of a velocity call that fit `memory` GiB, in whole tiles; one tile at least."""
    return max(1, int(memory * 2**30 / row_bytes) // TILE) * TILE
