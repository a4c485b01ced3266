"""The loop on the shapes world: one update by hand, exact resume, order that does not matter, and trouble."""

import dataclasses
import hashlib
import math
import re
import shutil
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from edited import edit
from recast import GainCurves, WeightMatrix, config, identity, prompts, weigh
from recast.core import sinkhorn
from recast.core.effects import Effects
from recast.errors import RecastError, StaleError
from recast.flow import families
from recast.propose import stage as propose
from recast.train import advantage, groups, nft, pairs, reweigh, stage, trainer
from recast.train.checkpoint import Position, all_of
from recast.train.trainer import StoppedError, Trainer
from recast.weigh import weigh_recipe

ROOT = Path(__file__).parents[2]
SMALL = [
    *("train.epochs=3", "train.prompts_per_epoch=2", "train.images_per_prompt=2", "train.batch=2", "train.rank=4"),
    *("train.fraction=0.5", "train.sample_batch=8", "train.micro_batch=4", "train.preview_every=0", "train.alpha=8"),
    *("train.learning_rate=3e-4", "train.normalize=step", "train.kl_weight=1e-4", "train.ema=0.9", "train.trackers=[]"),
    *("train.save_every=1", "weigh.budget={composition: 1, detail: 1}"),
]
LARGER = ("train.images_per_prompt=4", "train.batch=4")
STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(*more: str) -> config.Recipe:
    return config.load(ROOT / "recipes/shapes.yaml", [*SMALL, *more])


@cache
def uneven() -> WeightMatrix:
    late = np.linspace(0.9, 0.1, STEPS) / STEPS
    table = np.stack([late, 1 / STEPS - late])
    sigmas = families.load(recipe().policy).sigmas(STEPS)
    return WeightMatrix(("composition", "detail"), sigmas, table, table.sum(1))


def make(tmp_path: Path, *more: str) -> Trainer:
    settings = recipe(*more)
    accelerator = stage.accelerator_of(settings, tmp_path)
    return stage.build(settings, uneven(), prompts.load("shapes:train"), accelerator)


def weights_of(made: Trainer) -> dict[str, torch.Tensor]:
    tensors = {"default": made.adapters.parameters, "old": made.adapters.old_parameters, "ema": made.ema.shadow_params}
    return {name: torch.cat([each.detach().flatten() for each in parts]) for name, parts in tensors.items()}


def same(one: Trainer, two: Trainer) -> bool:
    first, second = weights_of(one), weights_of(two)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_one_epoch_by_hand(tmp_path: Path) -> None:
    """Every pair of the epoch in one plain loop, with torch's own AdamW and nothing of the trainer's."""
    made = make(tmp_path, *LARGER, "train.fraction=1.0", "train.kl_weight=0.5", "train.learning_rate=0.01")
    other = make(tmp_path, *LARGER, "train.fraction=1.0")
    data, rewards = other._rollout(0, lambda *_: None)
    members = torch.arange(8) // 4
    good = advantage.optimality(advantage.advantages(rewards, members, other.weights)).float()
    optimizer = torch.optim.AdamW(other.adapters.parameters, lr=0.01, weight_decay=1e-4)
    start = [each.detach().clone() for each in other.adapters.parameters]
    average = [each.clone() for each in start]
    for update in range(2):
        total = torch.zeros(())
        for place, image in enumerate(groups.mine(other.batches, groups.order(0, 0, 8), update, 0)):
            row = update * 4 + place
            condition = data.condition.rows(data.prompt[row : row + 1])
            for t in range(1, STEPS + 1):
                generator = torch.Generator().manual_seed(int(other._seeds[image, t + 1]))
                noise = torch.randn(1, *other.policy.latent_shape, generator=generator)
                sigma = other.sigmas[t]
                x = (1 - sigma) * data.latents[row : row + 1] + sigma * noise
                v = {}
                for who in ("old", "base", "default"):
                    other.adapters.use(who)  # type: ignore[arg-type]
                    v[who] = other.policy.velocity(x, sigma, condition)
                level, r = torch.tensor([sigma]), good[image, t - 1 : t]
                clean = data.latents[row : row + 1]
                terms = nft.loss(v["default"], v["old"], clean, noise, level, r, v_base=v["base"], kl_weight=0.5)
                total = total + terms.total.sum() / (4 * STEPS)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(other.adapters.parameters, 1.0)
        optimizer.step()
        decay = 0.0 if update == 0 else min(0.9, 2 / 11)
        new = [each.detach() for each in other.adapters.parameters]
        average = [decay * a + (1 - decay) * b for a, b in zip(average, new, strict=True)]
    found = made.epoch()
    assert made.position == Position(1, 0, 2)
    for mine, expected in zip(made.adapters.parameters, other.adapters.parameters, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=2e-5)
    moved = [(mine - begun).abs().max().item() for mine, begun in zip(made.adapters.parameters, start, strict=True)]
    assert np.median(moved) > 0.005
    for mine, expected in zip(made.ema.shadow_params, average, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=2e-5)
    for old, new, begun in zip(made.adapters.old_parameters, made.adapters.parameters, start, strict=True):
        torch.testing.assert_close(old, 0.002 * begun + 0.998 * new, rtol=1e-5, atol=1e-7)
    assert found["old_decay"] == 0.002
    assert found["reward/composition"] == pytest.approx(rewards[:, 0].mean().item())
    assert sum(found[f"share/{name}"] for name in made.models) == pytest.approx(1.0)
    assert len(found["share_by_step/detail"]) == STEPS


