"""The estimate stage: shards that survive a kill, settings that are not mixed, and curves made again in seconds."""

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recast import config, identity
from recast.cli import app
from recast.core import artifact
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.estimate import stage, worlds
from recast.estimate.shards import Rollouts, Shards
from recast.flow import generate
from recast.progress import no_progress
from recast.propose import stage as propose

ROOT = Path(__file__).parents[2]
MIXTURE = ["world.dimension=3", "world.prompts=4", "estimate.steps=5", "estimate.samples=2", "estimate.noisings=2"]
SHAPES = ["prompts.count=2", "estimate.samples=2", "estimate.noisings=2", "estimate.steps=4", "estimate.spacing=2"]


def mixture(*more: str) -> config.Recipe:
    return config.load(ROOT / "recipes/mixture.yaml", [*MIXTURE, *more])


@pytest.fixture(scope="module")
def proposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proposed")
    propose.propose(shapes("prompts.count=3"), folder, no_progress)
    return folder


def shapes(*more: str) -> config.Recipe:
    return config.load(ROOT / "recipes/shapes.yaml", [*SHAPES, *more])


def fresh(proposed: Path, folder: Path) -> Path:
    shutil.copytree(proposed, folder)
    return folder


def test_killed_at_any_prompt_and_started_again_the_bytes_are_the_same(tmp_path: Path) -> None:
    stage.estimate(mixture(), tmp_path / "whole", no_progress)

    def killed(items: Iterable[Any], title: str, total: int) -> Iterable[Any]:
        for k, item in enumerate(items):
            if k == 1:
                raise KeyboardInterrupt
            yield item

    for _ in range(3):  # one more prompt each time
        with pytest.raises(KeyboardInterrupt):
            stage.estimate(mixture(), tmp_path / "parts", killed)
        assert not (tmp_path / "parts/gains.json").exists()
    assert len(list((tmp_path / "parts/shards").glob("*.safetensors"))) == 3
    stage.estimate(mixture(), tmp_path / "parts", no_progress)
    for name in ("gains.json", "exact.json", "recipe.yaml", "shards/manifest.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_on_images_too_and_whatever_the_batch(proposed: Path, tmp_path: Path) -> None:
    stage.estimate(shapes("estimate.memory=1e-6"), fresh(proposed, tmp_path / "a"), no_progress)
    stage.estimate(shapes("estimate.memory=8", "prompts.count=1"), fresh(proposed, tmp_path / "b"), no_progress)
    stage.estimate(shapes("estimate.memory=0.01"), tmp_path / "b", no_progress)
    first, second = (tmp_path / name / "gains.json" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    curves = GainCurves.load(first)
    assert curves.rewards == ("composition", "alignment", "detail", "background")
    assert curves.provenance["prompts"]["count"] == 2
    assert curves.provenance["policy"]["model"] == "shapes"


def test_a_prompts_shard_does_not_depend_on_the_others(proposed: Path, tmp_path: Path) -> None:
    few, many = fresh(proposed, tmp_path / "few"), fresh(proposed, tmp_path / "many")
    stage.estimate(shapes("prompts.count=1"), few, no_progress)
    stage.estimate(shapes("prompts.count=3"), many, no_progress)
    for path in (few / "shards").glob("*.safetensors"):
        assert path.read_bytes() == (many / "shards" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("estimate.noisings=3", "made with estimate.noisings = 2, not 3"),
        ("estimate.seed=1", "made with estimate.seed = 0, not 1"),
        ("world.modes=3", "made with world.modes = 6, not 3"),
    ],
)
def test_rollouts_of_other_settings_are_refused_by_name(tmp_path: Path, change: str, words: str) -> None:
    stage.estimate(mixture(), tmp_path, no_progress)
    before = (tmp_path / "recipe.yaml").read_bytes()
    with pytest.raises(RecastError, match=words):
        stage.estimate(mixture(change), tmp_path, no_progress)
    assert (tmp_path / "recipe.yaml").read_bytes() == before


def test_more_prompts_only_add_shards(tmp_path: Path) -> None:
    stage.estimate(mixture("world.prompts=2"), tmp_path, no_progress)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.safetensors")}
    curves, _ = stage.estimate(mixture(), tmp_path, no_progress)
    assert curves.D_prompts is not None
    assert len(curves.D_prompts) == 4
    assert all(path.stat().st_mtime_ns == when for path, when in times.items())


def test_alpha_and_aggregation_come_from_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.estimate(mixture("estimate.rollouts=4"), tmp_path, no_progress)
    monkeypatch.setattr(stage, "sample", None)  # a rollout would fail
    curves, _ = stage.estimate(mixture("estimate.rollouts=4", "estimate.alpha=4"), tmp_path, no_progress, reuse=True)
    assert curves.alpha == 4
    shards = Shards(tmp_path / "shards", identity.rollouts(mixture("estimate.rollouts=4")))
    table = np.stack([shards.read(str(k)).mu for k in range(4)])
    expected = GainCurves.from_mu(curves.rewards, curves.sigmas, table, 4.0)
    np.testing.assert_allclose(curves.D, expected.D)


def test_reuse_makes_nothing_new(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="has no rollouts to reuse: run without --reuse"):
        stage.estimate(mixture(), tmp_path, no_progress, reuse=True)
    stage.estimate(mixture("world.prompts=3"), tmp_path, no_progress)
    curves, _ = stage.estimate(mixture(), tmp_path, no_progress, reuse=True)
    assert curves.D_prompts is not None
    assert len(curves.D_prompts) == 3


def test_rewards_in_another_order_and_other_metadata_are_noticed(proposed: Path, tmp_path: Path) -> None:
    folder = fresh(proposed, tmp_path / "run")
    stage.estimate(shapes("rewards={detail: {}, background: {}}"), folder, no_progress)
    with pytest.raises(RecastError, match="made with order = "):
        stage.estimate(shapes("rewards={background: {}, detail: {}}"), folder, no_progress)
    world = worlds.open_world(shapes("rewards={detail: {}}"), folder)
    before = world.inputs(world.names[0])
    world._rows[world.names[0]]["tag"] = "other"  # type: ignore[attr-defined]
    assert world.inputs(world.names[0]) != before


def test_noise_and_proposals_have_seeds_of_their_own() -> None:
    assert identity.seed_of(0, "a", 0) != identity.seed_of(0, "a", 0, "noise")
    assert identity.proposals(shapes("propose.source=policy")) != identity.proposals(
        shapes("propose.source=policy", "policy.dtype=bfloat16")
    )


def test_the_command_line_reuses(tmp_path: Path) -> None:
    arguments = [
        "estimate",
        str(ROOT / "recipes/mixture.yaml"),
        *MIXTURE,
        "estimate.rollouts=4",
        "--out",
        str(tmp_path),
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    result = CliRunner().invoke(app, [*arguments, "--alpha", "4", "--reuse"])
    assert result.exit_code == 0, result.output
    assert GainCurves.load(tmp_path / "gains.json").alpha == 4


def test_proposals_are_asked_for_and_changed_ones_are_noticed(proposed: Path, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="there are no proposals in .*: run `recast propose`"):
        stage.estimate(shapes(), tmp_path / "none", no_progress)
    folder = fresh(proposed, tmp_path / "some")
    with pytest.raises(RecastError, match="has no proposal 2 for the prompt"):
        stage.estimate(shapes("estimate.samples=3"), folder, no_progress)
    shutil.rmtree(folder / "shards")
    stage.estimate(shapes(), folder, no_progress)
    images = sorted((folder / "proposals/images").iterdir())
    for image in images[1:]:
        shutil.copy(images[0], image)
    with pytest.raises(RecastError, match="is not the image that was recorded"):
        stage.estimate(shapes(), folder, no_progress)
    (images[0].parents[1] / "manifest.jsonl").unlink()  # which has their hashes
    with pytest.raises(RecastError, match="was made from other proposals or metadata for the prompt"):
        stage.estimate(shapes(), folder, no_progress)


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    stage.estimate(mixture(), tmp_path, no_progress)
    path = next((tmp_path / "shards").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(RecastError, match="not a readable shard .*: remove it and estimate again"):
        stage.estimate(mixture(), tmp_path, no_progress)


def test_shards_hold_every_score(tmp_path: Path) -> None:
    scores = np.random.default_rng(0).random((2, 3, 4, 5))
    shards = Shards(tmp_path, {"a": {"b": 1}})
    shards.write("x", Rollouts(scores, 7), "hash")
    found = shards.read("x", "hash")
    assert np.array_equal(found.scores, scores)
    assert found.evaluations == 7
    np.testing.assert_allclose(found.mu, scores.mean(-1))
    assert artifact.read(tmp_path / "manifest.json", "recast.shards")["settings"] == {"a.b": 1}


def test_batches_are_padded_to_whole_tiles() -> None:
    seen = []

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        seen.append(len(x))
        return sigma * x

    x = torch.randn(37, 2)
    assert torch.equal(generate.batched(velocity, 16)(x, 0.5), 0.5 * x)
    assert seen == [16, 16, 16]
    seen.clear()
    assert torch.equal(generate.batched(velocity, 64)(x, 0.5), 0.5 * x)
    assert seen == [48]


def test_self_rollouts_use_the_exponent_alpha_and_ask_for_rollouts(proposed: Path, tmp_path: Path) -> None:
    recipe = shapes("propose.source=policy", "prompts.count=1")
    propose.propose(recipe, tmp_path, no_progress)
    with pytest.warns(UserWarning, match="with the policy's own images the moment is biased"):
        curves, _ = stage.estimate(recipe, tmp_path, no_progress)
    shard = Shards(tmp_path / "shards", identity.rollouts(recipe)).read(worlds.open_world(recipe, tmp_path).names[0])
    expected = GainCurves.from_mu(curves.rewards, curves.sigmas, shard.mu[None], 2.0, self_rollout=True)
    np.testing.assert_allclose(curves.D, expected.D)


@pytest.mark.parametrize(
    ("recipe", "change", "words"),
    [
        ("mixture", "policy.model=shapes", "the section policy belongs to world.kind = images"),
        ("shapes", "world.dimension=3", "world.dimension belongs to world.kind = mixture"),
        ("shapes", "rewards={}", "the recipe names no reward"),
        ("shapes", "rewards.sharpness={}", "unknown reward 'sharpness'"),
        ("shapes", "estimate.memory=0", "estimate.memory = 0"),
    ],
)
def test_idle_and_unknown_settings_are_named(
    proposed: Path, tmp_path: Path, recipe: str, change: str, words: str
) -> None:
    def attempt() -> None:
        made = config.load(ROOT / f"recipes/{recipe}.yaml", [*(SHAPES if recipe == "shapes" else []), change])
        stage.estimate(made, fresh(proposed, tmp_path / "run"), no_progress)

    with pytest.raises(RecastError, match=words):
        attempt()


def test_scoring_beside_sampling_changes_nothing(
    proposed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_world = worlds.open_world

    def scored_in(overlaps: bool, out: Path) -> set[str]:
        """The threads that score, where scoring may or may not run beside sampling."""
        threads: set[str] = set()

        def watching(recipe: config.Recipe, folder: Path) -> Any:
            world = open_world(recipe, folder)
            world.overlaps = overlaps  # type: ignore[misc]
            scorer = world.scorer

            def watched(name: str) -> Any:
                threads.add(threading.current_thread().name)
                return scorer(name)

            world.scorer = watched  # type: ignore[method-assign]
            return world

        monkeypatch.setattr(worlds, "open_world", watching)
        stage.estimate(shapes("prompts.count=3"), fresh(proposed, out), no_progress)
        return threads

    assert threading.main_thread().name not in scored_in(True, tmp_path / "one")
    scored_in(False, tmp_path / "two")
    assert (tmp_path / "one/gains.json").read_bytes() == (tmp_path / "two/gains.json").read_bytes()


def test_a_failing_reward_stops_the_run_and_keeps_what_was_done(
    proposed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fresh(proposed, tmp_path / "run")
    from recast.shapes import rewards

    detail, calls = rewards.Detail.__call__, []

    def fragile(self: Any, images: torch.Tensor, texts: Any, metadata: Any = None) -> Any:
        calls.append(texts[0])
        if len(set(calls)) > 1:
            raise ValueError("broken")
        return detail(self, images, texts, metadata)

    monkeypatch.setattr(rewards.Detail, "__call__", fragile)
    with pytest.raises(RecastError, match="the reward 'detail' failed on"):
        stage.estimate(shapes(), folder, no_progress)
    assert len(list((folder / "shards").glob("*.safetensors"))) == 1
    assert not list((folder / "shards").glob("*.lock"))


def test_rows_fit_the_memory_in_whole_tiles() -> None:
    assert worlds.rows_within(1.0, 2**20) == 1024
    assert worlds.rows_within(0.04, 2**20) == 32
    assert worlds.rows_within(1e-9, 2**20) == 16


def test_settings_bind_before_the_first_shard_is_there(tmp_path: Path) -> None:
    """Another process may be loading its model with them."""
    Shards(tmp_path, {"steps": 4})
    with pytest.raises(RecastError, match="holds rollouts made with steps = 4, not 8"):
        Shards(tmp_path, {"steps": 8})
