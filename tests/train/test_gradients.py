"""Measured gradients: those of the trainer's own loss, by any number of processes, resumed, and in the terminal."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer import one_thread  # noqa: F401 - an autouse fixture
from typer.testing import CliRunner

from forked import launched
from recast import GainCurves, WeightMatrix, config, prompts
from recast.cli import app
from recast.core.effects import Effects
from recast.errors import RecastError
from recast.train import advantage, gradients, passes, sketch, stage
from recast.weigh import static

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/shapes.yaml")
STEPS, PROMPTS, IMAGES = 3, 4, 2
SMALL = [
    *("train.prompts_per_epoch=4", "train.images_per_prompt=2", "train.batch=8", "train.rank=4", "train.alpha=8"),
    *("train.fraction=1.0", "train.kl_weight=0", "train.sample_batch=3", "train.micro_batch=3", "train.trackers=[]"),
    *(f"train.steps={STEPS}", f"estimate.steps={STEPS}", "weigh.budget={composition: 1, detail: 3}"),
]
OPTIONS = ["--gradients", "--prompts", str(PROMPTS), "--images-per-prompt", str(IMAGES)]


def recipe(*more: str) -> config.Recipe:
    return config.load(RECIPE, [*SMALL, *more])


def measure(out: Path, *more: str) -> Effects:
    return gradients.effects(recipe(*more), out, PROMPTS, IMAGES)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gradients")
    measure(out)
    return out


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The gradients (m, T, parameters) of every split of the next measurement, not sketched."""
    found: list[torch.Tensor] = []
    save = sketch.save
    monkeypatch.setattr(sketch, "save", lambda folder, k, each: (found.append(each), save(folder, k, each)))
    monkeypatch.setattr(gradients, "_SKETCH", 10**9)
    return found


def uneven(sigmas: Any) -> WeightMatrix:
    late = np.linspace(0.4, 0.1, STEPS) / STEPS
    table = np.stack([late, 1 / STEPS - late])
    return WeightMatrix(("composition", "detail"), sigmas, table, table.sum(1))


@pytest.mark.parametrize(("mode", "form"), [("reward", "x0"), ("step", "velocity"), ("shared", "x0")])
def test_they_add_up_to_the_gradient_of_the_trainer_s_loss(
    tmp_path: Path, tables: list[torch.Tensor], mode: str, form: str
) -> None:
    more = (f"train.normalize={mode}", f"train.form={form}")
    found = measure(tmp_path, *more)
    each = torch.stack(tables).mean(0).double()
    for weights in (static({"composition": 1, "detail": 3}, found.sigmas), uneven(found.sigmas)):
        factors = torch.from_numpy(found._factors(weights, weights.factors)).view(2, STEPS, 1)
        mine = (factors * each).sum((0, 1)) / STEPS
        settings = recipe(*more)
        accelerator = stage.accelerator_of(settings, tmp_path)
        made = stage.build(settings, weights, prompts.load(settings.train.prompts), accelerator)
        data, rewards = made._rollout(0, lambda *_: None)
        members = torch.arange(PROMPTS * IMAGES) // IMAGES
        parts = advantage.contributions(rewards, members, weights, mode).sum(1)  # type: ignore[arg-type]
        assert parts.abs().max() < settings.train.advantage_clip
        quality = advantage.optimality(parts, settings.train.advantage_clip).float()
        loss = made._terms(data, made._pairs(quality, 0), passes.Needed()).total.mean()
        theirs = torch.cat([part.flatten() for part in torch.autograd.grad(loss, made.adapters.parameters)]).double()
        assert theirs.norm() > 0
        if mode != "step":  # one divisor for all steps, which no cosine depends on
            mine = mine * (theirs @ mine / (mine @ mine))
            assert theirs @ mine > 0
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3 * float(theirs.abs().max()))


def test_inner_products_are_those_of_the_vectors(tmp_path: Path, tables: list[torch.Tensor]) -> None:
    found = measure(tmp_path)
    each = torch.stack(tables).double().flatten(1, 2).numpy()
    count = len(each)
    apart = [each[q] @ each[r].T for q in range(count) for r in range(count) if q != r]
    np.testing.assert_allclose(found.signal, np.mean(apart, axis=0), rtol=1e-6, atol=1e-9 * abs(found.own).max())
    np.testing.assert_allclose(found.own, each @ each.transpose(0, 2, 1), rtol=1e-6)
    assert found.images == PROMPTS * IMAGES // count
    assert not (tmp_path / "effects").exists()


