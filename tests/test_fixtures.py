"""The artifacts of version 0.1.0 still work: curves, weights, rollouts, a checkpoint and scores of a run on shapes.

tests/fixtures/v0.1.0 was written by that version, with recipes/shapes.yaml made tiny (two prompts, T = 4, rank 1, two
epochs). Its settings are recorded under the names they had then.
"""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.numpy import load_file

from recast import GainCurves, WeightMatrix, config, shapes, weigh
from recast.config import Recipe
from recast.core import artifact
from recast.errors import StaleError
from recast.estimate import at_orders
from recast.estimate import stage as estimation
from recast.evaluate import stage as evaluation
from recast.flow import families
from recast.progress import no_progress
from recast.report.stage import report
from recast.train import stage as training
from recast.train.checkpoint import all_of

OLD = Path(__file__).parent / "fixtures/v0.1.0"
REWARDS = ("composition", "alignment", "detail", "background")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run that a test may change, in the shapes world as it was then: SD3's scheduler, no version."""
    data = tmp_path / "world/data"
    shutil.copytree(files("recast.shapes").joinpath("data"), data)  # type: ignore[call-overload]
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(data / "pipeline/scheduler")
    monkeypatch.setattr(families, "files", lambda _: tmp_path / "world")
    monkeypatch.setattr(shapes, "VERSION", None)
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def recipe(run: Path, **train: int) -> Recipe:
    found = config.load_run(run / "recipe.yaml")
    return found.model_copy(update={"train": found.train.model_copy(update=train)})


def test_curves_and_weights_load() -> None:
    curves, weights = GainCurves.load(OLD / "gains.json"), WeightMatrix.load(OLD / "weights.json")
    assert curves.rewards == weights.rewards == REWARDS
    assert curves.provenance["recast"] == "0.1.0"
    made = weigh(curves, config.load_run(OLD / "recipe.yaml").budget)
    np.testing.assert_allclose(weights.matrix, made.matrix, rtol=1e-6)


def test_the_recipe_has_the_present_names() -> None:
    found = config.load_run(OLD / "recipe.yaml")
    assert (found.train.prompts_per_epoch, found.train.images_per_prompt) == (2, 2)
    assert (found.train.kl_weight, found.train.normalize) == (1.0, "reward")
    assert list(found.evaluate.held_out) == ["census"]


@pytest.mark.filterwarnings("ignore::recast.errors.FloorWarning")
def test_rollouts_are_read(run: Path) -> None:
    known = GainCurves.load(run / "gains.json")
    again = at_orders(run, [2.0, 4.0])
    np.testing.assert_allclose(again[2.0].D, known.D, rtol=1e-9, atol=1e-12)
    assert np.abs(again[4.0].D - known.D).max() > 1e-3
    made = estimation.estimate(recipe(run), run, no_progress, reuse=True)
    assert made is not None
    np.testing.assert_allclose(made[0].D, known.D, rtol=1e-9, atol=1e-12)
    assert GainCurves.load(run / "gains.json").sigmas.tolist() == known.sigmas.tolist()


def test_training_resumes_from_the_checkpoint(run: Path) -> None:
    before = load_file(run / "lora/pytorch_lora_weights.safetensors")
    assert training.train(recipe(run), run) == 2  # nothing to do
    with pytest.raises(StaleError, match=r"was trained with train.prompts_per_epoch = 2, not 4"):
        training.train(recipe(run, prompts_per_epoch=4), run)
    described: list[str] = []
    done = training.train(recipe(run, epochs=3), run, observer=training.Observer(described.append))
    assert done == 3
    assert described[0].endswith("; resuming from epoch-00002")
    assert [path.name for path in all_of(run / "checkpoints")] == ["epoch-00003"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 1), (2, 2), (3, 3)]
    after = load_file(run / "lora/pytorch_lora_weights.safetensors")
    moved = max(float(np.abs(after[key] - before[key]).max()) for key in before)
    assert 0 < moved < 0.01  # one step of Adam at 1e-3, averaged: not a new start, whose A would be another


def test_scores_are_up_to_date_and_reported(run: Path, tmp_path: Path) -> None:
    settings = recipe(run)
    before = artifact.read_rows(run / "scores/scores.jsonl", "")
    evaluation.check_stale(settings, run / "scores", run / "lora")
    assert evaluation.complete(settings, run / "scores")
    evaluation.evaluate(settings, run, run / "lora", no_progress)
    assert artifact.read_rows(run / "scores/scores.jsonl", "") == before
    made = report([run], tmp_path / "report")
    rows = {row[0].text for table in made.tables for row in table.rows}
    assert {*REWARDS, "census"} <= rows
    assert made.page.is_file()


def test_results_of_the_former_shapes_world_are_not_continued(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(StaleError, match=r"policy\.world = None, not 2"):
        training.train(recipe(run, epochs=3), run)
    with pytest.raises(StaleError, match=r"policy\.world"):
        evaluation.check_stale(recipe(run), run / "scores", run / "lora")