def test_the_order_of_a_sample_s_steps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, losses = [], []
    for turn in range(2):
        made = make(tmp_path, *LARGER, "train.fraction=1.0", "train.micro_batch=16")
        if turn:
            monkeypatch.setattr(pairs, "_choose", lambda steps, _, seed: torch.arange(steps).roll(int(seed) % steps))
        data, rewards = made._rollout(0, lambda *_: None)
        good = advantage.advantages(rewards, torch.arange(8) // 4, made.weights)
        seen: list[torch.Tensor] = []

        def look(*_: object, made: Trainer = made, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.extend(each.grad.clone() for each in made.adapters.parameters if each.grad is not None)
            return torch.zeros(())

        monkeypatch.setattr(made, "_clip", look)
        made._update(data, advantage.optimality(good).float(), 0)
        gradients.append(torch.cat([each.flatten() for each in seen]))
        losses.append(made._trained[0][0])
    assert gradients[0].abs().max() > 1e-4
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0.0)


def test_without_a_kl_weight_the_base_is_never_asked(tmp_path: Path) -> None:
    for weight, expected in (("0", {"old", "default"}), ("0.1", {"old", "default", "base"})):
        made = make(tmp_path, f"train.kl_weight={weight}")
        asked: set[str] = set()
        velocity = made.policy.velocity

        def watched(*inputs: Any, made: Trainer = made, velocity: Any = velocity, asked: set[str] = asked) -> Any:
            asked.add(made.adapters.active)
            return velocity(*inputs)

        made.policy.velocity = watched  # type: ignore[method-assign]
        made.epoch()
        assert asked == expected


def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    whole = make(tmp_path)
    for _ in range(3):
        whole.epoch()
    first = make(tmp_path)
    first.epoch()
    path = first.save(tmp_path / "checkpoints", {"a": 1}, keep=2)
    second = make(tmp_path)
    second.load(path, {"a": 1})
    assert same(first, second)
    second.epoch()
    third = make(tmp_path)
    third.load(second.save(tmp_path / "checkpoints", {"a": 1}, keep=2), {"a": 1})
    third.epoch()
    assert third.position == whole.position
    assert same(whole, third)
    assert not same(whole, second)


def test_a_run_stopped_inside_an_epoch_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(tmp_path)
    whole.epoch()
    whole.epoch()
    broken = make(tmp_path)
    broken.epoch()
    clip = broken._clip
    monkeypatch.setattr(broken, "_clip", lambda losses, sigmas, update: clip(losses / (1 - update), sigmas, update))
    with pytest.raises(StoppedError, match=r"the loss's positive term at σ = .* in epoch 2, optimizer step 2"):
        broken.epoch()
    path = broken.save(tmp_path / "checkpoints", {}, keep=3)
    assert path.name == "epoch-00001-step-001"
    resumed = make(tmp_path)
    resumed.load(path, {})
    resumed.epoch()
    assert resumed.position == whole.position
    assert same(whole, resumed)


def test_learning_rate_schedules_survive_a_stop(tmp_path: Path) -> None:
    made = make(tmp_path, "train.schedule=cosine", "train.warmup=2")
    rates = [made.epoch()["learning_rate"] for _ in range(2)]
    assert rates[0] == pytest.approx(3e-4)
    assert rates[1] == pytest.approx(3e-4 * 0.5 * (1 + math.cos(math.pi * 2 / 4)))
    path = made.save(tmp_path / "checkpoints", {}, keep=1)
    resumed = make(tmp_path, "train.schedule=cosine", "train.warmup=2")
    resumed.load(path, {})
    assert resumed.epoch()["learning_rate"] == made.epoch()["learning_rate"] == pytest.approx(0.0, abs=1e-12)
    assert same(made, resumed)


def test_bfloat16_trains(tmp_path: Path) -> None:
    AcceleratorState._reset_state()  # accelerate has one precision a process
    made = make(tmp_path, "train.precision=bfloat16")
    before = weights_of(made)["default"]
    found = made.epoch()
    AcceleratorState._reset_state()
    assert math.isfinite(found["loss"])
    assert all(each.dtype == torch.float32 for each in made.adapters.parameters)
    assert not torch.equal(before, weights_of(made)["default"])


def test_activations_computed_again_give_the_same_gradient(tmp_path: Path) -> None:
    plain, thrifty = make(tmp_path), make(tmp_path, "train.checkpointing=true")
    plain.epoch()
    thrifty.epoch()
    torch.testing.assert_close(weights_of(plain)["default"], weights_of(thrifty)["default"], rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_no_number_names_its_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    loss = nft.loss

    def broken(*inputs: Any, **options: Any) -> nft.Terms:
        terms = loss(*inputs, **options)
        return dataclasses.replace(terms, negative=terms.negative * float("nan"), policy=terms.policy * float("nan"))

    monkeypatch.setattr(nft, "loss", broken)
    before = weights_of(made)["default"]
    with pytest.raises(StoppedError, match=r"the loss's negative term at σ = 0\.\d+ is not finite in epoch 1"):
        made.epoch()
    assert torch.equal(before, weights_of(made)["default"])  # the step was not made


def test_a_gradient_that_is_no_number_names_its_parameter(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.adapters.parameters[3].register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(StoppedError, match=r"gradient of transformer_blocks\.0\.attn.*lora_B.*default.* is not finite"):
        made.epoch()


def test_a_reward_that_fails_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    settings = recipe("train.epochs=2")
    uneven().save(out / "weights.json")
    build = stage.build

    def failing(*inputs: Any) -> Trainer:
        made = build(*inputs)
        calls = iter(range(100))
        real = made.models["detail"]
        made.models = dict(made.models) | {
            "detail": lambda *a: real(*a) if next(calls) < 1 else np.full(len(a[0]), float("inf"))
        }
        return made

    monkeypatch.setattr(stage, "build", failing)
    words = r"the reward 'detail' is infinite for the prompt .*the state before it is in .*epoch-00001"
    with pytest.raises(RecastError, match=words):
        stage.train(settings, out)
    assert [path.name for path in all_of(out / "checkpoints")] == ["epoch-00001"]
    monkeypatch.setattr(stage, "build", build)
    stage.train(settings, out)
    (tmp_path / "other").mkdir()
    shutil.copy(out / "weights.json", tmp_path / "other/weights.json")
    stage.train(settings, tmp_path / "other")
    files = [folder / "lora/pytorch_lora_weights.safetensors" for folder in (out, tmp_path / "other")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_reward_that_applies_to_nothing_drops_out(tmp_path: Path) -> None:
    def never(images: torch.Tensor, *_: object) -> np.ndarray:
        return np.full(len(images), float("nan"))

    made = make(tmp_path)
    made.models = dict(made.models) | {"detail": never}
    found = made.epoch()
    assert found["applies/detail"] == 0
    assert found["share/composition"] == pytest.approx(1.0)
    made.models = {"composition": never, "detail": never}
    with pytest.raises(StoppedError, match="no reward applies to any image of epoch 2"):
        made.epoch()


@pytest.mark.filterwarnings("ignore::recast.errors.FloorWarning")
def test_curves_are_measured_again_at_the_policy_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    more = ["prompts.count=2", "estimate.samples=2", "estimate.noisings=1", f"estimate.steps={STEPS}", "train.epochs=4"]
    settings = recipe(*more, "train.reweigh_every=2", "train.learning_rate=0.01")
    propose.propose(settings, out, lambda items, *_: items)
    masses = [1.0, 2.0, 3.0, 4.0]
    more.append(f"weigh.columns={masses}")
    settings = recipe(*more, "train.reweigh_every=2", "train.learning_rate=0.01")
    table = sinkhorn.project(uneven().matrix, [1, 1], masses).weights
    start = WeightMatrix(uneven().rewards, uneven().sigmas, table, [0.5, 0.5], nu=masses)
    start.save(out / "weights.json")
    active = []
    sampled = reweigh.sample_prompt

    def watched(*inputs: Any) -> Any:
        active.append(policies[-1].active)
        return sampled(*inputs)

    policies: list[Any] = []
    build = stage.build
    monkeypatch.setattr(stage, "build", lambda *a: (made := build(*a), policies.append(made.adapters))[0])
    monkeypatch.setattr(reweigh, "sample_prompt", watched)
    stage.train(settings, out)
    assert set(active) == {"old"}
    curves = GainCurves.load(out / "reweighed/epoch-00002/gains.json")
    kept = WeightMatrix.load(all_of(out / "checkpoints")[-1] / "weights.json")
    assert kept.rewards == start.rewards
    np.testing.assert_allclose(kept.matrix.sum(1), start.budget, atol=1e-9)
    np.testing.assert_allclose(kept.matrix.sum(0), start.nu, atol=1e-9)
    np.testing.assert_array_equal(kept.nu, start.nu)
    budget = dict(zip(start.rewards, start.budget, strict=True))
    np.testing.assert_allclose(kept.matrix, weigh(curves, budget, columns=masses).matrix)
    whole = (out / "lora/pytorch_lora_weights.safetensors").read_bytes()
    shutil.rmtree(all_of(out / "checkpoints")[-1])
    stage.train(settings, out)  # the last epoch once more, with the W of the third's checkpoint
    assert (out / "lora/pytorch_lora_weights.safetensors").read_bytes() == whole
    with pytest.raises(RecastError, match=r"was trained with weigh.tau = 1.0, not 2.0"):
        stage.train(recipe(*more, "train.reweigh_every=2", "train.learning_rate=0.01", "weigh.tau=2"), out)


def test_curves_on_another_grid_are_not_taken(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = recipe("prompts.count=2", "estimate.samples=2", "estimate.noisings=1", "train.reweigh_every=1")
    propose.propose(settings, out, lambda items, *_: items)
    uneven().save(out / "weights.json")
    with pytest.raises(
        RecastError, match=r"curves at T = 10 do not fit training at T = 4: set estimate.steps=4; the state before"
    ):
        stage.train(settings, out)


@pytest.mark.parametrize(
    "change",
    [
        *("train.beta=0.5", "train.form=velocity", "train.advantage_clip=0.5", "train.normalize=reward"),
        *("train.spread=group", "train.decay=0", "train.ema=0", "train.clip_norm=1e-4", "train.weight_decay=0.9"),
        *("train.epsilon=0.1", "train.betas=[0.5, 0.9]", "train.kl_weight=5", "train.seed=1", "train.warmup=3"),
    ],
)
def test_every_setting_reaches_the_training(tmp_path: Path, change: str, undisturbed: dict[str, torch.Tensor]) -> None:
    moved = weights_of(two_epochs(tmp_path, change))
    found = {name for name, each in undisturbed.items() if not torch.equal(each, moved[name])}
    assert found == {"train.ema=0": {"ema"}}.get(change, {"default", "old", "ema"})


def two_epochs(folder: Path, *changes: str) -> Trainer:
    made = make(folder, "train.schedule=constant_with_warmup", "train.batch=4", "train.micro_batch=8", *changes)
    made.epoch()
    made.epoch()
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return weights_of(two_epochs(tmp_path_factory.mktemp("plain")))


def test_a_reward_that_draws_at_random_is_resumed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chance(images: torch.Tensor, *_: object) -> np.ndarray:
        return torch.rand(len(images)).double().numpy()

    def fresh() -> Trainer:
        made = make(tmp_path)
        made.models = dict(made.models) | {"detail": chance}
        return made

    torch.manual_seed(5)
    whole = fresh()
    whole.epoch()
    broken = fresh()
    torch.manual_seed(5)
    clip = broken._clip
    monkeypatch.setattr(broken, "_clip", lambda losses, sigmas, update: clip(losses / (1 - update), sigmas, update))
    with pytest.raises(StoppedError):
        broken.epoch()
    path = broken.save(tmp_path / "checkpoints", {}, keep=3)
    resumed = fresh()
    torch.manual_seed(77)
    resumed.load(path, {})
    resumed.epoch()
    assert same(whole, resumed)


def test_float16_that_overflows_for_ever_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_PATIENCE", 3)
    made = make(tmp_path, "train.prompts_per_epoch=4")  # four optimizer steps
    made.accelerator.scaler = SimpleNamespace(scale=lambda loss: loss)  # a CPU has none
    monkeypatch.setattr(type(made.optimizer), "step_was_skipped", property(lambda _: True))
    with pytest.raises(StoppedError, match="overflowed float16 in 3 optimizer steps in a row"):
        made.epoch()
    assert made.position.update == 2


def test_another_w_is_another_run(tmp_path: Path) -> None:
    settings = recipe("train.epochs=1")
    first = uneven()
    first.save(tmp_path / "weights.json")
    stage.train(settings, tmp_path)
    other = WeightMatrix(first.rewards, first.sigmas, first.matrix[:, ::-1], first.budget)
    other.save(tmp_path / "weights.json")
    with pytest.raises(RecastError, match=r"was trained with another W: choose another --out"):
        stage.train(settings, tmp_path)


def effects(scale: float = 3.0) -> Effects:
    """Effects on the grid of training, which differ between levels by up to `scale`."""
    size = np.tile(np.linspace(1, scale, STEPS), 2)
    g = np.random.default_rng(0).normal(1.0, 0.5, (6, 2 * STEPS, 20)) * size[:, None]
    products = np.einsum("qap,rbp->qrab", g, g)
    sigmas = uneven().sigmas
    return Effects.measured(("composition", "detail"), sigmas, products, 4, batch=2, levels=2, normalize="step")


def test_a_w_of_other_masses_is_another_w(tmp_path: Path) -> None:
    plain, path, numbers = uneven(), tmp_path / "weights.json", [4.0, 3.0, 2.0, 1.0]
    table = plain.matrix * STEPS * np.array(numbers) / 10
    heavy = WeightMatrix(plain.rewards, plain.sigmas, table, table.sum(1), nu=numbers)
    equal = f"weigh.budget={{composition: {heavy.budget[0]}, detail: {heavy.budget[1]}}}"
    asked = recipe(f"weigh.columns={numbers}", equal)
    stage.check_weights(recipe(), plain, path)
    stage.check_weights(recipe("weigh.columns=[7, 7, 7, 7]"), plain, path)
    stage.check_weights(asked, heavy, path)
    stage.check_weights(recipe("weigh.columns=[40, 30, 20, 10]", equal), heavy, path)
    for settings, matrix, words in (
        (
            recipe(f"weigh.columns={numbers}"),
            plain,
            r"weigh.columns = uniform, but the recipe has \[0.4, 0.3, 0.2, 0.1\]",
        ),
        (recipe(equal), heavy, r"weigh.columns = \[0.4, 0.3, 0.2, 0.1\], but the recipe has uniform"),
        (recipe("weigh.columns=[1, 2, 3, 4]", equal), heavy, r"\[0.4, .*the recipe has \[0.1, 0.2, 0.3, 0.4\]"),
        (recipe("weigh.columns=effect", equal), heavy, r"weigh.columns = \[0.4, .* but the recipe has effect"),
    ):
        with pytest.raises(StaleError, match=words):
            stage.check_weights(settings, matrix, path)


def test_a_w_of_other_effects_is_another_w(tmp_path: Path) -> None:
    settings, path = recipe("weigh.columns=effect"), tmp_path / "weights.json"
    curves = GainCurves(uneven().rewards, uneven().sigmas, [[0.9, 0.8, 0.5, 0.2, 0.0], [0.9, 0.3, 0.2, 0.1, 0.0]])
    W = weigh_recipe(settings, curves, effects())
    stage.check_weights(settings, W, path)  # without the file, its word is taken
    effects().save(tmp_path / "effects.json")
    stage.check_weights(settings, W, path)
    with pytest.raises(StaleError, match="weigh.columns = effect, but the recipe has uniform"):
        stage.check_weights(recipe(), W, path)
    effects(9.0).save(tmp_path / "effects.json")
    with pytest.raises(StaleError, match="weigh.columns = effect of another measurement, but the recipe has effect"):
        stage.check_weights(settings, W, path)
    still = weigh_recipe(recipe("weigh.columns=effect", "weigh.method=static"), curves, effects())
    stage.check_weights(recipe("weigh.columns=effect", "weigh.method=static"), still, path)


def test_static_weights_need_no_effects(tmp_path: Path) -> None:
    """Their factors are λ for any masses."""
    more = ("weigh.method=static", f"train.steps={STEPS}", "train.epochs=1")
    stage.train(recipe(*more, "weigh.columns=effect"), tmp_path / "a")
    stage.train(recipe(*more, "weigh.columns=[1, 2, 3, 4]"), tmp_path / "b")
    plain, heavy = (WeightMatrix.load(tmp_path / name / "weights.json") for name in "ab")
    np.testing.assert_allclose(heavy.nu, [0.1, 0.2, 0.3, 0.4])
    assert plain.uniform
    np.testing.assert_allclose(heavy.factors, plain.factors, rtol=1e-12)
    stage.train(recipe(*more, "weigh.columns=[1, 2, 3, 4]"), tmp_path / "b")  # nothing to do


@pytest.mark.parametrize("key", ["train.lora", "policy.lora"])
def test_a_stage_starts_from_another_s_adapter(tmp_path: Path, key: str) -> None:
    first = make(tmp_path, "train.learning_rate=0.01")
    first.epoch()
    first.adapters.save(tmp_path / "warmup")
    second = make(tmp_path, f"{key}={tmp_path / 'warmup'}")
    trained = weights_of(first)["default"]
    assert not torch.equal(trained, weights_of(first)["ema"])
    assert all(torch.equal(each, trained) for each in weights_of(second).values())
    settings = recipe(f"{key}={tmp_path / 'warmup'}")
    facts = identity.training(settings, second.weights, second.rows)
    assert facts[key] == hashlib.sha256((tmp_path / "warmup/pytorch_lora_weights.safetensors").read_bytes()).hexdigest()


def test_trackers_get_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    settings = recipe("train.trackers=[tensorboard]", "train.preview_every=2", "train.epochs=2")
    uneven().save(out / "weights.json")
    stage.train(settings, out)
    events = EventAccumulator(str(next((out / "logs").rglob("events.out.tfevents.*")).parent)).Reload()
    assert [each.step for each in events.Scalars("reward/detail")] == [2, 4]
    assert {f"share_by_step/detail/t0{t}" for t in range(1, STEPS + 1)} <= set(events.Tags()["scalars"])
    assert (out / "samples/epoch-00002.png").is_file()


def test_static_weights_need_no_curves(tmp_path: Path) -> None:
    more = ("weigh.method=static", "weigh.budget={detail: 3, background: 1}", f"train.steps={STEPS}", "train.epochs=1")
    stage.train(recipe(*more), tmp_path)
    made = WeightMatrix.load(tmp_path / "weights.json")
    assert made.rewards == ("detail", "background")
    np.testing.assert_allclose(made.matrix, np.repeat([[0.75], [0.25]], STEPS, axis=1) / STEPS)
    with pytest.raises(RecastError, match=r"weights.json does not exist: run recast weigh first"):
        stage.train(recipe(), tmp_path / "none")


def test_the_pipeline_is_loaded_once_and_not_at_all_for_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str | None] = []
    load = families.load
    monkeypatch.setattr(families, "load", lambda policy: (loaded.append(policy.lora), load(policy))[1])
    plain = ("weigh.method=static", f"train.steps={STEPS}", "train.epochs=1")
    stage.train(recipe(*plain), tmp_path)
    assert loaded == [None]
    for wrong, words in (
        ("train.beta=0.5", r"was trained with train.beta = 0.1, not 0.5"),
        ("weigh.budget={detail: 1}", "was made with the budget"),
        ("weigh.method=row", "was made with weigh.method = static"),
    ):
        settings = recipe(*plain, wrong)
        with pytest.raises(RecastError, match=words):
            stage.train(settings, tmp_path)
    stage.train(recipe(*plain), tmp_path)  # finished
    assert loaded == [None]
    stage.train(recipe(*plain, "train.epochs=2"), tmp_path)
    assert loaded == [None, None]


def test_what_is_wrong_is_said_before_anything_is_done(tmp_path: Path) -> None:
    settings = recipe("train.epochs=1")
    uneven().save(tmp_path / "weights.json")
    (tmp_path / "file").write_text("")

    def said(*more: str, out: Path = tmp_path, **options: Any) -> str:
        with pytest.raises(RecastError) as caught:
            stage.train(recipe("train.epochs=1", *more), out, **options)
        return str(caught.value)

    assert "weights.json was made with weigh.method = sinkhorn, but the recipe has row" in said("weigh.method=row")
    assert "the recipe has {'composition': 0.75, 'detail': 0.25}: run recast weigh" in said(
        "weigh.budget.composition=3"
    )
    assert "'foo': 0.333333" in said("weigh.budget.foo=1")
    assert "train.batch = 5 does not divide the 4 images" in said("train.batch=5")
    assert "train.precision = float16 needs a GPU" in said("train.precision=float16")
    assert "W has 4 steps from" in said("train.steps=5")
    assert "file: cannot be used as the run's folder" in said(out=tmp_path / "file")
    stage.train(settings, tmp_path)
    state = tmp_path / "checkpoints/epoch-00001/state.json"
    kept = state.read_text()
    state.write_text(kept.replace('"epoch": 1', '"epoch": "x"'))
    assert "state.json: the field epoch is 'x': input should be a valid integer" in said()
    state.write_text(kept.replace('"epoch": 1', '"epoch": 0'))
    assert "state.json: the content does not have its checksum" in said()
    state.write_text(kept)
    edit(state, '"schedule"', '"other"')
    damaged = said("train.epochs=2")  # goes on, so that it is read
    assert re.search(
        r"state.json: the field schedule is missing: remove .*epoch-00001 to resume from the checkpoint", damaged
    )
    state.write_text(kept)
    edit(state, '"epoch": 1', '"epoch": 2')
    assert "has 2 epochs already, more than train.epochs = 1" in said()
    state.write_text(kept)
    assert "trained with another prompt file (train.prompts)" in said("train.prompts=shapes:test")
    assert "train.reweigh_every = 0, not 2" in said("train.reweigh_every=2")
    with pytest.warns(UserWarning, match="has no weight for alignment, background: not used in training"):
        stage.train(settings, tmp_path, tmp_path / "weights.json")


def test_images_are_scored_once_in_a_thread_of_their_own(tmp_path: Path) -> None:
    made = make(tmp_path, *LARGER, "train.sample_batch=3")
    calls: list[tuple[str, int]] = []
    real = made.models["detail"]

    def watched(images: torch.Tensor, *more: Any) -> np.ndarray:
        calls.append((threading.current_thread().name, len(images)))
        return real(images, *more)

    made.models = dict(made.models) | {"detail": watched}
    found = made.epoch()
    assert [count for _, count in calls] == [3, 3, 2]
    assert threading.main_thread().name not in {name for name, _ in calls}
    assert all(found[f"seconds/{name}"] >= 0 for name in ("sampling", "scoring", "waiting", "training"))
