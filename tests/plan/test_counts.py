"""Counts of the plan beside runs in which every call is counted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recast import config
from recast.config import Recipe
from recast.errors import RecastError
from recast.estimate import stage as estimating
from recast.evaluate import stage as evaluating
from recast.flow import families
from recast.flow.pipeline import PipelinePolicy
from recast.plan import counts
from recast.progress import no_progress
from recast.propose import stage as proposing
from recast.rewards import base
from recast.sweep import jobs
from recast.train import stage as training

ROOT = Path(__file__).parents[2]
SMALL = [
    *("prompts.count=2", "propose.source=policy", "rewards={alignment: {}, background: {}}", "weigh.method=static"),
    *("estimate.samples=3", "estimate.noisings=3", "estimate.steps=3", "estimate.rollouts=1", "train.trackers=[]"),
    *("train.epochs=3", "train.prompts_per_epoch=2", "train.images_per_prompt=3", "train.batch=6", "train.rank=2"),
    *("train.fraction=0.7", "train.preview_every=2", "train.save_every=9", "train.micro_batch=5"),
    *("evaluate.count=5", "evaluate.repeats=2", "evaluate.steps=2", "evaluate.guidance=2.0", "evaluate.batch=16"),
]


def shapes(*more: str) -> Recipe:
    return config.load(ROOT / "recipes/shapes.yaml", [*SMALL, *more])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Rows of velocity calls, images encoded and decoded, and scores, as they happen."""
    found: Counter[str] = Counter()

    def counted(name: str) -> None:
        plain = getattr(PipelinePolicy, name)

        def call(self: PipelinePolicy, x: Any, *rest: Any) -> Any:
            found[name] += len(x)
            return plain(self, x, *rest)

        monkeypatch.setattr(PipelinePolicy, name, call)

    for name in ("velocity", "encode", "decode"):
        counted(name)
    score = base.score

    def scored(rewards: Any, images: Any, *rest: Any) -> Any:
        found["scores"] += len(rewards) * len(images)
        return score(rewards, images, *rest)

    monkeypatch.setattr(base, "score", scored)
    return found


@pytest.mark.filterwarnings("ignore:with the policy's own images", "ignore:the floor")
@pytest.mark.parametrize("more", [[], ["estimate.estimator=paper", "estimate.rollouts=2"]])
def test_proposals_and_curves(tmp_path: Path, seen: Counter[str], more: list[str]) -> None:
    recipe = shapes(*more)
    grid = families.load(recipe.policy).sigmas(recipe.estimate.steps)
    planned = counts.propose(recipe, grid)
    proposing.propose(recipe, tmp_path, no_progress)
    assert (seen["velocity"], seen["decode"]) == (planned.rows, planned.decoded) == (planned.evaluations, 6)
    seen.clear()
    planned = counts.estimate(recipe, grid)
    made = estimating.estimate(recipe, tmp_path, no_progress)
    assert made is not None
    assert made[0].provenance["velocity_evaluations"] == planned.evaluations
    assert planned.evaluations < planned.rows == seen["velocity"]  # 9, 18 and 6 rows are no whole tiles
    assert (seen["encode"], seen["decode"], seen["scores"]) == (6, planned.decoded, planned.reward_calls)


@pytest.mark.parametrize("kl", [0.0, 1.0])
def test_training_and_evaluation(tmp_path: Path, seen: Counter[str], kl: float) -> None:
    recipe = shapes(f"train.kl_weight={kl}")
    grid = families.load(recipe.policy).sigmas(3)
    planned, sizes = counts.train(recipe, 1, grid)
    training.train(recipe, tmp_path)
    assert planned.pairs == 3 * 6 * 2
    # The first of three optimizer steps needs neither the old policy nor the base, which are the trained one.
    assert seen["velocity"] == planned.rows + planned.pairs + planned.pairs * 2 // 3 * (2 if kl else 1)
    assert planned.evaluations == 3 * (3 * 6 + 2 * counts.PREVIEWS)  # sheets after epoch 2 and after the last
    assert (seen["decode"], seen["scores"]) == (planned.decoded, planned.reward_calls)
    assert (sizes.micro, sizes.accumulation) == (4, 3)
    if kl:
        return
    seen.clear()
    planned = counts.evaluate(recipe, 1)
    evaluating.evaluate(recipe, tmp_path, tmp_path / "lora", no_progress)
    assert (planned.evaluations, planned.rows) == (20, 32)
    assert (seen["velocity"], seen["decode"], seen["scores"]) == (planned.rows, planned.decoded, planned.reward_calls)


def test_the_papers_stage() -> None:
    recipe = config.load(ROOT / "recipes/sd35/ocr.yaml", ["evaluate.count=1018"])
    grid = [k / 25 for k in range(26)]  # Alg. 1 walks down any grid
    found = counts.estimate(recipe, grid)
    assert found.evaluations == found.rows == 80 * 8 * 16 * 325
    assert found.scored == dict.fromkeys(("clipscore", "hpsv2", "pickscore", "ocr"), 80 * 8 * (1 + 25 * 16))
    assert counts.propose(recipe, grid).calls == {"propose": 640}
    found, sizes = counts.train(recipe, 8, grid)
    assert found.pairs == 60 * 1152 * 24
    assert (sizes.micro, sizes.accumulation) == (24, 144)
    found = counts.evaluate(recipe, 8)
    assert found.calls == {"unifiedreward": 1018}
    assert 1018 < found.decoded <= 1018 + 8 * 15


def test_more_processes_evaluate_the_same_images() -> None:
    recipe = shapes("evaluate.count=75")
    # Parts of 64, 64 and 22 images, each process its whole tiles: 86 and 64 images are 96 and 64 for two of them.
    assert [counts.evaluate(recipe, n).decoded for n in (1, 2, 3)] == [160, 96 + 64, 64 + 64 + 32]
    assert counts.evaluate(recipe, 2).reward_calls == 3 * 150


def test_reweighing_repeats_the_estimate() -> None:
    once, often = shapes("train.epochs=7"), shapes("train.epochs=7", "train.reweigh_every=3")
    grid = families.load(once.policy).sigmas(3)
    every = counts.estimate(once, grid)
    assert counts.train(often, 1, grid)[0] == counts.train(once, 1, grid)[0].plus(every, 2)  # before epochs 4 and 7


def test_a_sweep_has_as_many_trainings_as_jobs(tmp_path: Path) -> None:
    recipe = config.load(ROOT / "recipes/shapes.yaml")
    budgets = jobs.budgets_of(recipe, recipe.sweep.budgets)
    planned = jobs.jobs_of(recipe, tmp_path, recipe.sweep.methods, recipe.sweep.seeds, budgets)
    trained = [job for job in planned if job.epochs]
    assert len(trained) == len(recipe.sweep.methods) * len(recipe.sweep.seeds) * (1 + len(recipe.rewards))


def test_prompts_that_are_not_here_need_a_number() -> None:
    recipe = config.load(ROOT / "recipes/sd35/ocr.yaml", ["prompts.count=null"])
    with pytest.raises(RecastError, match=r"train.txt does not exist here: set prompts.count to its number of prompts"):
        counts.estimate(recipe, [0.0, 1.0])
    with pytest.raises(RecastError, match=r"test.txt does not exist here: set evaluate.count to its number"):
        counts.evaluate(recipe, 1)
    with pytest.raises(RecastError, match="train.batch = 1152 cannot be divided among 7 processes"):
        counts.train(recipe, 7, [0.0, 0.5, 1.0])
