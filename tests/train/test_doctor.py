"""The reward doctor: facts by hand, and a sentence for everything that is wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recast.cli import app
from recast.errors import RecastError
from recast.train.doctor import diagnose

ROOT = Path(__file__).parents[2]
MEMBERS = torch.arange(40) // 8
EVEN = {"a": 1.0, "b": 1.0}


def noise(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def advice(columns: dict[str, torch.Tensor], **budget: float) -> str:
    shares = budget or dict.fromkeys(columns, 1.0)
    return "\n".join(diagnose(torch.stack(list(columns.values()), 1), MEMBERS, list(columns), shares).advice)


def test_facts_by_hand() -> None:
    values = torch.stack([noise(0), MEMBERS.double()], 1)
    found = diagnose(values, MEMBERS, ["a", "b"], {"a": 3, "b": 1})
    table = values.numpy().reshape(5, 8, 2)
    np.testing.assert_allclose(found.mean, table.mean((0, 1)))
    np.testing.assert_allclose(found.group_std, table.std(1).mean(0), atol=1e-12)
    assert found.zero_std.tolist() == [0, 1]
    assert found.budget.tolist() == pytest.approx([0.75, 0.25])
    np.testing.assert_allclose(found.share, [1, 0], atol=1e-12)
    assert found.low.tolist() == [table[..., 0].min(), 0]
    assert np.isnan(found.correlations[0, 1])


def test_dead_and_silent_rewards() -> None:
    said = advice({"good": noise(0), "zero": torch.zeros(40), "never": torch.full((40,), float("nan"))})
    assert "zero is the same for all images of a prompt (mean 0) and has no effect" in said
    assert "never applies to none of these images" in said
    assert "good is" not in said
    rare = noise(1) * (MEMBERS == 0)
    assert "rare does not vary for 80% of the prompts" in advice({"good": noise(0), "rare": rare})


def test_budgets_that_do_not_mean_what_they_say() -> None:
    said = advice({"loud": noise(0), "quiet": noise(1, 0.01)}, loud=1, quiet=3)
    assert "quiet has 75% of the budget but" in said
    assert "loud has 25% of the budget but" in said
    assert "train.normalize=reward" in said


def test_conflicts_and_twins() -> None:
    first = noise(0)
    assert "a and b conflict (correlation -0." in advice({"a": first, "b": -first + noise(1)})
    assert "a and b are nearly redundant (correlation 1.00)" in advice({"a": first, "b": 2 * first})
    with pytest.raises(RecastError, match="names none of the rewards"):
        advice({"a": first}, z=1)


def test_a_share_is_that_of_the_recipe_s_normalization() -> None:
    values = torch.stack([noise(0), noise(1, 0.01)], 1)
    by_step = diagnose(values, MEMBERS, ["a", "b"], EVEN, "step")
    by_reward = diagnose(values, MEMBERS, ["a", "b"], EVEN, "reward")
    assert by_step.share[1] < 0.05
    assert by_reward.share[1] == pytest.approx(0.5, abs=0.1)
    assert not any("normalize" in sentence for sentence in by_reward.advice)


def test_few_images_say_nothing_of_correlations() -> None:
    few = torch.stack([noise(0)[:8], 2 * noise(0)[:8]], 1)
    assert "redundant" not in " ".join(diagnose(few, MEMBERS[:8], ["a", "b"], EVEN).advice)


def test_nothing_wrong_is_said_plainly() -> None:
    a = torch.tensor([1.0, -1, 1, -1] * 10, dtype=torch.float64)
    b = torch.tensor([1.0, 1, -1, -1] * 10, dtype=torch.float64)
    assert advice({"a": a, "b": b}) == "No problem found: every reward varies within groups and has about its share."


def test_the_command_on_shapes() -> None:
    options = ["--prompts", "2", "--images-per-prompt", "4"]
    result = CliRunner().invoke(app, ["doctor", str(ROOT / "recipes/shapes.yaml"), *options])
    assert result.exit_code == 0, result.output
    for word in ("composition", "background", "correlation within groups", "share"):
        assert word in result.output
