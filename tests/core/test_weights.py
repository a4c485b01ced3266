"""WeightMatrix: mixing, lookup by σ, NaN, NumPy and torch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recast.core import artifact, schedule, sinkhorn
from recast.core.weights import WeightMatrix
from recast.errors import RecastError

GRID = schedule.from_shift(10)
GAINS = np.random.default_rng(0).gamma(2.0, size=(3, 10))


def matrix(weights: np.ndarray | None = None) -> WeightMatrix:
    W = sinkhorn.project(GAINS, [1, 1, 2]).weights if weights is None else weights
    return WeightMatrix(("clip", "hps", "ocr"), GRID, W, W.sum(1))


@pytest.mark.parametrize("budget", [[None] * 3, [np.nan, 0.5, 0.5], [0.0] * 3, [250.0, 250.0, 500.0], [-1.0, 1.0, 1.0]])
@pytest.mark.parametrize("method", ["sinkhorn", "matched", "static"])
def test_a_budget_is_shares_that_sum_to_one(budget: list[float], method: str, tmp_path: Path) -> None:
    W = matrix()
    scaled = W.matrix * (0.0 if not any(budget) else 1000.0 if budget[0] == 250 else 1.0)
    fields = {"rewards": W.rewards, "method": method, "budget": budget, "sigmas": W.sigmas, "matrix": scaled}
    path = artifact.write(tmp_path / "weights.json", "recast.weights", fields)
    with pytest.raises(
        RecastError,
        match=r"weights.json: the (.* must (be shares that )?sum to (1|nu)|field budget.0 is (None|-1.0))",
    ):
        WeightMatrix.load(path)


def test_mix_is_the_boxed_equation() -> None:
    W = matrix()
    rewards = np.random.default_rng(1).random((5, 3))
    expected = np.zeros((5, 10))
    for b in range(5):
        for t in range(10):
            expected[b, t] = sum(10 * W.matrix[i, t] * rewards[b, i] for i in range(3))
    np.testing.assert_allclose(W.mix(rewards), expected)


def test_a_constant_reward_mixes_to_itself_at_every_step() -> None:
    np.testing.assert_allclose(matrix().mix(np.full((4, 3), 0.7)), 0.7, atol=1e-8)


def test_torch_in_torch_out_with_dtype_and_gradient() -> None:
    rewards = torch.rand(5, 3, dtype=torch.float32, requires_grad=True)
    mixed = matrix().mix(rewards)
    assert mixed.dtype == torch.float32
    np.testing.assert_allclose(mixed.detach(), matrix().mix(rewards.detach().double().numpy()), rtol=1e-5)
    mixed.sum().backward()
    assert rewards.grad is not None
    np.testing.assert_allclose(rewards.grad[0], 10 * matrix().budget, rtol=1e-5)
    assert matrix().mix(torch.tensor([[1, 0, 1]])).dtype == torch.get_default_dtype()


@given(st.integers(0, 2**32 - 1))
def test_slots_are_looked_up_by_sigma_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = rng.random((4, 3))
    steps = np.stack([rng.permutation(10) for _ in range(4)])
    by_slot = matrix().mix(rewards, sigmas=GRID[1:][steps])
    np.testing.assert_array_equal(by_slot, np.take_along_axis(matrix().mix(rewards), steps, axis=1))
    with_torch = matrix().mix(torch.tensor(rewards), sigmas=torch.tensor(GRID[1:][steps], dtype=torch.float32))
    np.testing.assert_allclose(with_torch, by_slot, rtol=1e-12)


def test_lookup_takes_the_nearest_start_level() -> None:
    W = matrix()
    np.testing.assert_array_equal(W.columns(GRID[1:]), np.arange(10))
    np.testing.assert_array_equal(W.columns(np.array([0.0, 1.0])), [0, 9])
    middle = (GRID[3] + GRID[4]) / 2
    np.testing.assert_array_equal(W.columns(np.array([middle - 1e-9, middle + 1e-9])), [2, 3])
    # bfloat16 timesteps, as a trainer may hand them over
    assert W.columns(torch.tensor(GRID[1:], dtype=torch.bfloat16)).tolist() == list(range(10))


def test_sigmas_may_be_of_another_kind_than_rewards() -> None:
    rewards, sigmas = np.random.default_rng(0).random((2, 3)), np.array([[0.9, 0.1], [0.5, 1.0]])
    expected = matrix().mix(rewards, sigmas=sigmas)
    np.testing.assert_array_equal(matrix().mix(rewards, sigmas=sigmas.tolist()), expected)
    np.testing.assert_array_equal(matrix().mix(rewards, sigmas=torch.tensor(sigmas)), expected)
    mixed = matrix().mix(torch.tensor(rewards), sigmas=sigmas)
    assert isinstance(mixed, torch.Tensor)
    np.testing.assert_allclose(mixed, expected)


def test_nan_drops_out_and_its_weight_goes_to_the_others() -> None:
    W = matrix()
    rewards = np.array([[0.5, np.nan, 0.9], [np.nan, np.nan, 0.4], [np.nan, np.nan, np.nan], [0.1, 0.2, 0.3]])
    mixed = W.mix(rewards)
    present = W.matrix[[0, 2]]
    np.testing.assert_allclose(mixed[0], (present * [[0.5], [0.9]]).sum(0) / present.sum(0), rtol=1e-8)
    np.testing.assert_allclose(mixed[1], 0.4, atol=1e-8)
    assert np.isnan(mixed[2]).all()
    np.testing.assert_allclose(mixed[3], W.mix(rewards[3:])[0])
    np.testing.assert_allclose(W.mix(torch.tensor(rewards)).numpy(), mixed, rtol=1e-12)


def test_where_a_column_has_no_weight_for_what_applies_the_budget_decides() -> None:
    W = WeightMatrix(("a", "b", "c"), [0, 0.5, 1], [[0.5, 0.0], [0.0, 0.3], [0.0, 0.2]], [0.5, 0.3, 0.2])
    mixed = W.mix(np.array([[0.5, np.nan, np.nan], [np.nan, 1.0, 0.0], [np.nan] * 3]))
    np.testing.assert_allclose(mixed[:2], [[0.5, 0.5], [0.6, 0.6]])
    assert np.isnan(mixed[2]).all()


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.sampled_from(["sinkhorn", "hard"]))
def test_terms_are_what_each_reward_adds_to_the_mix(seed: int, missing: float, method: str) -> None:
    W = matrix(sinkhorn.hard(GAINS, [1, 1, 2])) if method == "hard" else matrix()
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(6, 3))
    rewards[rng.random((6, 3)) < missing] = np.nan
    terms = W.terms(rewards)
    assert terms.shape == (6, 3, 10)
    for i in range(3):  # reward i alone, the others at 0 but not missing
        alone = np.where(np.isnan(rewards) | (np.arange(3) == i), rewards, 0.0)
        np.testing.assert_array_equal(terms[:, i], W.mix(alone))
    # A sum of m products in another order, each with a few roundings.
    np.testing.assert_allclose(terms.sum(1), W.mix(rewards), rtol=0, atol=100 * np.finfo(float).eps)
    some = ~np.isnan(rewards).all(1)
    assert (terms[some][np.isnan(rewards[some])] == 0).all()
    assert np.isnan(terms[~some]).all()
    with_torch = W.terms(torch.tensor(rewards))
    np.testing.assert_allclose(with_torch, terms, rtol=1e-12)
    assert W.terms(torch.tensor(rewards, dtype=torch.float32)).dtype == torch.float32


def test_bfloat16_sigmas_find_their_columns_on_a_fine_grid() -> None:
    grid = schedule.from_shift(50)
    W = WeightMatrix(("a",), grid, np.full((1, 50), 0.02), [1.0])
    rounded = torch.tensor(grid[1:], dtype=torch.bfloat16)
    nearest = np.abs(rounded.double().numpy()[:, None] - grid[1:]).argmin(1)
    assert W.columns(rounded).tolist() == nearest.tolist()


def test_nan_keeps_the_column_scale_of_the_row_ablation() -> None:
    W = matrix(sinkhorn.row(GAINS, [1, 1, 2]))
    mixed = W.mix(np.array([[np.nan, 1.0, 1.0]]))
    np.testing.assert_allclose(mixed[0], 10 * W.matrix.sum(0))


def test_the_file_keeps_every_bit(tmp_path: Path) -> None:
    W = WeightMatrix(("clip", "hps", "ocr"), GRID, matrix().matrix, matrix().budget, "sinkhorn", {"tau": 1.0})
    again = WeightMatrix.load(W.save(tmp_path / "weights.json"))
    np.testing.assert_array_equal(again.matrix, W.matrix)
    np.testing.assert_array_equal(again.budget, W.budget)
    assert (again.rewards, again.method, dict(again.info)) == (W.rewards, W.method, dict(W.info))


def test_with_masses_a_step_is_mixed_by_w_over_nu() -> None:
    """Two rewards, two steps, by hand: ν = (1/4, 3/4)."""
    W = WeightMatrix(("a", "b"), [0, 0.5, 1], [[0.2, 0.3], [0.05, 0.45]], [0.5, 0.5], nu=[2, 6])
    np.testing.assert_allclose(W.nu, [0.25, 0.75])
    np.testing.assert_allclose(W.factors, [[0.8, 0.4], [0.2, 0.6]])
    np.testing.assert_allclose(W.mix([[1.0, 3.0]]), [[1.4, 2.2]])
    np.testing.assert_allclose(W.terms([[1.0, 3.0]]), [[[0.8, 0.4], [0.6, 1.8]]])
    np.testing.assert_allclose(W.mix([[1.0, 3.0]], sigmas=[[1.0, 0.5, 1.0]]), [[2.2, 1.4, 2.2]])
    np.testing.assert_allclose(W.mix([[np.nan, 3.0]]), [[3.0, 3.0]])
    np.testing.assert_allclose(W.realized(), [0.5, 0.5])
    np.testing.assert_allclose(W.realized([1, 0]), [0.8, 0.2])
    assert W.mix(torch.tensor([[1.0, 3.0]])).numpy() == pytest.approx(np.array([[1.4, 2.2]]))


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_columns_that_sum_to_their_masses_mix_to_means(seed: int, missing: float) -> None:
    rng = np.random.default_rng(seed)
    nu = rng.dirichlet(np.ones(10))
    nu[rng.integers(10)] = 0.0
    W = WeightMatrix(
        ("clip", "hps", "ocr"), GRID, sinkhorn.project(GAINS, [1, 1, 2], nu).weights, [0.25, 0.25, 0.5], nu=nu
    )
    np.testing.assert_allclose(W.factors.sum(0), 1, atol=1e-6)
    np.testing.assert_array_equal(W.factors[:, nu == 0], np.repeat(W.budget[:, None], (nu == 0).sum(), 1))
    rewards = np.full((6, 3), 0.7)
    rewards[rng.random((6, 3)) < missing] = np.nan
    mixed = W.mix(rewards)
    none = np.isnan(rewards).all(1)
    np.testing.assert_allclose(mixed[~none], 0.7, atol=1e-6)
    assert np.isnan(mixed[none]).all()
    np.testing.assert_allclose(W.terms(rewards).sum(1)[~none], mixed[~none], atol=1e-12)


def test_uniform_masses_on_any_scale_are_none_to_the_last_bit(tmp_path: Path) -> None:
    W, rewards = matrix(), np.random.default_rng(1).normal(size=(5, 3))
    same = WeightMatrix(W.rewards, GRID, W.matrix, W.budget, nu=np.full(10, 0.3))
    assert W.uniform
    assert same.uniform
    np.testing.assert_array_equal(W.factors, W.matrix * 10)
    np.testing.assert_array_equal(same.mix(rewards), rewards @ (W.matrix * 10))
    np.testing.assert_array_equal(same.terms(rewards), W.terms(rewards))
    assert same.save(tmp_path / "a.json").read_bytes() == W.save(tmp_path / "b.json").read_bytes()
    assert '"version": 1' in (tmp_path / "a.json").read_text()
    assert '"nu"' not in (tmp_path / "a.json").read_text()


def test_the_scale_of_the_masses_does_not_matter() -> None:
    nu = np.random.default_rng(2).gamma(1.0, size=10)
    made = sinkhorn.project(GAINS, [1, 1, 2], nu).weights
    one, other = (WeightMatrix(matrix().rewards, GRID, made, made.sum(1), nu=scale * nu) for scale in (1e-6, 1e6))
    np.testing.assert_allclose(one.factors, other.factors, rtol=1e-14)


def test_a_file_with_masses_keeps_every_bit_and_is_refused_by_an_older_release(tmp_path: Path) -> None:
    nu = np.random.default_rng(2).gamma(1.0, size=10)
    made = sinkhorn.project(GAINS, [1, 1, 2], nu).weights
    W = WeightMatrix(matrix().rewards, GRID, made, [0.25, 0.25, 0.5], nu=nu)
    path = W.save(tmp_path / "weights.json")
    again = WeightMatrix.load(path)
    np.testing.assert_array_equal(again.nu, W.nu)
    np.testing.assert_array_equal(again.factors, W.factors)
    assert again.save(tmp_path / "again.json").read_bytes() == path.read_bytes()
    with pytest.raises(RecastError, match="version 2 of recast.weights is not the version 1 this package reads"):
        artifact.read(path, "recast.weights")
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(RecastError, match="version 3 of recast.weights is not the version 1 to 2"):
        WeightMatrix.load(path)
    path.write_text(path.read_text().replace('"version": 3', '"version": 2').replace('"nu"', '"mu"'))
    with pytest.raises(RecastError, match="the field mu is unknown"):
        WeightMatrix.load(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in ("mu", "checksum")}))
    with pytest.raises(RecastError, match="the field nu belongs to version 2 of the format, and only to it"):
        WeightMatrix.load(path)


def test_matched_has_columns_instead_of_rows() -> None:
    made = [[0.4, 0.1], [0.1, 0.4]]
    W = WeightMatrix(("a", "b"), [0, 0.5, 1], made, [0.25, 0.75], "matched-reversed")
    np.testing.assert_allclose(W.realized(), [0.5, 0.5])
    for method in ("sinkhorn", "row", "reversed"):
        with pytest.raises(RecastError, match="rows of W must sum to the budget, but one is off by 0.25"):
            WeightMatrix(("a", "b"), [0, 0.5, 1], made, [0.25, 0.75], method)
    with pytest.raises(RecastError, match="columns of W by method 'matched' must sum to nu, but one is off by 0.25"):
        WeightMatrix(("a", "b"), [0, 0.5, 1], made, [0.5, 0.5], "matched", nu=[1, 3])


def test_bad_input_is_named(tmp_path: Path) -> None:
    W = matrix()
    for call, words in (
        (lambda: W.mix(np.ones((4, 2))), "one column each for clip, hps, ocr, not \\(4, 2\\)"),
        (lambda: W.mix(np.ones((4, 3)), sigmas=np.ones((3, 2))), r"\(4, slots\)"),
        (lambda: W.mix(np.ones((1, 3)), sigmas=np.array([[0.5, 1.5]])), "one is 1.5"),
        (lambda: W.columns(torch.tensor([float("nan")])), "one is nan"),
        (lambda: matrix(-W.matrix), "non-negative"),
        (lambda: WeightMatrix(("a",), GRID, W.matrix[:1], [W.budget[0] + 1e-5]), "sum to the budget"),
        (lambda: WeightMatrix(("a",), GRID, W.matrix, W.budget), r"\(1, 10\)"),
        (lambda: WeightMatrix(("a",), [0, 0.5, 1], [[0.5, 0.5]], [1], nu=[1, 2, 3]), "nu must have 2 numbers"),
        (lambda: WeightMatrix(("a",), [0, 0.5, 1], [[0.5, 0.5]], [1], nu=[1, -2]), "nu must be non-negative"),
        (lambda: WeightMatrix(("a",), [0, 0.5, 1], [[0.5, 0.5]], [1], nu=[1, np.nan]), "nu must be .*finite"),
        (
            lambda: WeightMatrix(("a",), [0, 0.5, 1], [[0.5, 0.5]], [1], nu=[1, 0]),
            "W must be 0 at the steps where nu is 0",
        ),
        (lambda: W.realized([1, 2]), "effect must have 10 numbers"),
    ):
        with pytest.raises(RecastError, match=words):
            call()
    path = W.save(tmp_path / "weights.json")
    path.write_text(path.read_text().replace('"matrix"', '"matrxi"'))
    with pytest.raises(RecastError, match=r"weights.json: the field (matrix is missing|matrxi is unknown)"):
        WeightMatrix.load(path)
