"""Recipes: defaults, overrides, and one sentence for whatever is wrong."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from recast import config
from recast.errors import RecastError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("world: {kind: mixture, dimension: 4}\nestimate:\n  steps: 10\n")
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_in_the_repository_loads(path: Path) -> None:
    config.load(path)


def test_overrides_win_and_defaults_fill(recipe: Path) -> None:
    loaded = config.load(recipe, ["estimate.alpha=4", "weigh.budget.ocr=2", "weigh.method=row"])
    assert (loaded.world.dimension, loaded.estimate.steps, loaded.estimate.alpha) == (4, 10, 4.0)
    assert loaded.weigh.budget == {"ocr": 2.0}
    assert loaded.weigh.method == "row"
    assert loaded.estimate.samples == 8


def test_the_resolved_recipe_reads_back_the_same(recipe: Path, tmp_path: Path) -> None:
    loaded = config.load(recipe, ["estimate.seed=7"])
    assert config.load(loaded.save(tmp_path / "out" / "resolved.yaml")) == loaded


def test_recipes_are_frozen(recipe: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config.load(recipe).estimate.steps = 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("estimate.stepz=3", "unknown key 'estimate.stepz'; did you mean 'steps'"),
        ("estimates.steps=3", "unknown key 'estimates'; did you mean 'estimate'"),
        ("world.zzzz=1", "known keys are kind, dimension"),
        ("estimate.steps=0", "estimate.steps = 0: input should be greater than or equal to 1"),
        ("estimate.steps=many", "estimate.steps = 'many': input should be a valid integer"),
        ("estimate.alpha=1", "estimate.alpha = 1: alpha = 1 is the KL limit"),
        ("estimate.estimator=fast", "'coupled' or 'paper'"),
        ("estimate.steps", "section.key=value, not 'estimate.steps'"),
        ("estimate.steps.more=1", "goes below 'steps'"),
        ("estimate.steps=[1", "not valid YAML"),
        ("estimate=3", "estimate = 3"),
        ("estimate.sampler=euler", "sampler belongs to estimator: paper"),
        ("estimate.spacing=1e-6", "estimate.spacing = 1e-06|estimate.spacing = '1e-6'"),
        ("estimate.spacing=.inf", "less than or equal to 10"),
        ("weigh.tau=.inf", "finite number"),
        ("weigh.budget.fine=-1", "weigh.budget = .*non-negative"),
        ("world.seed=-1", "greater than or equal to 0"),
    ],
)
def test_a_wrong_setting_is_one_sentence(recipe: Path, override: str, words: str) -> None:
    with pytest.raises(RecastError, match=words) as caught:
        config.load(recipe, [override])
    assert "\n" not in str(caught.value)


def test_an_empty_section_takes_overrides(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("estimate:\n")
    assert config.load(tmp_path / "recipe.yaml", ["estimate.steps=3"]).estimate.steps == 3


def test_provenance_names_only_settings_that_were_read() -> None:
    coupled = config.EstimateConfig()
    assert "noisings" in coupled.used()
    assert "sampler" not in coupled.used()
    paper = config.EstimateConfig(estimator="paper", sampler="dpm2")
    assert paper.used()["sampler"] == "dpm2"
    assert not {"noisings", "spacing"} & set(paper.used())


def test_wrong_files(tmp_path: Path) -> None:
    for text, words in (
        ("- 1\n- 2\n", "mapping of sections, not a list"),
        ("a: [1\n", "not a valid YAML"),
        ("0\n", "not a int"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(RecastError, match=words) as caught:
            config.load(tmp_path / "bad.yaml")
        assert "\n" not in str(caught.value)
    with pytest.raises(RecastError, match="No such file"):
        config.load(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert config.load(tmp_path / "empty.yaml") == config.Recipe()
