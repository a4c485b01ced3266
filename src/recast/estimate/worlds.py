"""Worlds: what `recast estimate` draws prompts from, with proposals, a velocity and a scorer for each.

A world is the images of a policy, or Gaussian mixtures, whose curves are known exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from recast import identity, images, processes, prompts
from recast.config import Recipe
from recast.core import schedule
from recast.errors import RecastError
from recast.estimate.curves import prompt_names
from recast.estimate.estimators import Scorer
from recast.flow import mixture, mixture_prompts
from recast.flow.generate import TILE, batched
from recast.flow.policy import Velocity, conditioned
from recast.propose import Store
from recast.rewards import base

if TYPE_CHECKING:
    from recast.flow.policy import Policy

__all__ = ["SCORED", "ImageWorld", "MixtureWorld", "World", "open_world", "rows_within"]

SCORED = 64
"""Images that are decoded and scored at a time."""


class World(Protocol):
    """The prompts of a run by name, and what the estimators need for each."""

    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the rewards, in order."""
        ...

    @property
    def models(self) -> Mapping[str, base.Reward]:
        """The loaded rewards by name; empty in the exact world."""
        ...

    @property
    def sigmas(self) -> list[float]:
        """The grid σ_0..σ_T."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """One name per prompt."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one clean sample."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Number format of clean samples."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of rollouts and scores."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether one prompt may be scored while the next one is sampled."""
        ...

    def inputs(self, name: str) -> str:
        """Hash of a prompt's proposals and metadata."""
        ...

    def seed(self, name: str) -> int:
        """The seed of a prompt's noise, independent of other prompts."""
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
    """The world of a recipe; a world of images reads its proposals from OUT."""
    return MixtureWorld(recipe) if recipe.world.kind == "mixture" else ImageWorld(recipe, out)


class MixtureWorld:
    """The exact world: one random Gaussian mixture per prompt, whose conditional rewards are known."""

    dtype = torch.float64
    device = torch.device("cpu")
    overlaps = False

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.rewards, self.models = mixture_prompts.REWARDS, dict[str, base.Reward]()
        self.sigmas = schedule.from_shift(recipe.estimate.steps, recipe.estimate.shift).tolist()
        self.names = prompt_names(recipe)

    def prompt(self, name: str) -> mixture_prompts.MixturePrompt:
        """The mixture that stands for a prompt."""
        setup = self._recipe.world
        return mixture_prompts.mixture_prompt(setup.dimension, setup.modes, setup.seed * 100_003 + int(name))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (self._recipe.world.dimension,)

    def inputs(self, name: str) -> str:
        """The prompt's number: its proposals are made from the settings."""
        return name

    def seeds(self, name: str) -> list[int]:
        """Seeds of the proposals, of their noise, and of the exact curve's noise."""
        entropy = [self._recipe.world.seed, self._recipe.estimate.seed, int(name)]
        return [int(word) for word in np.random.SeedSequence(entropy).generate_state(3)]

    def seed(self, name: str) -> int:
        """Seed of the noise."""
        return self.seeds(name)[1]

    def clean(self, name: str) -> Tensor:
        """Exact samples of π⁺."""
        generator = torch.Generator().manual_seed(self.seeds(name)[0])
        return self.prompt(name).proposal.sample(self._recipe.estimate.samples, generator)

    def velocity(self, name: str) -> Velocity:
        """The exact velocity."""
        return self.prompt(name).policy

    def scorer(self, name: str) -> Scorer:
        """The three rewards."""
        return mixture.score_all(list(self.prompt(name).rewards))


class ImageWorld:
    """A text-to-image policy, loaded rewards, and proposals from RUN/proposals."""

    dtype = torch.float32

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        policy: Policy | None = None,
        models: Mapping[str, base.Reward] | None = None,
    ) -> None:
        self._recipe = recipe
        rows = prompts.load_distinct(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)
        self._rows = {row["prompt"]: row for row in rows}
        self.names = list(self._rows)
        self.rewards = tuple(recipe.rewards)
        if not self.rewards:
            raise RecastError("the recipe names no reward: put at least one under rewards")
        self._store = Store.open(out / "proposals", identity.proposals(recipe), recipe.propose.smallest)
        for name in self.names:  # before any model is loaded, so that a missing proposal is reported at once
            self._files(name)
        if policy is None:
            from recast.flow import families  # diffusers, which the exact world does without

            policy = families.load(recipe.policy)
        self._policy = policy
        known = models or {}
        self.models = {
            name: known.get(name) or base.load(name, **(options or {})) for name, options in recipe.rewards.items()
        }
        self.sigmas = self._policy.sigmas(recipe.estimate.steps)
        self.device = self._policy.device
        # On a CPU without a spare core, the two would compete for the same one.
        self.overlaps = self.device.type != "cpu" or processes.spare_core()
        self._batch = rows_within(recipe.estimate.memory, self._policy.row_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the latents of one image."""
        return self._policy.latent_shape

    def _files(self, name: str) -> list[Path]:
        return [self._store.path(name, k) for k in range(self._recipe.estimate.samples)]

    def _contents(self, name: str) -> list[bytes]:
        return [self._store.read(name, k) for k in range(self._recipe.estimate.samples)]

    def inputs(self, name: str) -> str:
        """SHA-256 of the prompt's metadata, which rewards may read, and of the proposals' files."""
        found = hashlib.sha256(json.dumps(self._rows[name], sort_keys=True).encode())
        for content in self._contents(name):
            found.update(hashlib.sha256(content).digest())
        return found.hexdigest()

    def seed(self, name: str) -> int:
        """A seed derived from the prompt and the recipe's seed."""
        return identity.seed_of(self._recipe.estimate.seed, name, 0, "noise")

    def clean(self, name: str) -> Tensor:
        """Latents of the proposals."""
        size = self._policy.image_size
        pixels = np.stack([images.to_array(content, size) for content in self._contents(name)])
        return self._policy.encode(torch.from_numpy(pixels))

    def velocity(self, name: str) -> Velocity:
        """The policy's velocity for the prompt, with as many rows at a time as fit into `estimate.memory`."""
        return batched(conditioned(self._policy, self._policy.condition([name])), self._batch)

    def scorer(self, name: str) -> Scorer:
        """All rewards on decoded latents, one batch at a time."""
        row = self._rows[name]

        def score(latents: Tensor) -> np.ndarray:
            tables = []
            for part in latents.split(SCORED):
                images = self._policy.decode(part)
                tables.append(base.score(self.models, images, [name] * len(images), [row] * len(images)))
            return np.concatenate(tables, axis=1)

        return score


def rows_within(memory: float, row_bytes: int) -> int:
    """Rows of a velocity call that fit into `memory` GiB, in whole tiles, but at least one tile."""
    return max(1, int(memory * 2**30 / row_bytes) // TILE) * TILE
