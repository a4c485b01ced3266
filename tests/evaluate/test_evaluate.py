"""Evaluation of the embedded world's base: the same images for all, nothing twice, and kills at any moment."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from recast import config, processes, prompts
from recast.cli import app
from recast.config import Recipe
from recast.errors import RecastError
from recast.evaluate import Scores, stage
from recast.flow import families, lora
from recast.flow.generate import generate
from recast.images import to_png
from recast.progress import no_progress
from recast.rewards import base

COUNT = 20
SETTINGS = ("policy.model=shapes", f"evaluate.count={COUNT}", "evaluate.steps=2", "evaluate.guidance=1")


def brightness(images: torch.Tensor, texts: list[str], metadata: Any = None, scale: float = 1.0) -> np.ndarray:
    return scale * images.mean((1, 2, 3)).double().numpy()


def recipe(tmp_path: Path, *changes: str, rewards: str = "detail: {}") -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"rewards:\n  {rewards}\nevaluate:\n  held_out:\n    test_evaluate:brightness:\n")
    return config.load(path, [*SETTINGS, *changes])


def run(settings: Recipe, out: Path, adapter: Path | None = None) -> Path | None:
    return stage.evaluate(settings, out, adapter, no_progress)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    run(recipe(out), out)
    return out


def test_rows_are_prompts_seeds_files_and_all_scores(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "scores/scores.jsonl").read_text().splitlines()]
    texts = [row["prompt"] for row in prompts.load("shapes:test", COUNT)]
    assert [(row["index"], row["prompt"], row["seed"]) for row in rows] == [
        (k, text, 42 + k) for k, text in enumerate(texts)
    ]
    policy = families.load(config.policy(model="shapes"))
    made = generate(policy, texts, [42 + k for k in range(COUNT)], steps=2)
    pixels = torch.stack(
        [torch.from_numpy(np.array(Image.open(whole / "scores" / row["file"]))).permute(2, 0, 1) for row in rows]
    )
    assert (made * 255 - pixels).abs().max() < 0.51
    images = pixels / 255
    np.testing.assert_allclose([row["scores"]["detail"] for row in rows], base.load("detail")(images, texts))
    bright = [row["scores"]["test_evaluate:brightness"] for row in rows]
    np.testing.assert_allclose(bright, brightness(images, texts), atol=1e-7)


def test_every_line_of_the_file_is_an_image_with_its_own_seed(tmp_path: Path) -> None:
    """GenEval's published test file repeats most of its prompts: 2,212 lines, 553 of them different."""
    path = tmp_path / "prompts.txt"
    texts = ["a red circle", "two blue squares", "a red circle", "a red circle"]
    path.write_text("\n".join(texts))
    run(recipe(tmp_path, f"evaluate.prompts={path}", "evaluate.count=null"), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "scores/scores.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["seed"]) for row in rows] == [(text, 42 + k) for k, text in enumerate(texts)]
    assert len({(tmp_path / "scores" / row["file"]).read_bytes() for row in rows}) == 4


def test_the_table_reads_back(whole: Path) -> None:
    scores = Scores.load(whole)
    assert scores.method == "base"
    assert scores.trained == ("detail",)
    assert scores.held_out == ("test_evaluate:brightness",)
    assert scores.values.shape == (2, COUNT)
    assert scores.budget == {"detail": 1.0}
    assert scores.means()["detail"] == pytest.approx(scores.values[0].mean())
    assert Scores.load(whole / "scores").images == scores.images


class Killed(BaseException):
    """Stands for kill −9: nothing may clean up after it."""


@pytest.mark.parametrize("moment", [1, 5, 17, 21, 22])
def test_a_kill_at_any_moment_changes_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """20 images are written, then two rewards' parts: the process dies at one of these."""
    left = [moment]

    def dying(write: Any) -> Any:
        def call(*arguments: Any) -> Any:
            left[0] -= "manifest" not in str(arguments[0])
            if left[0] == 0:
                raise Killed
            return write(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(stage.artifact, "write_bytes", dying(stage.artifact.write_bytes))
        with pytest.raises(Killed):
            run(recipe(tmp_path), tmp_path)
    before = {name for name in contents(tmp_path / "scores") if name.startswith("images")}
    assert len(before) == min(moment - 1, COUNT)
    stamps = {name: (tmp_path / "scores" / name).stat().st_mtime_ns for name in before}
    run(recipe(tmp_path), tmp_path)
    assert contents(tmp_path / "scores") == contents(whole / "scores")
    assert stamps == {name: (tmp_path / "scores" / name).stat().st_mtime_ns for name in before}


def test_two_processes_share_the_parts(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "PART", 8)
    alone = tmp_path / "alone"
    alone.mkdir()
    run(recipe(alone), alone)
    monkeypatch.setattr(processes, "COUNT", 2)
    monkeypatch.setattr(processes, "wait", lambda: None)
    settings = recipe(tmp_path)
    stage._claim(tmp_path / "scores", settings, None)
    monkeypatch.setattr(processes, "RANK", 1)
    assert run(settings, tmp_path) is None
    assert len(list((tmp_path / "scores/images").iterdir())) == 8  # the second of three parts
    monkeypatch.setattr(processes, "RANK", 0)
    run(settings, tmp_path)
    assert contents(tmp_path / "scores") == contents(alone / "scores")
    for path in (whole / "scores/images").iterdir():  # whoever makes an image, beside whichever others
        assert path.read_bytes() == (tmp_path / "scores/images" / path.name).read_bytes()


def test_a_second_run_makes_and_loads_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(whole)
    monkeypatch.setattr(families, "load", None)
    monkeypatch.setattr(base, "load", None)
    run(recipe(whole), whole)
    assert contents(whole) == before


def test_a_new_held_out_reward_scores_the_images_that_are_there(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(recipe(tmp_path), tmp_path)
    monkeypatch.setattr(families, "load", None)
    run(recipe(tmp_path, "evaluate.held_out.background={}"), tmp_path)
    scores = Scores.load(tmp_path)
    assert scores.held_out == ("test_evaluate:brightness", "background")
    assert not np.isnan(scores.values).any()
    run(recipe(tmp_path, "evaluate.held_out.test_evaluate:brightness={scale: 2.0}"), tmp_path)
    np.testing.assert_allclose(Scores.load(tmp_path).values[1], 2 * scores.values[1])


def test_repeats_add_images_and_keep_the_first(whole: Path, tmp_path: Path) -> None:
    run(recipe(tmp_path), tmp_path)
    run(recipe(tmp_path, "evaluate.repeats=2"), tmp_path)
    scores, once = Scores.load(tmp_path), Scores.load(whole)
    assert [image["seed"] for image in scores.images] == [42 + k for k in range(2 * COUNT)]
    np.testing.assert_array_equal(scores.values[:, :COUNT], once.values)


def test_an_adapter_is_evaluated_by_its_content(whole: Path, tmp_path: Path) -> None:
    policy = families.load(config.policy(model="shapes"))
    adapters = lora.Adapters(policy.network, policy.targets, rank=4, alpha=8, seed=0)
    with torch.no_grad():
        for name, parameter in policy.pipe.transformer.named_parameters():
            if "lora_B" in name and "default" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    adapters.save(tmp_path / "lora")
    run(recipe(tmp_path, "weigh.method=row", "train.seed=3"), tmp_path, tmp_path / "lora")
    scores = Scores.load(tmp_path)
    assert (scores.method, scores.seed) == ("row", 3)
    assert (scores.values != Scores.load(whole).values).any()
    with pytest.raises(RecastError, match="contains images made with policy.lora = '.*', not None: choose another"):
        run(recipe(tmp_path), tmp_path)
    with torch.no_grad():
        adapters.parameters[1][0, 0] = float("nan")
    adapters.save(tmp_path / "broken")
    other = families.load(config.policy(model="shapes"))
    for load in (
        lambda: run(recipe(tmp_path), tmp_path / "b", tmp_path / "broken"),
        lambda: lora.Adapters(other.network, other.targets, rank=4, alpha=8).load(tmp_path / "broken"),
    ):
        with pytest.raises(RecastError, match=r"safetensors: 1 of 62 tensors have values that are not finite"):
            load()
    assert not list((tmp_path / "b").rglob("*.png"))
    with pytest.raises(RecastError, match="makes a latent that is not finite for the prompt 'a cat'"):
        generate(policy, ["a cat", "a dog"], [0, 1], steps=2)
    with pytest.raises(RecastError, match="pixels that are not finite"):
        to_png(torch.full((3, 2, 2), float("inf")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("evaluate.steps=3", "images made with evaluate.steps = 2, not 3"),
        ("evaluate.count=19", "images made with evaluate.prompts = "),
        ("evaluate.seed=1", "images made with evaluate.seed = 42, not 1"),
    ],
)
def test_images_of_other_settings_are_never_mixed_in(whole: Path, change: str, words: str) -> None:
    before = contents(whole)
    with pytest.raises(RecastError, match=words):
        run(recipe(whole, change), whole)
    assert contents(whole) == before


def test_the_verb_prints_a_table_and_refuses_in_a_sentence(whole: Path, tmp_path: Path) -> None:
    def call(*words: object) -> Any:
        return CliRunner().invoke(app, ["evaluate", *map(str, words)], env={"COLUMNS": "120"})

    path = whole / "recipe.yaml"
    result = call(path, *SETTINGS, "--base", "--out", whole)
    assert result.exit_code == 0, result.output
    assert "base on 20 images" in result.output
    assert "held out" in result.output
    for words, said in {
        (path, "--out", tmp_path): "contains no adapter: train first, name one with --lora, or evaluate",
        (path, "--base", "--lora", tmp_path): "the policy without an adapter",
        (path, "evaluate.held_out.ocrr={}", "--base", "--out", tmp_path): "unknown reward 'ocrr'",
    }.items():
        result = call(*words)
        assert result.exit_code == 2
        assert said in result.output
    assert not list(tmp_path.iterdir())


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    run(recipe(tmp_path), tmp_path)
    path = tmp_path / "scores/images/00003.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(RecastError, match=r"00003.png \(remove it and run recast evaluate again\) cannot be decoded"):
        run(recipe(tmp_path, "evaluate.held_out.background={}"), tmp_path)
    path.unlink()
    run(recipe(tmp_path, "evaluate.held_out.background={}"), tmp_path)
    assert Scores.load(tmp_path).held_out[-1] == "background"


def test_a_reward_that_does_not_apply_is_null(tmp_path: Path) -> None:
    run(recipe(tmp_path, "evaluate.held_out.ocr={threads: 1}"), tmp_path)
    text = (tmp_path / "scores/scores.jsonl").read_text()
    assert text.count('"ocr": null') == COUNT
    assert np.isnan(Scores.load(tmp_path).values[-1]).all()


class Aging:
    """Brightness, by a package that is upgraded after its first call."""

    release = 1

    def __call__(self, images: torch.Tensor, texts: list[str], metadata: Any = None) -> np.ndarray:
        Aging.release += 1
        return brightness(images, texts)

    @staticmethod
    def versions() -> dict[str, str]:
        return {"release": str(Aging.release)}


def test_scores_of_two_versions_are_not_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when two machines share an evaluation: the first process compares what all have written."""
    monkeypatch.setattr(stage, "PART", COUNT // 2)
    monkeypatch.setattr(Aging, "release", 1)
    with pytest.raises(RecastError, match=r"Aging.release = 2, but here it is 3: scores of two versions are not mixed"):
        run(recipe(tmp_path, rewards="test_evaluate:Aging:"), tmp_path)
    assert not (tmp_path / "scores/scores.jsonl").exists()


def test_a_table_that_is_not_whole_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="manifest.json: cannot be read"):
        Scores.load(tmp_path)
    (tmp_path / "manifest.json").write_bytes((whole / "scores/manifest.json").read_bytes())
    with pytest.raises(RecastError, match="run recast evaluate first"):
        Scores.load(tmp_path)
    row = {"index": 0, "prompt": "a cat", "seed": 42, "file": "images/0.png", "scores": {"detail": 1}}
    (tmp_path / "scores.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RecastError, match="a row lacks the score 'test_evaluate:brightness'"):
        Scores.load(tmp_path)
    (tmp_path / "scores.jsonl").write_text('{"scores"')
    with pytest.raises(RecastError, match="line 1: not valid JSON"):
        Scores.load(tmp_path)