def test_a_sketch_preserves_inner_products() -> None:
    rng = torch.Generator().manual_seed(1)
    one, two = torch.randn(2, 50_000, generator=rng, dtype=torch.float64)
    two = one + two
    reduce = sketch.Sketch(50_000, 8192)
    for a, b in ((one, one), (one, two), (two, two)):
        size = float(a.norm() * b.norm())
        assert abs(float(reduce(a) @ reduce(b) - a @ b)) < 5 * size / np.sqrt(8192)
    assert torch.equal(reduce(one), sketch.Sketch(50_000, 8192)(one))
    torch.testing.assert_close(reduce(one + two), reduce(one) + reduce(two))


def test_a_sketch_changes_the_effects_little(tmp_path: Path, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Effects.load(measured / "effects.json")
    monkeypatch.setattr(gradients, "_SKETCH", 4096)
    found = measure(tmp_path)
    np.testing.assert_allclose(found.effect, whole.effect, rtol=0.1)
    assert not np.array_equal(found.effect, whole.effect)


def test_recomputed_activations_give_the_same_gradients(tmp_path: Path, measured: Path) -> None:
    found, other = measure(tmp_path, "train.checkpointing=true"), Effects.load(measured / "effects.json")
    np.testing.assert_allclose(found.own, other.own, rtol=1e-4, atol=1e-6 * other.own.max())


def test_a_file_of_the_same_settings_is_not_measured_again(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(gradients, "_trainer", refuse)
    first = Effects.load(measured / "effects.json")
    assert np.array_equal(measure(measured).own, first.own)
    other = gradients.effects(recipe("train.batch=4", "train.fraction=0.34", "train.normalize=step"), measured)
    assert (other.batch, other.levels, other.normalize) == (4, 1, "step")
    assert np.array_equal(other.own, first.own)
    assert Effects.load(measured / "effects.json").batch == 4
    assert measure(measured).batch == first.batch
    for change in ("train.beta=0.2", "train.seed=1", "train.rank=8", "weigh.budget={detail: 1, composition: 1}"):
        with pytest.raises(ZeroDivisionError):
            measure(measured, change)
    with pytest.raises(ZeroDivisionError):
        gradients.effects(recipe(), measured, PROMPTS, 3)


def test_an_interrupted_measurement_is_resumed(tmp_path: Path, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        if phase == "gradients" and done == 2 * STEPS + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradients.effects(recipe(), tmp_path, PROMPTS, IMAGES, stop)
    assert len(list((tmp_path / "effects").glob("split-*"))) == 2
    assert not (tmp_path / "effects.json").exists()
    done = []
    save = sketch.save
    monkeypatch.setattr(sketch, "save", lambda folder, k, each: (done.append(k), save(folder, k, each)))
    measure(tmp_path)
    assert done == [2, 3]
    assert (tmp_path / "effects.json").read_bytes() == (measured / "effects.json").read_bytes()


def test_they_are_those_of_the_checkpoint_that_training_resumes_from(tmp_path: Path, measured: Path) -> None:
    settings = recipe("train.epochs=1", "train.preview_every=0", "weigh.method=static", "train.learning_rate=0.01")
    stage.train(settings, tmp_path / "parent")
    found = measure(tmp_path / "child", f"train.resume_from={tmp_path / 'parent'}")
    base = Effects.load(measured / "effects.json")
    assert found.settings["train.resume_from"] not in (None, str(tmp_path / "parent"))
    assert np.abs(found.own - base.own).max() > 0.01 * base.own.max()
    started = measure(tmp_path / "lora", f"train.lora={tmp_path / 'parent/lora'}")
    assert not np.array_equal(started.own, found.own)


def test_two_processes_measure_the_same(tmp_path: Path, measured: Path) -> None:
    both = launched(["doctor", RECIPE, *SMALL, *OPTIONS, "--out", str(tmp_path)], tmp_path / "said")
    assert [each.wait() for each in both] == [0, 0], both[0].stderr
    assert [each.stdout.count("wrote ") for each in both] == [1, 0]
    one, two = (Effects.load(folder / "effects.json") for folder in (measured, tmp_path))
    assert one.settings == two.settings
    scale = float(np.abs(one.own).max())
    np.testing.assert_allclose(two.own, one.own, rtol=1e-3, atol=1e-5 * scale)
    np.testing.assert_allclose(two.cross, one.cross, rtol=1e-3, atol=1e-5 * scale)


def invoke(*more: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", RECIPE, *more])
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def test_the_command_prints_costs_tables_and_sentences(tmp_path: Path) -> None:
    said = invoke(*SMALL, *OPTIONS, "--out", str(tmp_path))
    images = PROMPTS * IMAGES
    passes = {"sampling": images * STEPS, "loss": 2 * images * STEPS, "backward passes": 2 * images * STEPS}
    for name, count in ({"images": images} | passes).items():
        assert f"{name} │ {count} │" in said
    for word in ("composition", "effect", "realized, static", "images per update", "noiseless"):
        assert word in said
    assert f"wrote {tmp_path / 'effects.json'}, from the gradients of {images} images" in said
    again = invoke(*SMALL, *OPTIONS, "--out", str(tmp_path))
    assert "backward passes" not in again
    assert f"read {tmp_path / 'effects.json'}" in again
    assert "has no weights.json and no gains.json: recast run RECIPE run.methods=[]" in said
    assert "realized, sinkhorn" not in said


def test_w_is_that_of_run_or_of_its_curves(tmp_path: Path, measured: Path) -> None:
    (tmp_path / "effects.json").write_bytes((measured / "effects.json").read_bytes())
    found = Effects.load(measured / "effects.json")
    curves = [[0.5, 0.1, 0.05, 0.0], [0.5, 0.45, 0.4, 0.0]]
    GainCurves(("composition", "detail"), found.sigmas, curves).save(tmp_path / "gains.json")
    said = invoke(*SMALL, *OPTIONS, "--out", str(tmp_path))
    assert "realized, sinkhorn" in said
    assert "gains.json by weigh.method = sinkhorn" in said
    assert "the timing of sinkhorn" in said or "too few" in said
    assert "of it timing" in said
    uneven(found.sigmas).save(tmp_path / "weights.json")
    assert "W is " in invoke(*SMALL, *OPTIONS, "--out", str(tmp_path))
    static({"ocr": 1}, found.sigmas).save(tmp_path / "weights.json")
    assert "use W of the same rewards and grid" in invoke(*SMALL, *OPTIONS, "--out", str(tmp_path), code=2)


def test_one_reward_has_nothing_to_time(tmp_path: Path) -> None:
    one = [*SMALL[:-1], "weigh.budget={detail: 1}"]
    assert "With one reward there is nothing to time" in invoke(*one, *OPTIONS, "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--gradients", "--prompts", "2"], "2 prompts cannot be divided into 4 to 16 splits"),
        (["--gradients", "--prompts", "17"], "use --prompts 16"),
        (["--gradients", "train.precision=float16"], "small gradients vanish in float16"),
        (["--gradients", "--prompts", "100000"], "has 816 different prompts, fewer than 100000: use --prompts 816"),
        (["--out", "x"], "only --gradients writes"),
    ],
)
def test_bad_input_is_one_sentence(options: list[str], sentence: str, tmp_path: Path) -> None:
    more = options if "--out" in options else [*options, "--out", str(tmp_path)]
    assert sentence in invoke(*SMALL, *more, code=2)


def test_other_worlds_and_no_rewards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=r"world\.kind = images, not mixture"):
        gradients.effects(config.load(ROOT / "recipes/mixture.yaml", []), tmp_path)
    result = CliRunner().invoke(app, ["doctor", "nowhere.yaml", "--gradients"])
    assert result.exit_code == 2
    assert "nowhere.yaml" in result.output


def test_a_damaged_file_is_one_sentence(tmp_path: Path, measured: Path) -> None:
    content = json.loads((measured / "effects.json").read_text())
    (tmp_path / "effects.json").write_text(json.dumps(content | {"own": 3}))
    with pytest.raises(RecastError, match=r"effects\.json: the field own is 3: input should be a valid list"):
        measure(tmp_path)
    (tmp_path / "effects.json").unlink()
    (tmp_path / "effects").mkdir()
    with pytest.raises(RecastError, match="remove the folder"):
        sketch.products(tmp_path / "effects", 4)
