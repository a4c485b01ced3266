"""Gain curves of rewards that may be negative: clamped or mapped when curves are made, never in the shards."""

import warnings

import numpy as np
import pytest

from recast.config import Recipe
from recast.core import schedule
from recast.core.curves import GainCurves
from recast.errors import ClampWarning
from recast.estimate import from_rollouts
from recast.estimate.shards import Rollouts

RECIPE = Recipe.model_validate({"rewards": {"plain": None, "signed": None}, "prompts": {"count": 4}})
SIGMAS = schedule.from_shift(4).tolist()


class Signed:
    """A reward that maps its own scores."""

    def positive(self, scores: np.ndarray) -> np.ndarray:
        """A sigmoid."""
        return 1 / (1 + np.exp(-scores))


def shards(low: float) -> list[Rollouts]:
    rng = np.random.default_rng(0)
    return [Rollouts(rng.uniform(low, 1, (2, 5, 6, 3)), 10) for _ in range(4)]


def curves(found: list[Rollouts], models: dict[str, object]) -> GainCurves:
    return from_rollouts(RECIPE, SIGMAS, found, {"plain": object(), "signed": object()} | models)  # type: ignore[arg-type]


def test_negative_scores_are_mapped_before_the_mean_over_rollouts() -> None:
    found = shards(-1.0)
    with pytest.warns(ClampWarning, match=r"4\d\.\d% of the scores of 'plain' are negative and count as 0"):
        made = curves(found, {"signed": Signed()})
    scores = np.stack([shard.scores for shard in found])
    mu = np.stack([np.maximum(scores[:, 0], 0), 1 / (1 + np.exp(-scores[:, 1]))], axis=1).mean(axis=-1)
    np.testing.assert_allclose(made.D, GainCurves.from_mu(("plain", "signed"), SIGMAS, mu, 2.0).D)
    assert (found[0].scores < 0).any()  # what is kept stays as it was


def test_a_bite_is_measured_where_the_reward_applies() -> None:
    """Three percent of the scores of one prompt of four; to the others the reward does not apply."""
    found = shards(0.0)
    for shard in found[1:]:
        shard.scores[0] = np.nan
    found[0].scores[0].flat[:3] = -0.5
    with pytest.warns(ClampWarning, match=r"3\.3% of the scores of 'plain'"):
        curves(found, {})


def test_a_bite_of_less_than_a_percent_is_no_news() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curves(shards(-0.005), {})
