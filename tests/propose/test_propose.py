"""`recast propose`: the renderer, the policy and a folder as sources, and a folder that only grows."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recast import config, images
from recast.cli import app
from recast.errors import RecastError
from recast.estimate import stage as estimation
from recast.flow import sampling
from recast.progress import no_progress
from recast.propose import stage, store
from recast.shapes import rewards
from server import png, serve

RECIPE = Path(__file__).parents[2] / "recipes/shapes.yaml"


def recipe(*overrides: str) -> config.Recipe:
    return config.load(RECIPE, ["prompts.count=2", "estimate.samples=3", *overrides])


def rows(manifest: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in manifest.read_text().splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def load(folder: Path, row: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(images.to_array((folder / row["file"]).read_bytes(), (64, 64)))


def test_the_renderer_draws_what_is_asked(tmp_path: Path) -> None:
    found = rows(stage.propose(recipe(), tmp_path, no_progress))
    assert len(found) == 6
    images = torch.stack([load(tmp_path / "proposals", row) for row in found])
    assert (rewards.Composition()(images, [row["prompt"] for row in found]) == 1).all()
    assert len({row["sha256"] for row in found}) == 6
    assert found[0]["generator"] == "renderer"
    assert (found[0]["width"], found[0]["height"]) == (64, 64)


def test_the_same_recipe_gives_the_same_bytes_and_more_prompts_change_none(tmp_path: Path) -> None:
    stage.propose(recipe(), tmp_path / "a", no_progress)
    stage.propose(recipe("prompts.count=1"), tmp_path / "b", no_progress)
    few = content(tmp_path / "b")
    stage.propose(recipe(), tmp_path / "b", no_progress)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    for name, data in few.items():
        assert "images" not in name or content(tmp_path / "a")[name] == data


def test_killed_and_started_again_nothing_is_made_twice(tmp_path: Path) -> None:
    def killed(items: Iterable[Any], title: str, total: int) -> Iterable[Any]:
        for k, item in enumerate(items):
            if k == 2:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        stage.propose(recipe(), tmp_path / "a", killed)
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "a/proposals/images").iterdir()}
    assert len(made) == 2
    stage.propose(recipe(), tmp_path / "a", no_progress)
    assert all(path.stat().st_mtime_ns == when for path, when in made.items())
    stage.propose(recipe(), tmp_path / "b", no_progress)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_the_policys_own_images(tmp_path: Path) -> None:
    found = rows(stage.propose(recipe("propose.source=policy"), tmp_path, no_progress))
    assert found[0]["generator"] == "shapes"
    images = torch.stack([load(tmp_path / "proposals", row) for row in found])
    texts = [row["prompt"] for row in found]
    assert 0.1 < rewards.Composition()(images, texts).mean() < 1
    assert rewards.Detail()(images, texts).min() > 0


@pytest.mark.filterwarnings("ignore::recast.errors.FloorWarning", "ignore:with the policy.s own images")
@pytest.mark.parametrize("sampler", [None, "sde", "euler"])
def test_self_rollouts_follow_the_law_of_the_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str | None
) -> None:
    """By Alg. 1, the policy's own images and the rollouts from pure noise are made by one sampler on one grid."""
    chosen = [] if sampler is None else [f"estimate.sampler={sampler}"]
    settings = recipe(
        *("propose.source=policy", "estimate.estimator=paper", "estimate.steps=3", "prompts.count=1"),
        *("estimate.samples=1", "estimate.rollouts=2", *chosen),
    )
    real, seen = sampling.sample, []

    def watched(velocity: Any, x: torch.Tensor, levels: Any, **options: Any) -> torch.Tensor:
        seen.append((options["method"], tuple(levels), options["noise"] is None, options.get("start", len(levels) - 1)))
        return real(velocity, x, levels, **options)

    monkeypatch.setattr(sampling, "sample", watched)
    stage.propose(settings, tmp_path, no_progress)
    assert len(seen) == 1
    estimation.estimate(settings, tmp_path, no_progress)
    assert [call[3] for call in seen[1:]] == [1, 2, 3]
    assert seen[-1] == seen[0]
    assert seen[0][0] == (sampler or "ancestral")
    other = settings.estimate.model_copy(update={"sampler": "ancestral2"})
    with pytest.raises(RecastError, match=f"made with sampler = '{sampler or 'ancestral'}', not 'ancestral2'"):
        stage.propose(settings.model_copy(update={"estimate": other}), tmp_path, no_progress)


def test_a_folder_with_a_manifest(tmp_path: Path) -> None:
    stage.propose(recipe("estimate.samples=4"), tmp_path / "first", no_progress)
    given = f"propose.folder={tmp_path / 'first/proposals'}"
    found = rows(stage.propose(recipe("propose.source=folder", given), tmp_path / "second", no_progress))
    original = rows(tmp_path / "first/proposals/manifest.jsonl")
    assert {row["sha256"] for row in found} < {row["sha256"] for row in original}
    with pytest.raises(RecastError, match="has 4 images for the prompt .*, but at least 5 are needed"):
        stage.propose(recipe("propose.source=folder", given, "estimate.samples=5"), tmp_path / "third", no_progress)


