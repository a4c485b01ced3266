"""The estimators against closed forms, and what they promise of cost, noise and order."""

import numpy as np
import pytest
import torch
from torch import Tensor

from recast.core import renyi, schedule
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.estimate import estimators
from recast.estimate import rollout as estimate
from recast.flow.mixture import GaussianMixture, TiltReward, gaussian_divergence, score_all
from recast.flow.mixture_prompts import REWARDS, exact_mu, mixture_prompt
from recast.flow.sampling import rollout_levels

F = torch.float64


def gaussian_reward() -> TiltReward:
    """One Gaussian in two dimensions with a bump: D has a closed form for every α."""
    policy = GaussianMixture(
        torch.ones(1, dtype=F), torch.tensor([[0.5, -0.3]], dtype=F), torch.tensor([[0.6, 0.2]], dtype=F)
    )
    return TiltReward(
        policy, torch.ones(1, dtype=F), torch.tensor([[1.0, -0.6]], dtype=F), torch.tensor([[1.5, 4.0]], dtype=F)
    )


@pytest.mark.parametrize(
    ("estimator", "steps", "spacing", "tolerance"),
    [("coupled", 12, 0.8, 0.05), ("coupled", 12, 0.3, 0.02), ("paper", 60, 1.0, 0.05)],
)
def test_alpha_two_matches_the_closed_form(
    estimator: estimate.Estimator, steps: int, spacing: float, tolerance: float
) -> None:
    reward = gaussian_reward()
    grid = np.linspace(0, 1, steps + 1)
    clean = reward.positive().sample(8000, torch.Generator().manual_seed(0))
    found = estimate.rollouts(
        reward.policy,
        clean,
        grid,
        score_all([reward]),
        estimator=estimator,
        noisings=2,
        levels=rollout_levels(grid, spacing) if estimator == "coupled" else None,
    )
    D = renyi.log_moment(found.mu, 2.0)[0]
    exact = gaussian_divergence(reward, grid.tolist(), 2.0).numpy()
    np.testing.assert_allclose(D - D[-1], exact, atol=tolerance)
    assert exact[0] > 0.35  # against which these tolerances are a test


@pytest.mark.parametrize("alpha", [0.5, 1.5, 4.0])
def test_other_orders_match_the_closed_form_with_enough_repeats(alpha: float) -> None:
    """The plug-in moment is biased in K for α ≠ 2, and the bias goes as K grows."""
    reward = gaussian_reward()
    grid = np.linspace(0, 1, 7)
    clean = reward.positive().sample(1500, torch.Generator().manual_seed(1))
    exact = gaussian_divergence(reward, grid.tolist(), alpha).numpy()
    errors = []
    for repeats in (2, 32):
        found = estimate.rollouts(reward.policy, clean, grid, score_all([reward]), noisings=2, repeats=repeats)
        D = renyi.log_moment(found.mu, alpha)[0]
        errors.append(np.abs(renyi.gains(D, clip=False) - renyi.gains(exact, clip=False)).max())
    assert errors[1] < 0.05
    assert errors[1] < errors[0]


def test_self_rollouts_reach_the_same_curve() -> None:
    """Samples of π_old with the exponent α (App. B.3): the same D, where the reward is not too rare."""
    reward = gaussian_reward()
    grid = np.linspace(0, 1, 7)
    clean = reward.policy.sample(4000, torch.Generator().manual_seed(2))
    found = estimate.rollouts(reward.policy, clean, grid, score_all([reward]), noisings=2, repeats=16)
    D = renyi.log_moment(found.mu, 2.0, self_rollout=True)[0]
    exact = gaussian_divergence(reward, grid.tolist(), 2.0).numpy()
    np.testing.assert_allclose(renyi.gains(D, clip=False), renyi.gains(exact, clip=False), atol=0.05)


@pytest.fixture(scope="module")
def many_seeds() -> dict[str, np.ndarray]:
    """Gains of 24 runs of either estimator at equal cost, on one 8-dimensional world."""
    world = mixture_prompt(8, 6, seed=4)
    grid = schedule.from_shift(10)
    clean = world.proposal.sample(8, torch.Generator().manual_seed(0))
    score = score_all(list(world.rewards))
    runs: dict[str, list[np.ndarray]] = {"coupled": [], "paper": []}
    for seed in range(24):
        for name, options in (("coupled", {"noisings": 10}), ("paper", {"repeats": 16})):
            found = estimate.rollouts(world.policy, clean, grid, score, estimator=name, seed=seed, **options)
            assert 0.9 < found.evaluations / (8 * 16 * 55) < 1.1
            runs[name].append(renyi.gains(renyi.log_moment(found.mu, 2.0), clip=False))
    table = {name: np.stack(values) for name, values in runs.items()}
    exact = exact_mu(world, clean, grid.tolist(), 4096, seed=0)
    return table | {"exact": renyi.gains(renyi.log_moment(exact, 2.0), clip=False)}


