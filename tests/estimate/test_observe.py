"""What a run says of itself: its cost beforehand, its state on the way, when it is enough, and how right it was."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from recast import config
from recast.cli import app
from recast.core.curves import GainCurves
from recast.errors import ClampWarning
from recast.estimate import curves, stage
from recast.estimate.rollout import planned_evaluations
from recast.flow.sampling import rollout_levels
from recast.progress import no_progress
from recast.propose import stage as propose

ROOT = Path(__file__).parents[2]
SMALL = ["world.dimension=3", "world.prompts=12", "estimate.steps=5", "estimate.samples=2", "estimate.noisings=2"]


def mixture(*more: str) -> config.Recipe:
    return config.load(ROOT / "recipes/mixture.yaml", [*SMALL, *more])


def test_the_exact_curve_lies_in_the_stages_own_interval(tmp_path: Path) -> None:
    """The recipe as it is shipped: nine in ten levels of D at least, of a 95 % interval over prompts."""
    recipe = config.load(ROOT / "recipes/mixture.yaml")
    stage.estimate(recipe, tmp_path, no_progress)
    curves, truth = (GainCurves.load(tmp_path / name) for name in ("gains.json", "exact.json"))
    low, high = curves.intervals()["D"]
    exact = truth.D - truth.D[:, -1:]
    assert ((low - 1e-9 <= exact) & (exact <= high + 1e-9)).mean() >= 0.9


def test_planned_evaluations_by_hand() -> None:
    grid = [0, 0.3, 0.6, 1.0]
    assert planned_evaluations(grid, "paper", 2, 9, 5, None) == 2 * 5 * (1 + 2 + 3)
    # From 0.3: itself, 0.2. From 0.6: itself, 0.5, 0.2. From 1: itself, 0.5, 0.2.
    assert planned_evaluations(grid, "coupled", 2, 3, 1, [0.2, 0.5]) == 2 * 3 * (2 + 3 + 3)
    assert planned_evaluations(grid, "coupled", 1, 1, 1, None) == planned_evaluations(
        grid, "coupled", 1, 1, 1, rollout_levels(grid)
    )


def test_the_status_counts_prompts_evaluations_and_floor_hits(tmp_path: Path) -> None:
    seen: list[stage.Status] = []
    stage.estimate(mixture("world.prompts=3"), tmp_path, no_progress, watch=seen.append)
    assert [status.done for status in seen] == [1, 2, 3]
    assert {status.total for status in seen} == {3}
    assert seen[-1].evaluations == seen[-1].planned
    assert seen[0].evaluations * 3 == seen[0].planned
    assert seen[-1].floor_hits == 0
    assert seen[-1].curves.rewards == ("mode", "mixed", "fine")


def test_floor_hits_are_counted_and_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = config.load(
        ROOT / "recipes/shapes.yaml",
        ["prompts.count=1", "estimate.samples=1", "estimate.noisings=1", "estimate.steps=3", "rewards={detail: {}}"],
    )
    propose.propose(recipe, tmp_path, no_progress)
    from recast.shapes import rewards

    monkeypatch.setattr(rewards.Detail, "__call__", lambda self, images, *_: np.zeros(len(images)))
    seen: list[stage.Status] = []
    with pytest.warns(UserWarning, match="the floor 1e-10 replaced"):
        stage.estimate(recipe, tmp_path, no_progress, watch=seen.append)
    assert seen[-1].floor_hits == 4


def test_a_run_stops_when_the_interval_is_narrow_enough(tmp_path: Path) -> None:
    more = ["world.prompts=40", "estimate.noisings=4"]
    found = stage.estimate(mixture(*more), tmp_path / "all", no_progress)
    assert found is not None
    open_weight = stage.width(mixture(*more), found[0])
    target = 1.3 * open_weight
    early, _ = stage.estimate(mixture(*more), tmp_path / "early", no_progress, until_ci=target)
    assert early.D_prompts is not None
    used = len(early.D_prompts)
    assert 8 <= used < 40
    assert len(list((tmp_path / "early/shards").glob("*.safetensors"))) == used
    assert early.provenance["world"]["prompts"] == used
    assert stage.width(mixture(*more), early) <= target
    # The first prompts of the whole run, and one fewer would not have done.
    fewer, _ = stage.estimate(mixture(*more, f"world.prompts={used - 1}"), tmp_path / "all", no_progress)
    assert stage.width(mixture(*more), fewer) > target
    again, _ = stage.estimate(mixture(*more), tmp_path / "all", no_progress, until_ci=target)
    assert np.array_equal(again.D, early.D)


def test_the_command_line_says_how_many_prompts_it_took(tmp_path: Path) -> None:
    arguments = ["estimate", str(ROOT / "recipes/mixture.yaml"), *SMALL, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--until-ci", "0.9"])
    assert result.exit_code == 0, result.output
    assert "after 8 prompts the interval of W is" in result.output
    assert "as requested" in result.output
    assert "8 of 12 prompts, " in result.stderr  # what a log file sees of the way there
    result = CliRunner().invoke(app, [*arguments, "--until-ci", "0.0001"])
    assert "after 12 prompts" in result.output
    assert "above 0.0001: raise prompts.count" in result.output


def test_warnings_are_given_once_for_the_final_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the curves of a status nor for those that an early stop looks at."""
    monkeypatch.setattr(curves, "_CLAMPED", -1.0)  # every reward is worth a warning
    seen: list[stage.Status] = []
    with pytest.warns(ClampWarning) as caught:
        stage.estimate(mixture(), tmp_path, no_progress, until_ci=0.9, watch=seen.append)
    assert len(seen) == 8
    assert sum(issubclass(each.category, ClampWarning) for each in caught) == 3  # one per reward