def test_images_of_another_source_are_not_mixed_in(tmp_path: Path) -> None:
    stage.propose(recipe(), tmp_path, no_progress)
    with pytest.raises(RecastError, match="made with seed = 0, not 1: choose another --out"):
        stage.propose(recipe("propose.seed=1"), tmp_path, no_progress)
    with pytest.raises(RecastError, match="made with .* = 'renderer', not"):
        stage.propose(recipe("propose.source=policy"), tmp_path, no_progress)


def test_from_an_api_through_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with serve() as server:
        arguments = ["propose", str(RECIPE), "prompts.count=2", "estimate.samples=2", "propose.source=openai"]
        arguments += [f"propose.base_url={server.url}", "--out", str(tmp_path)]
        capped = CliRunner().invoke(app, [*arguments, "propose.cap=3"])
        assert capped.exit_code == 2
        assert "error: the cap of 3 images is reached: raise propose.cap" in capped.stderr
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "4 proposals by gpt-image-1.5" in done.output
        assert server.made == 4
    assert not any(b"sk-secret" in data for data in content(tmp_path).values())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not an image", "cannot be decoded as an image"),
        (png(side=32), "is 32×32 pixels, below the minimum of 64 pixels"),
    ],
)
def test_every_proposal_is_checked(tmp_path: Path, data: bytes, words: str) -> None:
    kept = store.Store(tmp_path, {})
    with pytest.raises(RecastError, match=words):
        kept.add("a cat", 0, data)
    assert kept.missing(["a cat"], 1) == [("a cat", 0)]
    assert not list((tmp_path / "images").iterdir())


def test_images_are_cropped_to_the_middle_and_resized() -> None:
    from io import BytesIO

    from PIL import Image

    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 32:96] = 200
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    array = images.to_array(buffer.getvalue(), (16, 16))
    assert array.shape == (3, 16, 16)
    assert array[:, :, 2:-2] == pytest.approx(200 / 255)  # at its border a resize sees the neighbours
    assert array.min() > 0.7


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops", "line 1: not valid JSON"),
        (
            '{"prompt": 3, "file": "x.png"}',
            "line 1: the field prompt is 3: input should be a valid string",
        ),
        ('{"prompt": "a", "file": "x.png"}', "the image .*x.png does not exist"),
    ],
)
def test_a_bad_manifest_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "manifest.jsonl").write_text(line + "\n")
    with pytest.raises(RecastError, match=words):
        store.read_manifest(tmp_path)


def test_the_renderer_refuses_other_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a cat\n")
    with pytest.raises(RecastError, match="the renderer draws prompts of the shapes world only, not 'a cat'"):
        stage.propose(recipe(f"prompts.source={tmp_path / 'p.txt'}", "prompts.count=1"), tmp_path / "run", no_progress)
    with pytest.raises(RecastError, match="propose.folder must be set if, and only if, propose.source is folder"):
        recipe("propose.source=folder")


def test_a_missing_key_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(RecastError, match="the environment variable OPENAI_API_KEY is not set"):
        stage.propose(recipe("propose.source=openai"), tmp_path, no_progress)
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_ask_for_the_same_images(tmp_path: Path) -> None:
    first, second = (store.Store(tmp_path, {}) for _ in range(2))
    with first.alone(), pytest.raises(RecastError, match=r"another process \(.*\) is making proposals"), second.alone():
        pass
    with second.alone():
        pass


def test_a_mixture_has_no_proposals_to_get(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="world.kind = mixture makes its own proposals"):
        stage.propose(config.load(RECIPE.with_name("mixture.yaml")), tmp_path, no_progress)


def test_an_image_that_replaces_another_is_kept_after_a_kill(tmp_path: Path) -> None:
    kept = store.Store(tmp_path, {"source": "x"})
    paths = [kept.add("a cat", k, png(k)) for k in (0, 1)]
    kept.write_manifest(["a cat"], 2, "x")
    paths[0].write_bytes(png(9))
    with pytest.raises(RecastError, match="is not the image that was recorded, .* remove it and run `recast propose`"):
        store.Store(tmp_path, {"source": "x"}).read("a cat", 0)
    paths[0].unlink()
    store.Store(tmp_path, {"source": "x"}).add("a cat", 0, png(7))  # and a kill before the manifest is written
    again = store.Store(tmp_path, {"source": "x"})
    assert again.missing(["a cat"], 2) == []
    assert again.read("a cat", 0) == png(7)
    paths[1].write_bytes(png(9))
    with pytest.raises(RecastError, match="is not the image that was recorded"):
        again.read("a cat", 1)
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(RecastError, match=r"manifest.jsonl, line 1: not valid JSON .*; remove .*: the images stay"):
        store.Store(tmp_path, {"source": "x"})
