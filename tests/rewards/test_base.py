"""Finding rewards by name, and scoring with several at once."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recast import progress
from recast.errors import RecastError
from recast.rewards import NAMES, base, load, positive, score
from recast.rewards.imagereward import ImageReward
from tolerance import tolerance

IMAGES = torch.stack([torch.full((3, 4, 4), value) for value in (0.1, 0.5)])
CLOSE = tolerance(IMAGES[0].numel())


def brightness(images: torch.Tensor, prompts: list[str], metadata: object = None, scale: float = 1.0) -> np.ndarray:
    return scale * images.mean((1, 2, 3)).numpy()


class Constant:
    """A reward with state."""

    def __init__(self, value: float = 0.5) -> None:
        self.value = value

    def __call__(self, images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
        """The same for every image."""
        return np.full(len(images), self.value)


class Needy:
    """A reward that cannot be made without an option."""

    def __init__(self, value: float) -> None:
        self.value = value


class Shifted(Constant):
    """Its map to non-negative scores depends on an option; another is called as a package reward's once was."""

    def __init__(self, shift: float, weights: str = "") -> None:
        super().__init__(-shift)
        self.shift = shift

    def positive(self, scores: np.ndarray) -> np.ndarray:
        """Scores from the lowest up."""
        return scores + self.shift


