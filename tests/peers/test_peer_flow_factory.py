"""Flow-Factory's own command with W and no edit, for one epoch; run against X-GenGroup/Flow-Factory a0b2bc5."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkouts import checkout, made, run

from recast import WeightMatrix
from recast.train import advantage

PACKAGES = ("datasets", "einops", "imageio")
GRID = np.array([0, 3 / 7, 2 / 3, 9 / 11, 12 / 13, 1])
"""linspace(1, 1/5) with shift 3: their grid, where diffusers' own scheduler has .009, .503, .751, .900, 1."""


@pytest.fixture
def source() -> Path:
    return checkout("Flow-Factory", *PACKAGES) / "src"


@pytest.mark.parametrize("algorithm", ["nft", "grpo", "grpo-guard"])
def test_advantages_are_those_of_w_at_each_timestep(algorithm: str, source: Path, model: Path, tmp_path: Path) -> None:
    W = WeightMatrix.load(made(GRID, tmp_path / "weights.json"))
    out = tmp_path / "kept.pt"
    kept: dict[str, Any] = run(
        "run_flow_factory.py", source, model, Path(algorithm), out, RECAST_WEIGHTS=str(tmp_path / "weights.json")
    )
    (table,) = kept["tables"]
    expected = advantage.advantages(table["rewards"], table["groups"], W, "reward", "batch")
    assert np.isnan(table["rewards"]).any()
    np.testing.assert_array_equal(table["table"], expected)
    rows = {tuple(row.tolist()) for row in torch.from_numpy(expected)}
    levels = set()
    for slot in kept["slots"]:
        assert {tuple(row.tolist()) for row in slot["rows"].double()} <= rows
        column = W.columns(slot["timesteps"] / 1000)
        picked = slot["rows"].gather(1, column[:, None])[:, 0].float()
        assert torch.equal(slot["advantages"], picked)
        levels |= set(column.tolist())
    assert len(levels) > 1
    assert kept["moved"] > 0, "the adapters were trained"


def test_w_of_the_other_grid_is_refused(source: Path, model: Path, weights: Path, tmp_path: Path) -> None:
    """W on the grid of diffusers, of which 4 of 5 levels are not theirs."""
    with pytest.raises(
        AssertionError, match=r"4 of 5 .* steps of W: 0\.6667 is 0\.0845 from the nearest, 0\.7511; weigh"
    ):
        run("run_flow_factory.py", source, model, Path("nft"), tmp_path / "kept.pt", RECAST_WEIGHTS=str(weights))
