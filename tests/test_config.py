"""Recipes: defaults, overrides, and one sentence for whatever is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from recast import config, identity
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
        ("estimate.steps.more=1", "needs a section 'steps'"),
        ("estimate.steps=[1", "not valid YAML"),
        ("estimate=3", "estimate = 3"),
        ("estimate.sampler=euler", "sampler belongs to estimator: paper"),
        ("estimate.spacing=1e-6", "estimate.spacing = 1e-06|estimate.spacing = '1e-6'"),
        ("estimate.spacing=.inf", "finite number"),
        ("weigh.tau=.inf", "finite number"),
        ("weigh.budget.fine=-1", "weigh.budget = .*non-negative"),
        ("world.seed=-1", "greater than or equal to 0"),
        (
            "weigh.columns=effects",
            "weigh.columns = 'effects': must be uniform, effect or a list of one number per step",
        ),
        ("weigh.columns=[]", r"weigh.columns = \[\]: must be uniform"),
        ("weigh.columns=[1, -1]", r"weigh.columns = \[1, -1\]: the list must be non-negative"),
        ("weigh.columns=[1, .nan]", "the list must be non-negative, finite"),
        ("weigh.columns=[0, 0]", "not all zero"),
        ("weigh.columns=[1, a]", "a list must have one number per step"),
        ("weigh.columns=[[1], [2]]", "a list must have one number per step"),
        ("weigh.columns=effect", "weigh.columns = effect belongs to world.kind = images"),
        ("weigh.method=static-reversed", "weigh.method = 'static-reversed'"),
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


RENAMED = {
    "train.groups": ("train.prompts_per_epoch", 6),
    "train.images": ("train.images_per_prompt", 4),
    "train.penalty": ("train.kl_weight", 0.5),
    "train.normalise": ("train.normalize", "reward"),
    "evaluate.judges": ("evaluate.held_out", {"census": None}),
    "rewards.hpsv2.weights": ("rewards.hpsv2.checkpoint", "a.pt"),
    "rewards.imagereward.weights": ("rewards.imagereward.checkpoint", "b.pt"),
    "rewards.aesthetic.weights": ("rewards.aesthetic.checkpoint", "c.pt"),
    "rewards.hpsv3.weights": ("rewards.hpsv3.checkpoint", "d.pt"),
    "evaluate.held_out.hpsv2.weights": ("evaluate.held_out.hpsv2.checkpoint", "a.pt"),
    "evaluate.held_out.imagereward.weights": ("evaluate.held_out.imagereward.checkpoint", "b.pt"),
    "evaluate.held_out.aesthetic.weights": ("evaluate.held_out.aesthetic.checkpoint", "c.pt"),
    "evaluate.held_out.hpsv3.weights": ("evaluate.held_out.hpsv3.checkpoint", "d.pt"),
}
"""Settings of version 0.1, what they are called now, and a value."""


def nested(key: str, value: Any) -> dict[str, Any]:
    """A recipe with one setting."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def test_every_renamed_setting_is_listed() -> None:
    assert {old: new for old, (new, _) in RENAMED.items()} == config.RENAMED


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_answered_with_the_new_one(tmp_path: Path, old: str) -> None:
    new, value = RENAMED[old]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(nested(old, value)))
    with pytest.raises(RecastError, match=f"recipe.yaml: {old} is called {new} now$"):
        config.load(path)
    path.write_text("estimate: {steps: 3}\n")
    with pytest.raises(RecastError, match=f"recipe.yaml: {old} is called {new} now$"):
        config.load(path, [f"{old}={value}"])
    path.write_text(yaml.safe_dump(nested(new, value)))
    loaded = identity.flatten(config.load(path).model_dump())
    assert identity.flatten(nested(new, value)).items() <= loaded.items()


@pytest.mark.parametrize("old", RENAMED)
def test_the_recipe_of_a_finished_run_may_have_old_names(tmp_path: Path, old: str) -> None:
    new, value = RENAMED[old]
    for name, key in (("old", old), ("new", new)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(nested(key, value)))
    assert config.load_run(tmp_path / "old.yaml") == config.load(tmp_path / "new.yaml")


