"""How often each stage of a recipe calls its networks, its rewards and its servers, from the settings alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recast import prompts
from recast.config import Recipe
from recast.errors import RecastError
from recast.estimate import rows_per_prompt
from recast.evaluate.stage import PART
from recast.flow import sampling
from recast.flow.generate import TILE
from recast.train import Batches, batches
from recast.train.stage import PREVIEWS

__all__ = ["Counts", "estimate", "evaluate", "known", "prompts_of", "propose", "train"]


@dataclass(frozen=True)
class Counts:
    """What one stage does, over all processes.

    Parameters
    ----------
    evaluations : int
        Velocity evaluations of sampling, one per image and step; those of training are in `pairs`.
    rows : int
        The same with the rows that pad a batch, which are computed as well.
    pairs : int
        (image, level) pairs of training.
    encoded, decoded : int
        Images that the VAE encodes and decodes.
    scored : mapping of str to int
        Images that each reward scores.
    calls : mapping of str to int
        Requests to servers, by stage or reward.
    """

    evaluations: int = 0
    rows: int = 0
    pairs: int = 0
    encoded: int = 0
    decoded: int = 0
    scored: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def reward_calls(self) -> int:
        """Scores of one image by one reward."""
        return sum(self.scored.values())

    def plus(self, other: Counts, times: int = 1) -> Counts:
        """These counts and those of another stage, so many times."""

        def table(mine: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, int]:
            return {name: mine.get(name, 0) + times * theirs.get(name, 0) for name in dict.fromkeys([*mine, *theirs])}

        return Counts(
            self.evaluations + times * other.evaluations,
            self.rows + times * other.rows,
            self.pairs + times * other.pairs,
            self.encoded + times * other.encoded,
            self.decoded + times * other.decoded,
            table(self.scored, other.scored),
            table(self.calls, other.calls),
        )


def known(source: str, count: int | None, setting: str, distinct: bool) -> int:
    """The number of prompts of a set: `count`, or that of its file; an error names the setting if there is neither."""
    if source.startswith("shapes:") or Path(source).is_file():
        return len(prompts.load_distinct(source, count) if distinct else prompts.load(source, count))
    if count is None:
        raise RecastError(f"{source} does not exist here: set {setting} to its number of prompts to plan without it")
    return count


def _remote(scored: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in scored.items() if name == "unifiedreward"}


def prompts_of(recipe: Recipe) -> int:
    """The number of prompts that curves are measured on."""
    if recipe.world.kind == "mixture":
        return recipe.world.prompts
    return known(recipe.prompts.source, recipe.prompts.count, "prompts.count", distinct=True)


def propose(recipe: Recipe, sigmas: Sequence[float]) -> Counts:
    """Images of π⁺: requests to an API, or one trajectory of the policy each."""
    images, settings = prompts_of(recipe) * recipe.estimate.samples, recipe.estimate
    if recipe.propose.endpoint is not None:
        return Counts(calls={"propose": images})
    if recipe.propose.source != "policy":
        return Counts()
    steps = len(sigmas) - 1
    if settings.estimator == "coupled":
        steps = len([*sampling.rollout_levels(sigmas, settings.spacing), sigmas[-1]]) - 1
    return Counts(evaluations=images * steps, rows=images * steps, decoded=images)


def estimate(recipe: Recipe, sigmas: Sequence[float]) -> Counts:
    """Rollouts of all prompts, and their scores."""
    count, settings = prompts_of(recipe), recipe.estimate
    calls = rows_per_prompt(recipe, sigmas)
    if recipe.world.kind == "mixture":
        return Counts(evaluations=count * sum(calls), rows=count * sum(calls))
    ends = settings.steps * settings.rollouts * (settings.noisings if settings.estimator == "coupled" else 1)
    images = count * settings.samples * (1 + ends)
    scored = dict.fromkeys(recipe.rewards, images)
    return Counts(
        evaluations=count * sum(calls),
        rows=count * sum(_tiled(rows) for rows in calls),
        encoded=count * settings.samples,
        decoded=images,
        scored=scored,
        calls=_remote(scored),
    )


def train(recipe: Recipe, processes: int, sigmas: Sequence[float]) -> tuple[Counts, Batches]:
    """All epochs, with sample sheets and new estimates of the curves, and the sizes of an epoch."""
    settings, steps = recipe.train, len(sigmas) - 1
    levels = settings.levels(steps)
    sizes = batches(
        processes, settings.prompts_per_epoch, settings.images_per_prompt, settings.batch, levels, settings.micro_batch
    )
    images, every = settings.epochs * sizes.total, settings.preview_every
    sheets = -(-settings.epochs // every) if every else 0  # after every so many epochs, and after the last one
    shown = sheets * PREVIEWS * processes  # every process draws them
    drawn = images * steps + shown * steps
    scored = dict.fromkeys(recipe.budget, images)
    found = Counts(drawn, drawn, images * levels, 0, images + shown, scored, _remote(scored))
    if settings.reweigh_every:
        found = found.plus(estimate(recipe, sigmas), (settings.epochs - 1) // settings.reweigh_every)
    return found, sizes


def evaluate(recipe: Recipe, processes: int) -> Counts:
    """The images of one policy, and their scores by the trained and the held-out rewards."""
    settings = recipe.evaluate
    images = known(settings.prompts, settings.count, "evaluate.count", distinct=False) * settings.repeats
    parts = [min(PART, images - start) for start in range(0, images, PART)]
    shares = [sum(parts[rank::processes]) for rank in range(processes)]
    drawn = sum(_tiled(share) for share in shares)  # whole batches are multiples of a tile
    scored = dict.fromkeys({**recipe.rewards, **settings.held_out}, images)
    return Counts(images * settings.steps, drawn * settings.steps, 0, 0, drawn, scored, _remote(scored))


def _tiled(rows: int) -> int:
    return -(-rows // TILE) * TILE
