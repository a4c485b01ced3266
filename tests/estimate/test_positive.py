"""Gain curves of rewards that may be negative: clamped or mapped when curves are made, never in the shards."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recast import config, identity
from recast.cli import analyze, app
from recast.config import Recipe
from recast.core import schedule
from recast.core.curves import GainCurves
from recast.errors import ClampWarning, RecastError
from recast.estimate import at_orders, from_rollouts, stage
from recast.estimate.curves import prompt_names
from recast.estimate.shards import Rollouts, Shards
from recast.progress import no_progress
from recast.propose.stage import propose
from recast.rewards import base

RECIPE = Recipe.model_validate({"rewards": {"plain": None, "signed": None}, "prompts": {"count": 4}})
SIGMAS = schedule.from_shift(4).tolist()


CUSTOM = {"test_positive:Contrast": {"slope": 40.0}, "test_positive:Dark": {}}
SMALL = ["prompts.count=2", "estimate.samples=2", "estimate.noisings=2", "estimate.steps=4", "estimate.spacing=2"]
RECIPE_FILE = Path(__file__).parents[2] / "recipes/shapes.yaml"


class Signed:
    """A reward that maps its own scores."""

    def positive(self, scores: np.ndarray) -> np.ndarray:
        """A sigmoid."""
        return 1 / (1 + np.exp(-scores))


class Contrast:
    """Contrast: raw scores are positive, and a sigmoid maps them all the same."""

    def __init__(self, slope: float = 1.0) -> None:
        self.slope = slope

    def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any = None) -> np.ndarray:
        return images.std(dim=(1, 2, 3)).double().numpy()

    def positive(self, scores: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-self.slope * (scores - 0.12)))


class Dark(Signed):
    """A reward whose raw scores are all negative."""

    def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any = None) -> np.ndarray:
        return -images.mean(dim=(1, 2, 3)).double().numpy()


def halved(scores: np.ndarray) -> np.ndarray:
    return scores / 2


def function(images: torch.Tensor, prompts: Any, metadata: Any = None, factor: float = 1.0) -> np.ndarray:
    return factor * images.mean(dim=(1, 2, 3)).double().numpy()


function.positive = halved  # type: ignore[attr-defined]


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


def shapes(*more: str) -> Recipe:
    return config.load(RECIPE_FILE, [*SMALL, f"rewards={CUSTOM}", *more])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two custom rewards that map their own scores."""
    out = tmp_path_factory.mktemp("custom") / "run"
    propose(shapes(), out, no_progress)
    stage.estimate(shapes(), out, no_progress)
    return out


def raw(run: Path) -> np.ndarray:
    """μ (P, m, T+1, S) of the scores as the shards hold them."""
    shards = Shards(run / "shards", identity.rollouts(shapes()))
    return np.stack([shards.read(name).mu for name in prompt_names(shapes())])


@pytest.mark.parametrize(("aggregate", "alpha"), [("prompt-mean", 2.0), ("pooled", 2.0), ("prompt-mean", 4.0)])
def test_the_orders_of_a_run_use_the_map_of_its_curves(
    measured: Path, tmp_path: Path, aggregate: Any, alpha: float
) -> None:
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    recipe = shapes(f"estimate.aggregate={aggregate}", f"estimate.alpha={alpha}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "at alpha = 4 the moment is biased")
        stage.estimate(recipe, run, no_progress, reuse=True)
    made, again = GainCurves.load(run / "gains.json"), at_orders(run, (alpha, 1.5))[alpha]
    assert (made.alpha, made.aggregate) == (again.alpha, again.aggregate) == (alpha, aggregate)
    np.testing.assert_array_equal(again.D, made.D)
    np.testing.assert_array_equal(again.D_prompts, made.D_prompts)
    assert again.provenance == made.provenance
    mu = raw(run)
    assert (mu[:, 0] > 0).all()
    unmapped = GainCurves.from_mu(["contrast"], made.sigmas, mu[:, :1], alpha, aggregate)
    assert made.total[0] > 1.5 * unmapped.total[0]
    with pytest.raises(RecastError, match="rewards >= 0"):
        GainCurves.from_mu(["dark"], made.sigmas, mu[:, 1:], alpha, aggregate)


def test_the_command_line_sweeps_the_mapped_scores(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyze, "_save", lambda *_: None)  # the figure takes seconds; tests/cli/test_analyze.py has it
    result = CliRunner().invoke(app, ["analyze", "alpha", str(measured)])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")] for line in result.output.splitlines()]
    made = GainCurves.load(measured / "gains.json")
    assert next(row for row in rows if row[1:2] == ["2"])[2:4] == peaks(made)
    unmapped = GainCurves.from_mu(["contrast"], made.sigmas, raw(measured)[:, :1])
    assert peaks(unmapped) != peaks(made)[:1]


def peaks(made: GainCurves) -> list[str]:
    return [f"{int(row.argmax()) + 1} ({row.max():.2f}×)" for row in made.normalized()]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_positive:Contrast", {"slope": 3.0}),
        ("test_positive:Dark", {}),
        ("test_positive:function", {}),
        ("test_positive:function", {"factor": 2.0}),
        ("imagereward", {}),
        ("detail", {}),
    ],
)
def test_a_reward_maps_its_scores_alike_whether_or_not_it_is_loaded(name: str, options: dict[str, Any]) -> None:
    """As `recast estimate`, which has loaded its rewards, and as what reads the shards later."""
    recipe = Recipe.model_validate({"rewards": {name: options}, "prompts": {"count": 4}})
    found = [Rollouts(each.scores[:1], 10) for each in shards(0.1)]
    later = from_rollouts(recipe, SIGMAS, found)
    if name == "imagereward":  # its model is too large to load here; the class maps as an instance does
        mu = np.stack([1 / (1 + np.exp(-each.scores)) for each in found]).mean(axis=-1)
        np.testing.assert_allclose(later.D, GainCurves.from_mu([name], SIGMAS, mu).D, rtol=1e-9)
        return
    now = from_rollouts(recipe, SIGMAS, found, {name: base.load(name, **options)})
    np.testing.assert_array_equal(later.D, now.D)