def test_coupled_gains_have_a_fraction_of_the_noise(many_seeds: dict[str, np.ndarray]) -> None:
    variance = {name: many_seeds[name].var(axis=0, ddof=1).mean(axis=1) for name in ("coupled", "paper")}
    ratio = variance["paper"] / variance["coupled"]
    assert (ratio > 3).all(), ratio
    assert np.exp(np.log(ratio).mean()) > 5, ratio


def test_coupled_is_nearer_the_truth_for_every_reward(many_seeds: dict[str, np.ndarray]) -> None:
    error = {
        name: np.sqrt(((many_seeds[name] - many_seeds["exact"]) ** 2).mean((0, 2))) for name in ("coupled", "paper")
    }
    assert (error["coupled"] < 0.6 * error["paper"]).all(), error


@pytest.mark.parametrize("estimator", estimate.ESTIMATORS)
def test_rollouts_of_one_noised_sample_are_independent(estimator: estimate.Estimator) -> None:
    """Given x_t, K rollouts are K draws: their covariance is the variance of μ(x_t), no more."""
    reward = gaussian_reward()
    clean = torch.zeros(3000, 2, dtype=F) + torch.tensor([0.8, -0.4], dtype=F)
    grid = [0.0, 0.3, 0.6, 0.8, 1.0]
    found = estimate.rollouts(
        reward.policy, clean, grid, score_all([reward]), estimator=estimator, noisings=1, repeats=2, seed=3
    )
    # From σ = 1 nothing of x_t survives, so two rollouts have nothing in common but the noise they must not share.
    first, second = found.scores[0, -1, :, 0], found.scores[0, -1, :, 1]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08
    # From σ = 0.3 they share x_t, and so part of their score.
    assert np.corrcoef(found.scores[0, 1, :, 0], found.scores[0, 1, :, 1])[0, 1] > 0.15


def test_the_papers_noisings_are_fresh_at_every_level() -> None:
    """Alg. 1 draws ε_t anew: scores at two noisy levels, both without rollout noise, are uncorrelated."""
    reward = gaussian_reward()
    clean = torch.zeros(3000, 2, dtype=F)
    found = estimate.rollouts(
        reward.policy, clean, [0, 0.8, 0.9, 1], score_all([reward]), estimator="paper", sampler="euler"
    )
    assert abs(np.corrcoef(found.mu[0, 1], found.mu[0, 2])[0, 1]) < 0.08


def test_evaluations_are_counted_as_they_happen() -> None:
    world = mixture_prompt(3, 4, seed=0)
    grid = schedule.from_shift(7)
    clean = world.proposal.sample(2, torch.Generator().manual_seed(0))
    for estimator, options in (("coupled", {"noisings": 3, "repeats": 2}), ("paper", {"repeats": 5})):
        rows, calls = 0, 0

        def counting(x: Tensor, sigma: float) -> Tensor:
            nonlocal rows, calls
            rows, calls = rows + len(x), calls + 1
            return world.policy(x, sigma)

        found = estimate.rollouts(counting, clean, grid, score_all(list(world.rewards)), estimator=estimator, **options)
        assert found.evaluations == rows
        if estimator == "paper":
            assert rows == 2 * 5 * 7 * 8 // 2  # N·K·T(T+1)/2
        else:  # one wavefront: a call a level, not a call a start and level
            assert calls == len({*grid[1:].tolist(), *rollout_levels(grid)[1:]})


def test_samples_may_have_any_shape() -> None:
    world = mixture_prompt(12, 4, seed=1)
    grid = schedule.from_shift(6)
    flat = world.proposal.sample(3, torch.Generator().manual_seed(0))
    images = flat.view(3, 3, 2, 2)
    score = score_all(list(world.rewards))

    def image_velocity(x: Tensor, sigma: float) -> Tensor:
        return world.policy(x.flatten(1), sigma).view_as(x)

    for estimator in estimate.ESTIMATORS:
        one = estimate.rollouts(world.policy, flat, grid, score, estimator=estimator, repeats=2)
        two = estimate.rollouts(
            image_velocity, images, grid, lambda x: score(x.flatten(1)), estimator=estimator, repeats=2
        )
        np.testing.assert_array_equal(one.scores, two.scores)


