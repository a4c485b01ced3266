"""The analyses of App. B as commands on what an estimate run left."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from recast import config
from recast.cli import app
from recast.core import renyi
from recast.core.curves import GainCurves
from recast.estimate import at_orders, stage
from recast.flow import families, lora
from recast.propose import stage as propose
from recast.weigh import weigh

ROOT = Path(__file__).parents[2]
SMALL = ["prompts.count=2", "estimate.samples=2", "estimate.noisings=2", "estimate.steps=4", "estimate.spacing=2"]


def silent(items: Iterable[Any], title: str, total: int) -> Iterable[Any]:
    return items


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)], env={"COLUMNS": "160"})


def estimate(out: Path, *more: str) -> Path:
    recipe = config.load(ROOT / "recipes/shapes.yaml", [*SMALL, *more])
    propose.propose(recipe, out, silent)
    stage.estimate(recipe, out, silent)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base with two draws of the renderer, with its own images, and a changed policy."""
    folder = tmp_path_factory.mktemp("runs")
    policy = families.load(config.policy())
    adapters = lora.Adapters(policy.network, policy.targets)
    for parameter in adapters.parameters:
        parameter.data.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    adapters.save(folder / "lora")
    return {
        "base": estimate(folder / "base"),
        "other": estimate(folder / "other", "propose.seed=1"),
        "self": estimate(folder / "self", "propose.source=policy", "estimate.rollouts=4"),
        "trained": estimate(folder / "trained", f"policy.lora={folder / 'lora'}"),
    }


@pytest.mark.filterwarnings("ignore::recast.errors.FloorWarning")  # below 1 a single zero counts
def test_seven_orders_from_the_stored_rollouts(runs: dict[str, Path], tmp_path: Path) -> None:
    result = call("alpha", runs["base"], "--out", tmp_path / "alpha")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "alpha.png").stat().st_size > 10_000
    assert all(f"{order:g}" in result.output for order in renyi.PAPER_ALPHAS)
    assert "biased at every order except 2" in result.output
    swept = at_orders(runs["base"], (2.0, 4.0))
    for order, curves in swept.items():
        factors = weigh(curves, dict.fromkeys(curves.rewards, 1.0)).matrix * curves.steps * len(curves.rewards)
        cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.output.splitlines()]
        spans = [f"{row.min():.2f} to {row.max():.2f}" for row in (*factors, factors)]
        assert [f"{order:g}", *spans] in cells  # of every reward, and of all
    made = GainCurves.load(runs["base"] / "gains.json")
    np.testing.assert_allclose(swept[2.0].D, made.D)
    again, _ = stage.estimate(
        config.load(ROOT / "recipes/shapes.yaml", [*SMALL, "estimate.alpha=4"]), _copy(runs["base"], tmp_path), silent
    )
    np.testing.assert_allclose(swept[4.0].D, again.D)


def _copy(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "copy"))


def test_self_rollouts_keep_their_exponent_in_a_sweep(runs: dict[str, Path]) -> None:
    swept = at_orders(runs["self"], (2.0,))
    np.testing.assert_allclose(swept[2.0].D, GainCurves.load(runs["self"] / "gains.json").D)


def test_sampling_distributions_below_each_other(runs: dict[str, Path], tmp_path: Path) -> None:
    result = call("sampling", runs["base"], runs["self"], "--out", tmp_path / "figure")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "figure.pdf").exists()


def test_two_generators(runs: dict[str, Path], tmp_path: Path) -> None:
    result = call("generators", runs["base"], runs["other"], "--out", tmp_path / "figure")
    assert result.exit_code == 0, result.output
    assert "renderer → renderer" in result.output
    assert "Pearson" in result.output


def test_drift_between_two_policies(runs: dict[str, Path], tmp_path: Path) -> None:
    base, trained = (GainCurves.load(runs[name] / "gains.json") for name in ("base", "trained"))
    assert base.provenance["policy"] != trained.provenance["policy"]
    assert not np.array_equal(base.D, trained.D)
    result = call("drift", runs["base"], runs["trained"], "--out", tmp_path / "drift")
    assert result.exit_code == 0, result.output
    assert f"{trained.total.sum() / base.total.sum():.2f}×" in result.output
    assert (tmp_path / "drift.png").exists()


def test_what_is_missing_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    result = call("alpha", tmp_path)
    assert result.exit_code == 2
    assert "gains.json" in result.stderr
    assert call("drift", runs["base"], tmp_path).exit_code == 2
    with pytest.raises(Exception, match="there is no adapter"):
        families.load(config.policy(lora=str(tmp_path)))