def picky(images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
    raise RecastError("not this one")


def failing(images: torch.Tensor, prompts: list[str], metadata: object = None) -> np.ndarray:
    raise ValueError("no such thing")


def test_ones_own_function_and_class_by_dotted_path() -> None:
    plain, scaled = load("test_base:brightness"), load("test_base:brightness", scale=2.0)
    np.testing.assert_allclose(plain(IMAGES, ["", ""]), [0.1, 0.5], atol=CLOSE)
    np.testing.assert_allclose(scaled(IMAGES, ["", ""]), [0.2, 1.0], atol=CLOSE)
    assert load("test_base:Constant", value=0.25)(IMAGES, ["", ""]).tolist() == [0.25, 0.25]


@pytest.mark.parametrize("name", [*NAMES][9:])
def test_every_short_name_that_needs_no_hub_loads(name: str) -> None:
    assert callable(load(name))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ocrr", {}, "unknown reward 'ocrr': choose one of clipscore, hpsv2, pickscore"),
        ("no_such_package.x:Y", {}, "cannot be imported"),
        (":Y", {}, "unknown reward ':Y'"),
        (".x:Y", {}, "unknown reward '.x:Y'"),
        ("test_base:Needy", {}, "does not take these options: missing a required argument: 'value'"),
        ("recast.rewards.base:Nothing", {}, "the module recast.rewards.base has no 'Nothing'"),
        ("recast.rewards.base:NAMES", {}, "is a dict, which cannot be called"),
        ("test_base:brightness", {"speed": 1}, "does not take these options: .*'speed'"),
        ("test_base:Constant", {"speed": 1}, "does not take these options: .*'speed'"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(RecastError, match=words):
        load(name, **options)


def test_scores_are_one_row_a_reward_and_keep_nan() -> None:
    rewards = {"a": load("test_base:brightness"), "b": load("test_base:Constant", value=float("nan"))}
    table = score(rewards, IMAGES, ["x", "y"])
    assert table.dtype == np.float64
    np.testing.assert_allclose(table[0], [0.1, 0.5], atol=CLOSE)
    assert np.isnan(table[1]).all()
    assert score({}, IMAGES, ["x", "y"]).shape == (0, 2)


def test_a_reward_that_fails_is_named_and_never_a_zero() -> None:
    with pytest.raises(
        RecastError, match="'bad' failed on 2 images, the first for the prompt 'x': ValueError: no such"
    ):
        score({"bad": failing}, IMAGES, ["x", "y"])
    with pytest.raises(RecastError, match="'picky' failed on 2 images, the first for the prompt 'x': not this one"):
        score({"picky": picky}, IMAGES, ["x", "y"])
    with pytest.raises(RecastError, match=r"'odd' returned the shape \(3,\) for 2 images"):
        score({"odd": lambda *_: np.zeros(3)}, IMAGES, ["x", "y"])
    with pytest.raises(RecastError, match="'huge' is infinite for the prompt 'y'"):
        score({"huge": lambda *_: np.array([0, np.inf])}, IMAGES, ["x", "y"])


@pytest.mark.parametrize(("value", "said"), [(2e30, "is 2e\\+30 for"), (-np.inf, "is infinite for")])
def test_a_score_out_of_all_bounds_is_an_error(value: float, said: str) -> None:
    with pytest.raises(RecastError, match=f"'big' {said} the prompt 'x'"):
        score({"big": lambda *_: np.array([value, 0])}, IMAGES, ["x", "y"])


@pytest.mark.parametrize("shift", [-0.2, 0.6])
def test_a_range_of_minus_one_to_one_would_be_scored_in_silence(shift: float) -> None:
    with pytest.raises(RecastError, match=r"images must lie in \[0, 1\]"):
        score({"bad": failing}, IMAGES + shift, ["x", "y"])


def test_images_and_prompts_are_checked_before_any_reward() -> None:
    broken = IMAGES.clone()
    broken[1, 0, 0, 0] = float("nan")
    with pytest.raises(RecastError, match="1 of 2 do not: number 1, for the prompt 'y', goes from nan to nan"):
        score({"bad": failing}, broken, ["x", "y"])
    with pytest.raises(RecastError, match="2 images need as many prompts, not 1"):
        score({"bad": failing}, IMAGES, ["x"])
    with pytest.raises(RecastError, match="2 prompts need as many rows of metadata, not 1"):
        score({"bad": failing}, IMAGES, ["x", "y"], [{}])


@pytest.mark.parametrize("name", ["aesthetic", "hpsv2", "hpsv3", "imagereward"])
def test_the_former_name_of_an_option_is_answered_with_its_present_one(name: str) -> None:
    with pytest.raises(RecastError, match=f"^the reward '{name}': the option weights is called checkpoint now$"):
        load(name, weights="model.pt")
    assert load("test_base:Shifted", shift=1.0, weights="model.pt")(IMAGES, ["", ""]).tolist() == [-1, -1]


def test_a_package_rewards_map_needs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageReward, "__init__", failing)
    found = base.mapper("imagereward", {"checkpoint": "nowhere"})
    values, counts = positive("imagereward", found, np.array([-1.0, 0.0]))
    np.testing.assert_allclose(values, [1 / (1 + np.e), 0.5])
    assert counts.tolist() == [0, 2]
    assert not hasattr(base.mapper("composition", {}), "positive")


def test_a_custom_rewards_map_may_depend_on_its_options() -> None:
    for shift, clamped in ((2.0, 0), (0.5, 1)):
        found = base.mapper("test_base:Shifted", {"shift": shift})
        values, counts = positive("x", found, np.array([-1.0, 1.0]))
        assert values.tolist() == [max(0, shift - 1), shift + 1]
        assert counts.tolist() == [clamped, 2]


def test_a_function_has_no_map() -> None:
    found = base.mapper("test_base:brightness", {"scale": 2.0})
    assert not hasattr(found, "positive")
    assert positive("x", found, np.array([-1.0, 1.0]))[0].tolist() == [0, 1]


class Unmapped:
    """A custom reward without a map, whose model is not on this machine."""

    def __init__(self) -> None:
        raise FileNotFoundError("model.safetensors")


class Statically(Unmapped):
    """The same with a map that needs no model."""

    @staticmethod
    def positive(scores: np.ndarray) -> np.ndarray:
        """Shift by 1."""
        return scores + 1


def test_a_map_that_needs_no_model_loads_none() -> None:
    assert base.mapper("test_base:Unmapped", {}) is None
    found = base.mapper("test_base:Statically", {})
    assert positive("x", found, np.array([-0.5]))[0].tolist() == [0.5]


def test_a_reward_that_exits_is_an_error_and_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(images: Any, prompts: Any, metadata: Any = None) -> Any:
        sys.exit(0)

    with pytest.raises(RecastError, match="the reward 'mine' failed on 1 images, .*: SystemExit: 0"):
        base.score({"mine": leaves}, torch.zeros(1, 3, 8, 8), ["a cat"])
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)")
    (tmp_path / "yaml.py").write_text("raise RuntimeError('not the library')")
    (tmp_path / "reading.py").write_text("import yaml\nScore = lambda *_: [float(yaml.safe_load('1'))]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    with pytest.raises(RecastError, match=r"'leaving:Score' cannot be imported \(SystemExit: 0\)"):
        base.load("leaving:Score")
    assert base.score({"r": base.load("reading:Score")}, torch.zeros(1, 3, 8, 8), ["a cat"]).tolist() == [[1.0]]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    base.load("reading:Score")
    assert sys.path[0] == str(tmp_path)  # as the user has set it
    assert sys.path.count(str(tmp_path)) == 1


def test_a_reward_that_takes_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    slow: Any = lambda *_: time.sleep(0.3) or [1.0]  # noqa: E731
    with pytest.warns(UserWarning, match="the reward 'slow' has been running for 0.05 s: still waiting for it"):
        base.score({"slow": slow}, torch.zeros(1, 3, 8, 8), ["a cat"])


@pytest.mark.parametrize("seconds", ["", "60", "0.05"])
def test_a_limit_ends_the_wait_for_a_reward_that_never_returns(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("RECAST_REWARD_TIMEOUT", seconds)
    forever = threading.Event()

    def slow(images: object, prompts: list[str], metadata: object = None) -> np.ndarray:
        if seconds == "0.05":
            forever.wait(20)
        return np.zeros(len(prompts))

    def fails(*_: object) -> None:
        raise SystemExit(0)

    image = torch.zeros(1, 3, 8, 8)
    if seconds == "0.05":
        begun = time.monotonic()
        with pytest.raises(RecastError, match="'slow' failed on 1 images, .* has not returned after 0.05 s, the limit"):
            base.score({"slow": slow}, image, ["a cat"])
        assert time.monotonic() - begun < 10
        forever.set()
    else:
        assert base.score({"slow": slow}, image, ["a cat"]).tolist() == [[0.0]]
    with pytest.raises(RecastError, match="'fails' failed on 1 images, .*: SystemExit: 0"):
        base.score({"fails": fails}, image, ["a cat"])  # type: ignore[dict-item]


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan", "inf", "1e300"])
def test_a_limit_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("RECAST_REWARD_TIMEOUT", seconds)
    with pytest.raises(RecastError, match=f"RECAST_REWARD_TIMEOUT = '{seconds}' must be a number of seconds above 0"):
        base.score({"x": lambda *_: np.zeros(1)}, torch.zeros(1, 3, 8, 8), ["a cat"])  # type: ignore[dict-item]


def test_a_limit_keeps_the_modes_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECAST_REWARD_TIMEOUT", "60")
    net = torch.nn.Linear(4, 1)
    seen = []

    def scores(images: Any, prompts: Any, metadata: Any = None) -> Any:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return net(images[:, 0, 0, :4]).squeeze(1).float().numpy()

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        base.score({"net": scores}, torch.zeros(1, 3, 8, 8), ["a cat"])
    with torch.inference_mode():
        base.score({"net": scores}, torch.zeros(1, 3, 8, 8), ["a cat"])
    assert seen == [(False, False, True), (False, True, False)]
