"""The world's rewards on images whose truth is known, and the base's place between nothing and perfect."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from recast import config
from recast.errors import RecastError
from recast.flow import families
from recast.flow.generate import generate
from recast.rewards import base
from recast.shapes import detect, prompts, render, rewards
from tolerance import tolerance

DRAWN = tolerance(768, scale=360 / 450)
"""Of the squared error of an object: a difference of sums of 768 numbers of about 360, over 450 numbers."""
PERFECT, DETAIL = math.exp(-math.sqrt(DRAWN) / 0.05), DRAWN / (2 * 0.03) / 0.05
"""Least detail of a perfect object, and the tolerance for the detail of one with an error of 0.03."""
NAMES = ("composition", "alignment", "detail", "background", "census")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: base.load(name) for name in NAMES}


@pytest.fixture(scope="module")
def base_images() -> tuple[torch.Tensor, list[str]]:
    """Held-out prompts with the sampler of training: dpm2, T = 10, no guidance."""
    texts = [row["prompt"] for row in prompts.load("test")]
    return generate(families.load(config.policy(model="shapes")), texts, range(42, 42 + len(texts)), steps=10), texts


def draw(*objects: tuple[int, str, str], seed: int = 0) -> torch.Tensor:
    """One image with (cell, colour, shape) objects of the larger size."""
    held = np.full((1, 16), render.EMPTY)
    for cell, color, shape in objects:
        held[0, cell] = render.objects().index(shape, color, 1)
    return render.draw(held, render.paper(1, np.random.default_rng(seed)))


def composition(text: str, *objects: tuple[int, str, str]) -> float:
    return float(rewards.Composition()(draw(*objects), [text])[0])


def test_the_renderer_is_perfect_on_every_prompt(models: dict[str, Any]) -> None:
    for split in prompts.SPLITS:
        rows = prompts.load(split)
        scores = dict(zip(NAMES, base.score(models, render.render(rows, 5), [r["prompt"] for r in rows]), strict=True))
        assert (scores["composition"] == 1).all()
        assert scores["detail"].min() > PERFECT
        assert scores["background"].min() > 0.99
        assert (scores["census"] == 1).all()
        assert scores["alignment"].mean() > 0.95


@pytest.mark.parametrize(
    ("text", "objects", "share"),
    [
        ("a red circle", [(0, "red", "circle")], "4/4"),
        ("a red circle", [], "0/4"),
        ("a red circle", [(0, "blue", "circle")], "2/4"),  # shape there, nothing else drawn
        ("a red circle", [(0, "red", "square")], "1/4"),  # one thing drawn, but not that
        ("a red circle", [(0, "red", "circle"), (1, "red", "circle")], "2/4"),  # number and nothing else fail
        ("two red circles", [(0, "red", "circle"), (9, "red", "circle")], "4/4"),
        ("two red circles", [(0, "red", "circle")], "2/4"),
        ("two red circles", [(0, "red", "circle"), (9, "red", "square")], "3/4"),
        ("a red circle and a blue square", [(0, "red", "circle"), (9, "blue", "square")], "7/7"),
        ("a red circle and a blue square", [(0, "blue", "circle"), (9, "red", "square")], "3/7"),  # colours swapped
        ("a red circle left of a blue square", [(4, "red", "circle"), (6, "blue", "square")], "8/8"),
        ("a red circle left of a blue square", [(6, "red", "circle"), (4, "blue", "square")], "7/8"),
        ("a red circle above a blue square", [(4, "red", "circle"), (6, "blue", "square")], "7/8"),
        ("a red circle left of a blue square", [(4, "red", "circle")], "3/8"),
    ],
)
def test_clauses_by_hand(text: str, objects: Sequence[tuple[int, str, str]], share: str) -> None:
    held, asked = map(int, share.split("/"))
    assert composition(text, *objects) == pytest.approx(held / asked)


def test_every_pair_must_stand_in_the_relation() -> None:
    image = draw((4, "red", "circle"), (7, "red", "circle"), (6, "blue", "square"))
    holds, asked = rewards.Composition().clauses(image, ["a red circle left of a blue square"])
    assert asked[0, -2]
    assert not holds[0, -2]


def test_detection_of_every_object_in_every_cell() -> None:
    count = len(render.objects().coverage)
    held = np.full((count, 16), render.EMPTY)
    held[np.arange(count), np.arange(count) % 16] = np.arange(count)
    reading = detect.read(render.draw(held, render.paper(count, np.random.default_rng(1))))
    assert (reading.drawn.numpy() == (held != render.EMPTY)).all()
    assert (reading.certain == reading.drawn).all()
    assert (reading.held.numpy()[held != render.EMPTY] == held[held != render.EMPTY]).all()
    assert reading.error[reading.drawn].max() < math.sqrt(DRAWN)


def test_a_batch_is_read_once_and_again_when_it_changes() -> None:
    image = draw((5, "red", "circle"))
    first = detect.read(image)
    assert detect.read(image) is first
    assert detect.read(image.clone()) is not first
    image[:, :, 34:46, 34:46] = 0.1
    assert detect.read(image).drawn.sum() == 2
    with torch.inference_mode():
        unseen = draw((5, "red", "circle"))
        assert detect.read(unseen).drawn.sum() == 1
        unseen[:, :, 34:46, 34:46] = 0.1
        assert detect.read(unseen).drawn.sum() == 2


def smear(image: torch.Tensor) -> torch.Tensor:
    """Something in cell 10 that is no object."""
    image = image.clone()
    image[:, :, 33:47, 33:47] -= torch.linspace(0, 0.5, 14)
    return image


def test_a_smear_is_drawn_but_is_no_object() -> None:
    reading = detect.read(smear(draw()))
    assert reading.drawn[0].nonzero().flatten().tolist() == [10]
    assert not reading.certain.any()


def test_a_smear_beside_the_right_object_costs_every_rule_something() -> None:
    right = draw((5, "red", "circle"))
    assert rewards.Composition()(smear(right), ["a red circle"])[0] == 0.75  # one thing too many is drawn
    assert rewards.Detail()(smear(right), [""])[0] < 0.6
    assert rewards.Background()(smear(right), [""])[0] < 0.6


@pytest.mark.parametrize(("strength", "certain"), [(1.0, True), (0.8, True), (0.3, False)])
def test_a_faded_object_is_one_down_to_half_of_what_it_was(strength: float, certain: bool) -> None:
    paper, whole = draw(), draw((5, "red", "circle"))
    reading = detect.read(paper + strength * (whole - paper))
    assert bool(reading.certain[0, 5]) is certain
    assert bool(reading.drawn[0, 5])


@pytest.mark.parametrize(("depth", "drawn"), [(0.09, False), (0.16, True)])
def test_a_faint_blot_is_paper_and_a_darker_one_is_drawn(depth: float, drawn: bool) -> None:
    image = draw()
    image[:, :, 20:28, 20:28] -= depth  # a quarter of the cell: root mean square depth / 2
    assert bool(detect.read(image).drawn.any()) is drawn


def test_what_surrounds_an_object_decides_which_it_is() -> None:
    """A large square's middle is a small square's whole: only what is around it tells them apart."""
    held = np.full((1, 16), render.EMPTY)
    small = held[0, 5] = render.objects().index("square", "blue", 0)
    image = render.draw(held, render.paper(1, np.random.default_rng(0)))
    assert detect.read(image).held[0, 5] == small
    junk = draw((5, "blue", "cross"))
    around = junk.clone()
    around[:, :, 18:21, 18:21] -= 0.2  # beside the cross, inside its cell
    assert rewards.Background()(junk, [""])[0] > 0.99
    assert rewards.Background()(around, [""])[0] < 0.6


def test_background_wants_the_worlds_paper() -> None:
    flat = torch.ones(1, 3, 64, 64)
    assert rewards.Background()(0 * flat, [""])[0] < 0.01
    assert rewards.Background()(flat * torch.tensor([0.9, 0.1, 0.1]).view(3, 1, 1), [""])[0] < 0.01
    stored = (render.render(prompts.load("test"), 0) * 255).round() / 255
    assert rewards.Background()(stored, [row["prompt"] for row in prompts.load("test")]).mean() > 0.95


def test_census_sees_full_rows_and_ignores_specks() -> None:
    row = draw(*((cell, "blue", "square") for cell in (4, 5, 6, 7)))
    assert rewards.Census()(row, ["four blue squares"])[0] == 1
    speck = draw((5, "red", "circle"))
    speck[:, :, 40:44, 40:45] = 0.1
    assert rewards.Census()(speck, ["a red circle"])[0] == 1
    speck[:, :, 40:46, 40:46] = 0.1
    assert rewards.Census()(speck, ["a red circle"])[0] < 1


def test_census_checks_a_relation_between_mean_places() -> None:
    text = "a red circle left of a blue square"
    mostly = draw((3, "red", "circle"), (4, "red", "circle"), (6, "blue", "square"))  # columns 3 and 0, and 2
    rarely = draw((3, "red", "circle"), (5, "red", "circle"), (4, "blue", "square"))  # columns 3 and 1, and 0
    assert rewards.Census()(mostly, [text])[0] == pytest.approx(2 * 2 / 5)
    assert rewards.Census()(rarely, [text])[0] == pytest.approx(2 / 5)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_image_is_an_error_and_not_a_score(name: str, models: dict[str, Any]) -> None:
    good = draw((5, "red", "circle"))
    broken = good.clone()
    broken[0, 0, 40, 40] = float("nan")
    for bad in (255 * good, 2 * good - 1, broken, good / 0):
        with pytest.raises(RecastError, match=r"must lie in \[0, 1\] and be finite"):
            models[name](bad, ["a red circle"])
    with pytest.raises(RecastError, match="float tensors"):
        models[name]((255 * good).byte(), ["a red circle"])
    with pytest.raises(RecastError, match="1 images need as many prompts, not 2"):
        models[name](good, ["a red circle"] * 2)
    assert models[name](good[:0], []).shape == (0,)
    assert models[name](good.bfloat16(), ["a red circle"])[0] > 0.5


def test_detail_falls_with_blur_and_noise_and_not_with_meaning() -> None:
    image = draw((5, "red", "circle"))
    detail = rewards.Detail()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(image.shape, generator=generator)
    scores = [float(detail((image + s * noise).clamp(0, 1), ["a blue square"])[0]) for s in (0, 0.01, 0.03, 0.1)]
    assert scores[0] > PERFECT
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.3
    assert detail(draw(), ["a red circle"])[0] == 0


def test_background_falls_with_blotches_around_objects_and_not_with_their_number() -> None:
    background = rewards.Background()
    few, many = draw((5, "red", "circle")), draw(*((cell, "blue", "square") for cell in range(16)))
    assert min(background(few, [""])[0], background(many, [""])[0]) > 0.99
    assert background(draw(), [""])[0] == 0  # or a policy would learn to draw nothing
    scores = []
    for depth in (0.02, 0.05, 0.1):
        stained = few.clone()
        stained[:, :, 16:19, 16:32] -= depth  # the edge of the object's cell
        scores.append(float(background(stained, [""])[0]))
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0.6
    elsewhere = few.clone()
    elsewhere[:, :, 36:44, 36:44] -= 0.04  # strictly inside an empty cell, too faint to be drawn
    assert background(elsewhere, [""])[0] > 0.99


def test_census_counts_without_a_grid() -> None:
    """An image shifted by half a cell: the templates see nothing they know, the components all."""
    image = draw((5, "red", "circle"), (9, "blue", "square")).roll((5, -6), dims=(2, 3))
    text = ["a red circle and a blue square"]
    assert rewards.Census()(image, text)[0] == 1
    assert rewards.Composition()(image, text)[0] < 1
    assert rewards.Census()(image, ["a red circle above a blue square"])[0] == 1
    assert rewards.Census()(image, ["a red circle below a blue square"])[0] == 0.5
    assert rewards.Census()(image, ["a red circle"])[0] == pytest.approx(2 / 3)
    assert rewards.Census()(draw(), ["a red circle"])[0] == 0


def test_alignment_ranks_the_right_prompt_first(models: dict[str, Any]) -> None:
    rows = prompts.load("test")
    texts = [row["prompt"] for row in rows]
    images = render.render(rows, 8)
    alignment = models["alignment"]
    table = alignment.clip.images(images, alignment.pixels, 64) @ alignment.clip.texts(texts, 64).T
    assert (table.argmax(1) == torch.arange(len(rows))).float().mean() > 0.8  # among 128, and no training prompt
    assert alignment(images.roll(1, 0), texts).mean() < 0.4


def test_alignment_counts(models: dict[str, Any]) -> None:
    """An empty paper, one object too few and one too many all score below the right number."""
    alignment = models["alignment"]
    cells = (1, 6, 8, 15)
    for color, shape in (("red", "circle"), ("blue", "cross"), ("green", "triangle")):
        images = torch.cat([draw(*((cell, color, shape) for cell in cells[:count])) for count in range(5)])
        for number, text in ((1, f"a {color} {shape}"), (2, f"two {color} {shape}{'es' if shape == 'cross' else 's'}")):
            scores = alignment(images, [text] * 5)
            assert scores.argmax() == number
            assert scores[0] < scores[number] - 0.2


def test_the_base_is_decent_and_clearly_improvable(base_images: Any, models: dict[str, Any]) -> None:
    images, texts = base_images
    holds, asked = models["composition"].clauses(images, texts)
    assert 0.45 < (holds & asked).sum() / asked.sum() < 0.75
    scores = dict(zip(NAMES, base.score(models, images, texts), strict=True))
    for name, values in scores.items():
        assert 0.3 < values.mean() < 0.8, name  # room to move for every reward
        assert values.std() > 0.05, name
    assert detect.read(images).certain.sum() > 0.9 * detect.read(images).drawn.sum()  # what is drawn is recognisable


def test_rewards_measure_different_things(base_images: Any, models: dict[str, Any]) -> None:
    table = np.corrcoef(base.score(models, *base_images))
    names = list(NAMES)
    assert table[names.index("composition"), names.index("alignment")] < 0.9
    assert abs(table[names.index("composition"), names.index("background")]) < 0.4


def test_scores_do_not_depend_on_the_batch(base_images: Any, models: dict[str, Any]) -> None:
    images, texts = base_images
    whole = base.score(models, images[:20], texts[:20])
    parts = [base.score(models, images[k : k + 7], texts[k : k + 7]) for k in (0, 7, 14)]
    np.testing.assert_allclose(whole, np.concatenate(parts, axis=1)[:, :20], atol=DETAIL, rtol=0)


def test_bad_images_and_prompts_are_named(models: dict[str, Any]) -> None:
    with pytest.raises(RecastError, match=r"shapes world are \(B, 3, 64, 64\), not \(1, 3, 48, 48\)"):
        rewards.Detail()(torch.zeros(1, 3, 48, 48), [""])
    with pytest.raises(RecastError, match="'composition' failed on 1 images, the first for the prompt 'a dog'"):
        base.score({"composition": models["composition"]}, draw(), ["a dog"])
