"""Advantages: by hand, against DiffusionNFT's own arithmetic, and what each normalization keeps."""

import numpy as np
import pytest
import torch

from recast import WeightMatrix
from recast.errors import RecastError
from recast.train import advantage

SIGMAS = [0.0, 0.3, 0.6, 1.0]
MODES = ("step", "shared", "reward")


def matrix(rows: list[list[float]]) -> WeightMatrix:
    table = np.array(rows)
    return WeightMatrix(tuple("abcd"[: len(rows)]), SIGMAS, table, table.sum(1))


def sample(groups: int = 5, images: int = 6, rewards: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randn(groups * images, rewards, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    members = torch.arange(groups * images) // images
    return values * torch.tensor([1.0, 0.05][:rewards]) + members[:, None] * 0.3, members


UNEVEN = matrix([[0.3, 0.15, 0.05], [1 / 3 - 0.3, 1 / 3 - 0.15, 1 / 3 - 0.05]])
STATIC = matrix([[0.2 / 3] * 3, [0.8 / 3] * 3])


def diffusion_nft(values: np.ndarray, members: np.ndarray, shared_std: bool) -> np.ndarray:
    """What its tracker does to one scalar reward: group mean, standard deviation of the batch or of the group."""
    found = np.zeros_like(values)
    for group in np.unique(members):
        inside = members == group
        spread = values if shared_std else values[inside]
        found[inside] = (values[inside] - values[inside].mean()) / (spread.std() + 1e-4)
    return found


@pytest.mark.parametrize("spread", ["batch", "group"])
@pytest.mark.parametrize("mode", ["step", "shared"])
def test_with_a_constant_w_it_is_diffusion_nft(mode: advantage.Mode, spread: advantage.Spread) -> None:
    values, members = sample()
    found = advantage.advantages(values, members, STATIC, mode, spread)
    scalar = (values @ torch.tensor([0.2, 0.8], dtype=torch.float64)).numpy()
    expected = diffusion_nft(scalar, members.numpy(), spread == "batch")
    for column in found.T:
        np.testing.assert_allclose(column.numpy(), expected, rtol=1e-10, atol=1e-12)
    other = advantage.advantages(values, members, STATIC, "reward", spread)
    assert not np.allclose(other[:, 0].numpy(), expected, atol=0.05)


def test_two_images_by_hand() -> None:
    values = torch.tensor([[1.0, 0.0], [0.0, 0.5]])
    members = torch.zeros(2, dtype=torch.long)
    w = matrix([[0.3, 0.1, 0.1], [1 / 3 - 0.3, 1 / 3 - 0.1, 1 / 3 - 0.1]])
    mixed = np.array([[3 * 0.3, 0.3, 0.3], [0.5 * 3 * (1 / 3 - 0.3), 0.5 * 0.7, 0.5 * 0.7]])
    half = (mixed[0] - mixed[1]) / 2
    step = advantage.advantages(values, members, w, "step")
    np.testing.assert_allclose(step[0].numpy(), half / (np.abs(half) + 1e-4), rtol=1e-9)
    shared = advantage.advantages(values, members, w, "shared")
    np.testing.assert_allclose(shared[0].numpy(), half / (np.sqrt(np.mean(half**2)) + 1e-4), rtol=1e-9)
    z = np.array([0.5 / (0.5 + 1e-4), -0.25 / (0.25 + 1e-4)])
    mixed_z = z @ (w.matrix * 3)
    reward = advantage.advantages(values, members, w, "reward")
    np.testing.assert_allclose(reward[0].numpy(), mixed_z / (np.sqrt(np.mean(mixed_z**2)) + 1e-4), rtol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_groups_are_centred_whatever_their_order(mode: advantage.Mode) -> None:
    values, members = sample()
    found = advantage.advantages(values, members, UNEVEN, mode)
    for group in range(5):
        assert found[members == group].mean(0).abs().max() < 1e-12
    shuffle = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    again = advantage.advantages(values[shuffle], members[shuffle] * 7 + 2, UNEVEN, mode)
    torch.testing.assert_close(again, found[shuffle])


def test_step_cancels_a_column_s_scale_and_shared_keeps_it() -> None:
    values, members = sample()
    raised = np.array(UNEVEN.matrix) * [1.0, 1.0, 3.0]
    louder = matrix((raised / raised.sum()).tolist())
    spread = {mode: advantage.advantages(values, members, louder, mode).std(0) for mode in MODES}
    quiet = {mode: advantage.advantages(values, members, UNEVEN, mode).std(0) for mode in MODES}
    torch.testing.assert_close(spread["step"], quiet["step"], rtol=1e-3, atol=0.0)
    for mode in ("shared", "reward"):
        ratio = (spread[mode][2] / spread[mode][0]) / (quiet[mode][2] / quiet[mode][0])
        assert ratio == pytest.approx(3.0, rel=1e-3)


def test_reward_gives_every_reward_its_budget_whatever_its_unit() -> None:
    values, members = sample()
    static = matrix([[0.5 / 3] * 3, [0.5 / 3] * 3])
    by_step, _ = advantage.shares(advantage.contributions(values, members, static, "step"))
    by_reward, _ = advantage.shares(advantage.contributions(values, members, static, "reward"))
    assert by_step[0] > 0.95  # its standard deviation is twenty times the other's
    np.testing.assert_allclose(by_reward.numpy(), [0.5, 0.5], atol=0.01)
    scaled = advantage.advantages(values * torch.tensor([1.0, 100.0]), members, static, "reward")
    torch.testing.assert_close(scaled, advantage.advantages(values, members, static, "reward"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_parts_sum_to_the_advantages_and_shares_to_one(mode: advantage.Mode) -> None:
    values, members = sample()
    values[members == 2, 0] = float("nan")
    pieces = advantage.contributions(values, members, UNEVEN, mode)
    torch.testing.assert_close(pieces.sum(1), advantage.advantages(values, members, UNEVEN, mode))
    overall, steps = advantage.shares(pieces)
    assert overall.sum().item() == pytest.approx(1.0)
    np.testing.assert_allclose(steps.sum(0).numpy(), 1.0)
    lone = advantage.shares(advantage.contributions(values, members, matrix([[1 / 3] * 3, [0.0] * 3]), mode))[0]
    np.testing.assert_allclose(lone.numpy(), [1.0, 0.0], atol=1e-9) if mode != "reward" else None


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_does_not_apply_drops_out(mode: advantage.Mode) -> None:
    values, members = sample()
    values[members == 0, 1] = float("nan")
    values[members == 1] = float("nan")
    found = advantage.advantages(values, members, UNEVEN, mode)
    assert found.isfinite().all()
    assert found[members == 1].abs().max() == 0
    order = found[members == 0][:, 1].argsort()  # only the first reward is left to rank the first group
    assert order.tolist() == values[members == 0][:, 0].argsort().tolist()


@pytest.mark.parametrize("mode", MODES)
def test_that_a_reward_applies_is_no_advantage(mode: advantage.Mode) -> None:
    nan = float("nan")
    values = torch.tensor([[0.5, 0.9], [0.5, 0.9], [0.5, nan], [0.5, nan]])
    found = advantage.advantages(values, torch.zeros(4, dtype=torch.long), STATIC, mode)
    assert found.abs().max() < 1e-6
    whole, members = sample()
    part = whole.clone()
    part[members == 4, 1] += 50.0  # another scale altogether, where it applies
    part[members == 4, 1] = nan
    before, after = (advantage.advantages(each, members, STATIC, mode)[members < 4] for each in (whole, part))
    assert after.std().item() == pytest.approx(before.std().item(), rel=0.3)


def test_each_slot_looks_its_column_up_by_sigma() -> None:
    table = torch.arange(6.0).reshape(2, 3)
    levels = torch.tensor([[1.0, 0.3, 0.6], [0.6, 1.0, 0.3]])
    assert advantage.by_sigma(table, UNEVEN, levels).tolist() == [[2.0, 0.0, 1.0], [4.0, 5.0, 3.0]]


def test_optimality_by_hand() -> None:
    found = advantage.optimality(torch.tensor([-9.0, -5.0, -1.0, 0.0, 2.5, 5.0, 80.0]))
    np.testing.assert_allclose(found.numpy(), [0, 0, 0.4, 0.5, 0.75, 1, 1], atol=1e-7)
    assert advantage.optimality(torch.tensor([1.0]), clip=2.0).item() == 0.75


def test_nothing_varies() -> None:
    pieces = advantage.contributions(torch.ones(4, 2), torch.tensor([0, 0, 1, 1]), UNEVEN)
    assert pieces.abs().max() < 1e-9
    assert all(part.isfinite().all() for part in advantage.shares(pieces))


def test_unknown_names_are_refused() -> None:
    values, members = sample()
    with pytest.raises(RecastError, match="unknown normalization 'steps'"):
        advantage.advantages(values, members, UNEVEN, "steps")  # type: ignore[arg-type]
    with pytest.raises(RecastError, match="unknown spread 'all'"):
        advantage.advantages(values, members, UNEVEN, "step", "all")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_masses_change_what_a_weight_is_worth_and_not_the_scale_of_a_step(mode: advantage.Mode) -> None:
    """A W with masses and a W without them that has the same factors give the same advantages, NaN included."""
    values, members = sample()
    values[members == 2, 1] = torch.nan
    nu = np.array([0.5, 0.3, 0.2])
    factors = UNEVEN.factors
    heavy = WeightMatrix(UNEVEN.rewards, SIGMAS, factors * nu, (factors * nu).sum(1), nu=nu)
    found = advantage.advantages(values, members, heavy, mode)
    np.testing.assert_allclose(found, advantage.advantages(values, members, UNEVEN, mode), atol=1e-12)
