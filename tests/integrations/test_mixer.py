"""Mixer: rewards and prompts in, one advantage per slot out."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recast import RecastError, WeightMatrix
from recast.core.advantage import advantages
from recast.errors import GridWarning
from recast.integrations import Mixer
from recast.integrations.mixer import levels

W = WeightMatrix(("clip", "ocr"), [0, 0.3, 0.6, 1], [[0.2, 0.1, 0.1], [0.1, 0.2, 0.3]], [0.4, 0.6])


@pytest.fixture(name="data")
def samples() -> tuple[np.ndarray, list[str], np.ndarray]:
    """Scores of three prompts' four images, one reward missing for the last prompt, and each image's order of steps."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(12, 2))
    scores[8:, 1] = np.nan
    prompts = [f"prompt {k}" for k in (2, 0, 1) for _ in range(4)]
    return scores, prompts, np.stack([rng.permutation(3) for _ in range(12)])


@pytest.mark.parametrize("spread", ["batch", "group"])
@pytest.mark.parametrize("mode", ["step", "shared", "reward"])
def test_slots_in_any_order(data: Any, mode: Any, spread: Any) -> None:
    """Put back by the permutation and not by σ, they are the table of the mathematics."""
    scores, prompts, order = data
    found = Mixer(W, mode, spread)(scores, prompts, W.sigmas[1:][order])
    back = np.empty_like(found)
    np.put_along_axis(back, order, found, 1)
    np.testing.assert_array_equal(back, advantages(scores, np.repeat([2, 0, 1], 4), W, mode, spread))
    assert np.isfinite(found).all()
    assert np.abs(back - found).max() > 0.1, "by slot"


def test_tensors_and_names(data: Any) -> None:
    scores, prompts, order = data
    expected = Mixer(W)(scores, prompts, W.sigmas[1:][order])
    named = {"other": [None] * 12, "ocr": scores[:, 1].tolist(), "clip": scores[:, 0].tolist()}
    np.testing.assert_array_equal(Mixer(W)(named, prompts, W.sigmas[1:][order]), expected)
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in named.items() if name != "other"}
    sigmas = torch.tensor(W.sigmas[1:][order], dtype=torch.float32)
    numbers = torch.tensor([7, 7, 7, 7, 1, 1, 1, 1, 3, 3, 3, 3])
    found = Mixer(W)(tensors, numbers, sigmas)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-11)


def test_one_grid_for_all_samples(data: Any) -> None:
    scores, prompts, _ = data
    mixer = Mixer(W)
    np.testing.assert_array_equal(mixer(scores, prompts, [1.0, 0.3]), mixer.table(scores, prompts)[:, [2, 0]])
    assert mixer.unused == (1,)


def test_the_grid_is_checked(data: Any) -> None:
    scores, prompts, _ = data
    with pytest.raises(RecastError, match=r"0\.44 is 0\.14 from the nearest, 0\.3"):
        Mixer(W)(scores, prompts, [1.0, 0.44])
    nearest = Mixer(W, strict=False)(scores, prompts, [1.0, 0.44])
    np.testing.assert_array_equal(nearest, Mixer(W)(scores, prompts, [1.0, 0.3]))


def test_a_step_that_is_never_trained_is_reported_once() -> None:
    mixer, table = Mixer(W), np.zeros((20, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixer.slots(table, [1.0, 0.3])
    with pytest.warns(GridWarning, match=r"no slot has the noise level 0\.6: 33% of W trains nothing"):
        mixer.slots(table, [1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixer.slots(table, [1.0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.table({"clip": [1.0]}, [0]), "no scores for ocr, which W needs; the trainer has clip"),
        (lambda m: m.table([[1.0, 2.0]], [0, 1]), r"groups must have one entry per sample, \(1,\)"),
        (lambda m: m.table([[1.0]], [0]), r"shape \(batch, 2\)"),
        (lambda m: m.slots(np.zeros((4, 2)), [1.0]), "one column per step of W"),
        (lambda m: m.slots(np.zeros((4, 3)), np.ones((3, 1))), r"shape \(4, slots\)"),
    ],
)
def test_what_does_not_fit_is_one_sentence(call: Any, words: str) -> None:
    with pytest.raises(RecastError, match=words):
        call(Mixer(W))


def test_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECAST_WEIGHTS", raising=False)
    with pytest.raises(RecastError, match="RECAST_WEIGHTS is not set"):
        Mixer.from_environment()
    monkeypatch.setenv("RECAST_WEIGHTS", str(W.save(tmp_path / "weights.json")))
    assert Mixer.from_environment("shared").mode == "shared"
    monkeypatch.setenv("RECAST_NORMALIZE", "reward")
    assert Mixer.from_environment("shared").mode == "reward"


def test_timesteps_or_levels() -> None:
    assert levels(torch.tensor([1000, 250])).tolist() == [1.0, 0.25]
    assert levels(np.array([0.5, 0.25])).tolist() == [0.5, 0.25]


def test_torch_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import recast.integrations.diffusion_nft, recast.integrations.flow_factory, recast.integrations.verl_omni\n"
        "from recast import WeightMatrix\n"
        "W = WeightMatrix(('a',), [0, 0.5, 1], [[0.5, 0.5]], [1.0])\n"
        "print(recast.integrations.Mixer(W)([[1.0], [2.0]], ['p', 'p'], [1.0, 0.5]).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "(2, 2)\n", done.stderr