def test_no_graph_is_built_through_a_policy_that_has_parameters() -> None:
    weight = torch.ones(1, dtype=F, requires_grad=True)
    seen = []

    def velocity(x: Tensor, sigma: float) -> Tensor:
        v = weight * x
        seen.append(v.requires_grad)
        return v

    for estimator in estimate.ESTIMATORS:
        estimate.rollouts(
            velocity, torch.ones(1, 2, dtype=F), [0, 0.5, 1], lambda x: x.T.abs()[:1], estimator=estimator
        )
    assert seen
    assert not any(seen)


def test_seeds_decide_every_byte() -> None:
    world = mixture_prompt(4, 3, seed=2)
    clean = world.proposal.sample(4, torch.Generator().manual_seed(0))
    score = score_all(list(world.rewards))
    for estimator in estimate.ESTIMATORS:
        runs = [
            estimate.rollouts(world.policy, clean, [0, 0.3, 0.7, 1], score, estimator=estimator, seed=seed).scores
            for seed in (5, 5, 6)
        ]
        assert runs[0].tobytes() == runs[1].tobytes()
        assert not np.array_equal(runs[0], runs[2])


def test_a_proposals_noise_does_not_depend_on_the_others() -> None:
    world = mixture_prompt(4, 3, seed=2)
    clean = world.proposal.sample(4, torch.Generator().manual_seed(0))
    score = score_all(list(world.rewards))
    whole = estimate.rollouts(world.policy, clean, [0, 0.3, 0.7, 1], score, noisings=3).scores
    first = estimate.rollouts(world.policy, clean[:2], [0, 0.3, 0.7, 1], score, noisings=3).scores
    np.testing.assert_allclose(whole[:, :, :6], first, rtol=1e-9)


def test_noise_paths_have_the_ancestral_law_and_are_mirrored() -> None:
    levels = [0.0, 0.2, 0.5, 0.9, 1.0]
    paths = estimators._noise_paths(torch.zeros(4, 1, dtype=F), levels, noisings=20_000, repeats=1, seed=0)
    table = torch.stack(paths)[:, :, 0, 0]
    np.testing.assert_allclose(table.var(1), np.square(levels), rtol=0.03)
    # b_s = A b_t + fresh noise, so Cov(b_s, b_t) = A σ_t²: the Markov chain of the forward process.
    for s, t in ((1, 2), (2, 3), (1, 3)):
        keep = levels[s] ** 2 * (1 - levels[t]) / (levels[t] ** 2 * (1 - levels[s]))
        np.testing.assert_allclose((table[s] * table[t]).mean(), keep * levels[t] ** 2, rtol=0.06, atol=0.002)
    halves = table.view(5, 4, 2, 10_000)
    torch.testing.assert_close(halves[:, :, 0], -halves[:, :, 1])


