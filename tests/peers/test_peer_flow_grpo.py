"""flow_grpo's own `main` with W, for one epoch; run against yifan123/flow_grpo ac4c86e."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkouts import checkout, copied, run

from recast import WeightMatrix
from recast.integrations import flow_grpo, scripts
from recast.train import advantage

NAME = "flow_grpo"


@pytest.fixture(scope="module")
def trained(model: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout(NAME, "absl", "ml_collections")
    folder = copied(NAME, tmp_path_factory.mktemp("grpo") / "repository", "scripts", "flow_grpo", "config")
    scripts.apply(flow_grpo.PEER, folder / flow_grpo.PEER.script)
    return dict(run("run_flow_grpo.py", folder, model, folder.parent / "kept.pt", RECAST_WEIGHTS=str(weights)))


def test_advantages_are_those_of_w_at_each_step(trained: dict[str, Any], weights: Path) -> None:
    W, (table,) = WeightMatrix.load(weights), trained["tables"]
    rewards = np.stack([table["rewards"][name] for name in W.rewards], 1)
    members = np.unique(table["prompts"], return_inverse=True)[1]
    ours = torch.from_numpy(advantage.advantages(rewards, members, W, "step"))
    assert len(trained["slots"]) == 8, "two batches of int(.99 · 5) steps"
    for slot in trained["slots"]:
        column = W.steps - 1 - slot["slot"]  # their first step is the noisiest, W's last column
        assert float(slot["timesteps"][0]) / 1000 == pytest.approx(W.sigmas[column + 1], abs=1e-6)
        torch.testing.assert_close(slot["advantages"], ours[slot["rows"], column], rtol=1e-9, atol=1e-9)


def test_its_first_loss_is_that_of_these_advantages(trained: dict[str, Any]) -> None:
    """Before the first update the ratio is 1, and the loss is the mean of the negative advantages."""
    first = torch.cat([slot["advantages"] for slot in trained["slots"][:4]])
    losses = [each["policy_loss"] for each in trained["logged"] if "policy_loss" in each]
    assert len(losses) == 2
    assert abs(float(losses[0].detach())) > 1e-3
    assert float(losses[0].detach()) == pytest.approx(-float(first.clamp(-5, 5).mean()), abs=1e-4)
    assert trained["changed"] > 0
