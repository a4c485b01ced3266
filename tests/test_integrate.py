"""docs/guides/integrate.md: every block of Python in it runs, and its numbers of lines are what they say."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recast
from recast.core.advantage import advantages
from recast.integrations import Mixer, diffusion_nft, flow_factory, flow_grpo

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guides/integrate.md").read_text(encoding="utf-8")
BLOCKS = [
    re.sub(r"^   ", "", block, flags=re.MULTILINE)
    for block in re.findall(r"^ *```python\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
]


def run(words: str, **names: Any) -> dict[str, Any]:
    """What the one block with `words` in it leaves, run with `names`."""
    (code,) = [block for block in BLOCKS if words in block]
    exec(compile(code, f"docs/guides/integrate.md: {words}", "exec"), names)
    return names


@pytest.fixture(name="curves")
def measured() -> recast.GainCurves:
    D = [[0.9, 0.8, 0.5, 0.2, 0], [0.9, 0.3, 0.1, 0.05, 0]]
    return recast.GainCurves(("clip", "ocr"), [0, 0.3, 0.6, 0.8, 1], D)


def test_no_block_is_forgotten() -> None:
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("words", ["Mixer(", "flow_factory.attach"])
def test_a_user_writes_at_most_three_lines(words: str) -> None:
    (code,) = [block for block in BLOCKS if words in block]
    assert len([line for line in code.splitlines() if line]) <= 3


def test_the_remedy_gives_w_of_the_trainers_grid(curves: recast.GainCurves) -> None:
    sigmas, budget = [0, 0.429, 0.667, 0.818, 0.923, 1], {"clip": 1, "ocr": 2}
    with pytest.raises(recast.RecastError, match=r"recast\.weigh\(curves\.resample\(sigmas\), budget\)"):
        recast.weigh(curves, budget).check(sigmas[1:])
    W = run("curves.resample", recast=recast, curves=curves, sigmas=sigmas, budget=budget)["W"]
    assert W.check(sigmas[1:]).unused == ()


@pytest.fixture
def data(
    curves: recast.GainCurves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[recast.WeightMatrix, np.ndarray, np.ndarray]:
    """W in the folder, scores of two prompts' images of which one lacks a reward, and each image's levels."""
    W = recast.weigh(curves, {"clip": 1, "ocr": 2})
    W.save(tmp_path / "weights.json")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6, 2))
    scores[3:, 1] = np.nan
    return W, scores, np.stack([rng.permutation(4) for _ in range(6)])


def test_own_loop(data: tuple[recast.WeightMatrix, np.ndarray, np.ndarray]) -> None:
    W, scores, order = data
    groups = ["cat"] * 3 + ["dog"] * 3
    found = run("Mixer(", rewards=scores, groups=groups, sigmas=W.sigmas[1:][order])["advantage"]
    expected = advantages(scores, np.repeat([0, 1], 3), W, "reward", "batch")
    np.testing.assert_array_equal(found, np.take_along_axis(expected, order, 1))


def test_loop_in_the_style_of_trl(data: tuple[recast.WeightMatrix, np.ndarray, np.ndarray]) -> None:
    W, scores, order = data
    values = {name: [None if np.isnan(v) else v for v in scores[:, k]] for k, name in enumerate(W.rewards)}
    functions = {name: (lambda images, prompts, name=name: values[name]) for name in W.rewards}
    old = torch.zeros(6, 4)
    new = old.clone().requires_grad_(True)
    left = run(
        "reward_functions",
        torch=torch,
        mixer=Mixer(W, "reward", "group"),
        reward_functions=functions,
        images=None,
        prompts=["cat"] * 3 + ["dog"] * 3,
        timesteps=torch.tensor(1000 * W.sigmas[1:][order], dtype=torch.float32),
        log_probs=new,
        old_log_probs=old,
    )
    expected = advantages(scores, np.repeat([0, 1], 3), W, "reward", "group")
    np.testing.assert_array_equal(left["advantages"].numpy(), np.take_along_axis(expected, order, 1))
    left["loss"].backward()
    torch.testing.assert_close(new.grad[:, 3], -left["advantages"][:, 3].float() / 6)  # type: ignore[index]


def test_the_block_of_flow_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(flow_factory, "attach", lambda *given: seen.append(given))
    run("flow_factory.attach", trainer="theirs")
    assert seen == [("theirs", "weights.json")]


def test_commits_are_those_of_the_code() -> None:
    """The page, the README of tests/peers and the modules name the same ones."""
    readme = (ROOT / "tests/peers/README.md").read_text(encoding="utf-8")
    for commit in re.findall(r"# ([0-9a-f]{40})", readme):
        assert commit[:7] in PAGE
    for peer in (diffusion_nft.PEER, flow_grpo.PEER):
        assert peer.tried in readme