def test_level_zero_is_the_proposals_own_score() -> None:
    world = mixture_prompt(4, 3, seed=2)
    clean = world.proposal.sample(3, torch.Generator().manual_seed(0))
    own = score_all(list(world.rewards))(clean).numpy()
    for estimator in estimate.ESTIMATORS:
        found = estimate.rollouts(
            world.policy, clean, [0, 0.5, 1], score_all(list(world.rewards)), estimator=estimator, noisings=2, repeats=3
        )
        repeated = np.repeat(own, found.scores.shape[2] // 3, axis=1)
        np.testing.assert_array_equal(found.scores[:, 0], np.repeat(repeated[..., None], 3, axis=-1))


def test_deterministic_rollouts_are_copies_and_miss_the_curve() -> None:
    """The first trap of the design: K rollouts along the ODE are one, and r(ODE(x_t)) is not E[r | x_t]."""
    reward = gaussian_reward()
    grid = np.linspace(0, 1, 41)
    clean = reward.positive().sample(4000, torch.Generator().manual_seed(0))
    exact = renyi.gains(gaussian_divergence(reward, grid.tolist(), 2.0).numpy())
    errors = {}
    for sampler in ("dpm2", "ancestral"):
        found = estimate.rollouts(
            reward.policy,
            clean,
            grid,
            score_all([reward]),
            estimator="paper",
            repeats=2,
            sampler=sampler,
        )
        gains = renyi.gains(renyi.log_moment(found.mu, 2.0)[0], clip=False)
        # Smoothed over eight steps, so that what is left is bias and not noise.
        errors[sampler] = np.abs((gains - exact).reshape(5, 8).sum(1)).sum() / exact.sum()
        if sampler == "dpm2":
            np.testing.assert_array_equal(found.scores[..., 0], found.scores[..., 1])
    assert errors["dpm2"] > 0.25
    assert errors["ancestral"] < 0.2


@pytest.mark.parametrize("grid", [[0, 1], [0, 0.5, 1], [0, 1e-6, 0.999999, 1]])
def test_tiny_grids_work(grid: list[float]) -> None:
    world = mixture_prompt(2, 3, seed=0)
    clean = world.proposal.sample(1, torch.Generator().manual_seed(0))
    for estimator in estimate.ESTIMATORS:
        found = estimate.rollouts(
            world.policy, clean, grid, score_all(list(world.rewards)), estimator=estimator, noisings=1
        )
        assert found.scores.shape == (3, len(grid), 1, 1)
        assert np.isfinite(found.scores).all()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_grid_of_one_or_two_steps_still_gets_real_rollouts(steps: int) -> None:
    grid = schedule.from_shift(steps)
    walk = rollout_levels(grid)
    assert walk[-1] == 0.97
    totals = []
    for prompt in range(6):
        world = mixture_prompt(8, 6, seed=prompt)
        clean = world.proposal.sample(8, torch.Generator().manual_seed(prompt))
        found = estimate.rollouts(world.policy, clean, grid, score_all(list(world.rewards)), noisings=48, seed=prompt)
        exact = exact_mu(world, clean, grid.tolist(), 512, seed=prompt)
        totals.append([renyi.total_gain(renyi.log_moment(mu, 2.0), clip=False) for mu in (found.mu, exact)])
    estimated, true = np.mean(totals, axis=0)
    np.testing.assert_allclose(estimated, true, rtol=0.35)


def test_rollout_levels_follow_the_grid_where_it_is_coarse() -> None:
    grid = schedule.from_shift(25)
    walk = rollout_levels(grid, spacing=0.8)
    snr = [np.log(1 / s - 1) for s in walk[1:]]
    gaps = -np.diff(snr)
    assert walk[0] == 0
    assert walk == sorted(walk)
    assert gaps.max() <= 0.8 + 1e-9
    assert set(grid[2:4]) <= set(walk)  # the clean steps, where detail is decided, are all visited
    assert len(walk) < 15
    finer = rollout_levels(grid, spacing=0.4)
    assert len(finer) > 1.5 * len(walk)


def test_the_estimate_of_a_whole_world_is_close_to_its_truth() -> None:
    grid = schedule.from_shift(10)
    mu, truth = [], []
    for prompt in range(8):
        world = mixture_prompt(32, 6, seed=prompt)
        clean = world.proposal.sample(8, torch.Generator().manual_seed(prompt))
        found = estimate.rollouts(world.policy, clean, grid, score_all(list(world.rewards)), noisings=16, seed=prompt)
        mu.append(found.mu)
        truth.append(exact_mu(world, clean, grid.tolist(), 512, seed=prompt))
    curves, exact = (GainCurves.from_mu(REWARDS, grid, np.stack(table)) for table in (mu, truth))
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(curves.gains, exact.gains, strict=True)]
    assert min(correlation) > 0.95
    np.testing.assert_allclose(curves.total, exact.total, rtol=0.2)


def test_bad_input_is_named() -> None:
    world = mixture_prompt(2, 3, seed=0)
    clean = world.proposal.sample(2, torch.Generator().manual_seed(0))
    score = score_all(list(world.rewards))
    cases = (
        ({"estimator": "fast"}, clean, score, "unknown estimator 'fast'"),
        ({"noisings": 0}, clean, score, "at least 1, not 0 and 1"),
        ({"levels": [0.5, 1.5]}, clean, score, "lie in \\[0, 1\\), but one is 1.5"),
        ({"levels": [float("nan")]}, clean, score, "but one is nan"),
        ({"estimator": "paper", "levels": [0.5]}, clean, score, "levels belong to the estimator coupled"),
        ({"sampler": "euler"}, clean, score, "belongs to the estimator paper"),
        ({"seed": -1}, clean, score, "seed must not be negative"),
        ({}, clean[0], score, "batch \\(N, ...\\)"),
        ({}, clean, lambda x: x, "a scorer must return"),
    )
    for options, samples, scorer, words in cases:
        with pytest.raises(RecastError, match=words):
            estimate.rollouts(world.policy, samples, [0, 0.5, 1], scorer, **options)
    with pytest.raises(RecastError, match="spacing > 0"):
        rollout_levels([0, 0.5, 1], spacing=0)
