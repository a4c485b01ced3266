"""`recast propose`: N images of π⁺ for every prompt, checked, hashed and kept in RUN/proposals."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from recast import prompts
from recast.config import Recipe
from recast.errors import RecastError
from recast.proposals import api, store
from recast.rewards import base

Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


def propose(recipe: Recipe, out: Path, progress: Progress) -> Path:
    """Make what is missing, then write the manifest; returns its path. What is there is not made again."""
    if recipe.world.kind != "images":
        raise RecastError(f"a world of the kind {recipe.world.kind} makes its own proposals: there are none to get")
    rows = prompts.load(recipe.prompts.source, recipe.prompts.count, recipe.prompts.seed)
    texts = [row["prompt"] for row in rows]
    settings, samples = recipe.propose, recipe.estimate.samples
    for name in recipe.rewards:  # before images are paid for: a name that no later stage knows
        base.find(name)
    client = api.Client(settings) if settings.source in api.DEFAULTS else None  # a missing key leaves no folder behind
    kept = store.Store(out / "proposals", identity(recipe), settings.smallest)
    with kept.alone():
        missing = kept.missing(texts, samples)
        if missing:
            if client is not None:
                api.fetch(client, kept, missing, progress)
            elif settings.source == "folder":
                _copy(Path(settings.folder or ""), kept, missing, progress)
            else:
                _draw(recipe, {row["prompt"]: row for row in rows}, kept, missing, progress)
        return kept.write_manifest(texts, samples, generator(recipe))


def generator(recipe: Recipe) -> str:
    """The name that the manifest gives π⁺."""
    settings = recipe.propose
    if settings.source in api.DEFAULTS:
        return settings.model or api.DEFAULTS[settings.source][1]
    return recipe.policy.model if settings.source == "policy" else settings.folder or settings.source


def identity(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide what an image is; images of another identity are never mixed in."""
    settings = recipe.propose
    facts: dict[str, Any] = {"source": settings.source, "generator": generator(recipe)}
    if settings.source in api.DEFAULTS:
        facts["base_url"] = settings.base_url or api.DEFAULTS[settings.source][0]
    if settings.source == "openai":
        facts |= {"size": settings.size, "quality": settings.quality}
    if settings.source in ("renderer", "policy"):
        facts["seed"] = settings.seed
    if settings.source == "policy":
        facts |= {"policy": policy_identity(recipe), "steps": recipe.estimate.steps, "spacing": recipe.estimate.spacing}
    return facts


def policy_identity(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide what a policy draws, an adapter by its content."""
    keys = ("model", "dtype", "guidance", "resolution", "max_sequence_length")
    facts: dict[str, Any] = {key: getattr(recipe.policy, key) for key in keys}
    if recipe.policy.lora is not None:
        facts["lora"] = adapter_hash(recipe.policy.lora)
    return facts


def adapter_hash(folder: str | Path) -> str:
    """SHA-256 of an adapter's weights."""
    path = Path(folder).expanduser() / "pytorch_lora_weights.safetensors"
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


def seed_of(seed: int, prompt: str, number: int, purpose: str = "proposal") -> int:
    """A seed for one purpose of a prompt, whatever other prompts and purposes there are."""
    words = np.frombuffer(hashlib.sha256(f"{purpose}:{prompt}".encode()).digest(), np.uint32)[:4]
    return int(np.random.SeedSequence([seed, number, *words.tolist()]).generate_state(1, np.uint32)[0])


def _copy(folder: Path, kept: store.Store, missing: list[tuple[str, int]], progress: Progress) -> None:
    found = store.read_manifest(folder)
    for prompt, number in progress(missing, "copying proposals", len(missing)):
        files = found.get(prompt, [])
        if number >= len(files):
            raise RecastError(
                f"{folder} has {len(files)} images for the prompt {prompt!r}, but {number + 1} are needed"
            )
        try:
            content = files[number].read_bytes()
        except OSError as error:
            raise RecastError(f"{files[number]}: the image cannot be read: {error.strerror or error}") from error
        kept.add(prompt, number, content)


def _draw(
    recipe: Recipe, rows: dict[str, prompts.Row], kept: store.Store, missing: list[tuple[str, int]], progress: Progress
) -> None:
    """Images of the renderer, or of the policy by the sampler that its own rollouts use."""
    from recast.flow import sd3
    from recast.shapes import render

    policy = sd3.load(recipe.policy) if recipe.propose.source == "policy" else None
    for prompt, number in progress(missing, "making proposals", len(missing)):
        seed = seed_of(recipe.propose.seed, prompt, number)
        if policy is None:
            if "include" not in rows[prompt]:
                raise RecastError(f"the renderer knows prompts of the shapes world only, not {prompt!r}")
            image = render.render([rows[prompt]], seed)[0]
        else:
            image = policy.decode(_posterior_sample(policy, recipe, prompt, seed))[0]
        kept.add(prompt, number, store.to_png(image))


def _posterior_sample(policy: Any, recipe: Recipe, prompt: str, seed: int) -> Any:
    """One sample of π_old, x_0 | x_1, by the chain that rollouts follow.

    With the few deterministic steps of training, images would differ in law from the rollouts' and D would not be
    monotone for that reason alone.
    """
    import torch

    from recast.estimate import rollout_levels
    from recast.flow import sampling
    from recast.flow.policy import conditioned

    random = torch.Generator().manual_seed(seed)
    condition = policy.condition([prompt])

    def noise(_level: int = 0) -> torch.Tensor:
        return torch.randn(1, *policy.latent_shape, generator=random).to(condition.embeds.device)

    levels = [*rollout_levels(policy.sigmas(recipe.estimate.steps), recipe.estimate.spacing), 1.0]
    with torch.no_grad():
        return sampling.sample(conditioned(policy, condition), noise(), levels, method="ancestral2", noise=noise)