def test_a_recipe_that_version_0_1_has_written_is_read(tmp_path: Path) -> None:
    """The sections that have changed, as version 0.1 wrote them into a run's folder."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "world: {kind: images}\n"
        "rewards: {composition: null, hpsv2: {weights: hps.pt, device: cpu}, detail: null}\n"
        "estimate: {estimator: coupled, steps: 10, shift: 3.0, samples: 8, noisings: 4, rollouts: 1, spacing: 0.8,\n"
        "  sampler: null, memory: 4.0, alpha: 2.0, aggregate: prompt-mean, seed: 0}\n"
        "train: {prompts: 'shapes:train', lora: null, epochs: 32, groups: 48, images: 4, batch: 64, steps: null,\n"
        "  fraction: 0.5, penalty: 1.0, normalise: reward, spread: batch, betas: [0.9, 0.999], ema: 0.97}\n"
        "evaluate: {prompts: 'shapes:test', judges: {census: null, hpsv3: {weights: hps3, device: cpu}}}\n"
    )
    found = config.load_run(path)
    train = found.train
    assert (train.prompts_per_epoch, train.images_per_prompt, train.kl_weight) == (48, 4, 1.0)
    assert train.normalize == "reward"
    assert list(found.rewards) == ["composition", "hpsv2", "detail"]
    assert found.rewards["hpsv2"] == {"device": "cpu", "checkpoint": "hps.pt"}
    assert found.evaluate.held_out == {"census": None, "hpsv3": {"device": "cpu", "checkpoint": "hps3"}}
    with pytest.raises(RecastError, match="train.groups is called train.prompts_per_epoch now"):
        config.load(path)
    assert config.load_run(found.save(tmp_path / "again.yaml")) == found


def test_every_setting_is_described_in_a_sentence() -> None:
    sections = [each for each in vars(config).values() if isinstance(each, type) and issubclass(each, BaseModel)]
    fields = {
        f"{section.__name__}.{name}": field.description
        for section in sections
        if section is not config.Recipe
        for name, field in section.model_fields.items()
    }
    assert len(fields) > 90
    for name, text in fields.items():
        assert text, name
        assert text[0].isupper() or text[0] == "`", name
        assert text.endswith("."), name


def test_masses_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    for columns in ("uniform", "effect", [1.0, 2.5, 3.0]):
        recipe = config.Recipe.model_validate({"weigh": {"columns": columns, "method": "matched-reversed"}})
        assert config.load(recipe.save(tmp_path / "recipe.yaml")) == recipe
        assert config.load(tmp_path / "recipe.yaml").weigh.columns == columns
        assert ("columns" in recipe.weigh.used()) == (columns != "uniform")


def refused(text: str, tmp_path: Path, *overrides: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecastError) as caught:
        config.load(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('estimate: {steps: !!int "x"}', "not a valid YAML file"),
        ('estimate: {steps: !!int ""}', "not a valid YAML file"),
        ("estimate: {steps: !!bool x}", "not a valid YAML file"),
        ("estimate: !!map [1]", "not a valid YAML file"),
        (LAUGHS, "its anchors unfold to more than 100,000 values"),
        ("&a [*a]", "its anchors unfold"),
        ("estimate: {steps: 10, steps: 20}", "the key 'steps' appears twice"),
        (f"estimate: {{steps: {'9' * 70}}}", "is more than any machine can handle"),
        (f"estimate: {{steps: {'9' * 5000}}}", "not a valid YAML file"),
        ("estimate: {steps: 1000000000000}", "larger than 10,000,000 is more than any machine can handle"),
        ("train: {rank: 1000000000}", "larger than 10,000,000"),
        ("world: {prompts: 100000000000}", "larger than 10,000,000"),
        ("estimate: {steps: true}", "expected a number or a text, not true"),
        ("run: {seeds: [true]}", "expected a number or a text, not true"),
        ("train: {kl_weight: .inf}", "finite"),
        ("sweep: {budgets: [{ocr: -1}]}", "must be non-negative"),
        ("sweep: {budgets: [{ocr: .nan}]}", "finite"),
        ("sweep: {budgets: [{}]}", "must have at least one number"),
    ],
)
def test_what_no_recipe_may_say_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    assert said in refused(text, tmp_path)


def test_overrides_are_read_as_strictly(tmp_path: Path) -> None:
    assert "is not valid YAML" in refused("{}", tmp_path, 'estimate.steps=!!int "x"')
    assert "expected a number or a text" in refused("{}", tmp_path, "estimate.samples=yes")
    path = tmp_path / "recipe.yaml"
    path.write_text("rewards: {ocr: &options {x: 1}, clipscore: *options}\nestimate: {steps: 7}")
    assert config.load(path).estimate.steps == 7  # anchors are fine where they unfold to little
