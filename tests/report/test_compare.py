"""The comparison of runs on the paper's own tables, and on runs whose answers are known."""

import numpy as np
import pytest
from scipy.stats import binom

import paper_results as paper
from recast.errors import RecastError
from recast.report import compare
from recast.report.compare import AGGREGATE, Run


def printed(stage: str) -> list[Run]:
    """The per-budget tables as runs of one seed: their entries are means over three."""
    names = paper.TRAINED[stage]
    runs = []
    for budget, rewards, panel in zip(paper.BUDGETS, paper.REWARDS[stage], paper.PANELS[stage], strict=True):
        for k, method in enumerate(("static", "sinkhorn")):
            means = dict(zip(names, rewards[k][1:], strict=True)) | dict(zip(paper.HELD_OUT, panel[k], strict=True))
            runs.append(Run(method, tuple(zip(names, map(float, budget), strict=True)), 0, means))
    return runs


def test_the_papers_pooled_means_come_back() -> None:
    """33 of 36 to the last printed digit; the entries they are computed from are rounded, which moves three by a unit.

    0.3036 is 0.304 and printed as 0.303, 1.4214 as 1.422, 8.014 as 8.02.
    """
    units = {}
    for stage in ("ocr", "geneval"):
        runs = printed(stage)
        for name, entry in paper.POOLED[stage].items():
            places = 2 if name == "hpsv3" else 3
            for method, mean in zip(("static", "sinkhorn"), entry, strict=True):
                found = round(compare.pool(compare.of(runs, method), name).mean, places)
                units[stage, name, method] = round((found - mean) * 10**places)
    assert len(units) == 36
    assert {key: gap for key, gap in units.items() if gap} == {
        ("ocr", "hpsv2", "sinkhorn"): 1,
        ("ocr", "imagereward", "static"): -1,
        ("geneval", "hpsv3", "static"): -1,
    }


@pytest.mark.parametrize("stage", ["ocr", "geneval"])
def test_the_papers_aggregates_are_the_weighted_sums(stage: str) -> None:
    for method, k in (("static", 0), ("sinkhorn", 1)):
        for run, row in zip(compare.of(printed(stage), method), paper.REWARDS[stage], strict=True):
            assert run.aggregate == pytest.approx(row[k][0], abs=0.0031)


def test_nineteen_of_the_papers_twenty_pareto_entries() -> None:
    """At the printed precision static weakly dominates the GenEval budget (1, 1, 1, 2), which is printed as mixed."""
    agree = []
    for (kind, stage), expected in paper.DOMINANCE.items():
        names = paper.TRAINED[stage] if kind == "rewards" else paper.HELD_OUT
        for k, (ours, static) in enumerate(compare.pairs(printed(stage), "sinkhorn", "static")):
            found = compare.pareto(ours.means, static.means, names)
            agree.append(found == expected[k])
            if not agree[-1]:
                assert (kind, stage, paper.BUDGETS[k], found) == ("rewards", "geneval", (1, 1, 1, 2), "second")
    assert sum(agree) == 19
    assert len(agree) == 20


def test_the_papers_decomposition_of_the_ablation() -> None:
    runs = [
        Run(method, (("r", float(k)),), 0, {"r": value / k})
        for method, row in paper.ABLATION.items()
        for k, value in enumerate(row, start=1)
    ]
    kernel, projection = compare.decompose(runs)
    assert kernel == pytest.approx(paper.KERNEL, abs=5e-4)
    assert projection == pytest.approx(paper.PROJECTION, abs=5e-4)
    assert kernel + projection == pytest.approx(paper.TOTAL, abs=5e-4)


B1, B2 = (("a", 1.0), ("b", 1.0)), (("a", 2.0), ("b", 1.0))


def run(method: str, budget: compare.Budget, seed: int, a: float, b: float) -> Run:
    return Run(method, budget, seed, {"a": a, "b": b})


def test_pooling_averages_budgets_within_a_seed_and_then_seeds() -> None:
    runs = [run("m", B1, 0, 1, 0), run("m", B2, 0, 3, 0), run("m", B1, 1, 5, 0), run("m", B2, 1, 7, 0)]
    assert compare.pool(runs, "a") == compare.Pooled(4.0, pytest.approx(np.sqrt(8)))
    assert compare.pool(runs, AGGREGATE).mean == pytest.approx(np.mean([1, 6, 5, 14]))
    assert np.isnan(compare.pool(runs[:2], "a").std)
    with pytest.raises(RecastError, match="the seeds were run at different budgets"):
        compare.pool(runs[:3], "a")


def test_the_spread_of_a_difference_is_that_of_the_seed_level_differences() -> None:
    """Two seeds whose methods move in opposite directions: ± is larger than that of either method, not their root."""
    ours = [run("x", B1, 0, 1, 0), run("x", B2, 0, 3, 0), run("x", B1, 1, 5, 0), run("x", B2, 1, 9, 0)]
    static = [run("y", B1, 0, 4, 0), run("y", B2, 0, 4, 0), run("y", B1, 1, 0, 0), run("y", B2, 1, 2, 0)]
    matched = compare.pairs([*ours, *static], "x", "y")
    # by seed: 2 − 4 = −2 and 7 − 1 = 6
    assert compare.seed_difference(matched, "a") == compare.Pooled(2.0, pytest.approx(np.sqrt(32)))
    assert compare.pool(ours, "a").std == pytest.approx(np.sqrt(12.5))
    assert compare.pool(static, "a").std == pytest.approx(np.sqrt(4.5))
    # Σ λ r by seed: (1 + 2·3 − 4 − 2·4) / 2 = −2.5 and (5 + 2·9 − 0 − 2·2) / 2 = 9.5
    assert compare.seed_difference(matched, AGGREGATE) == compare.Pooled(3.5, pytest.approx(np.sqrt(72)))
    assert np.isnan(compare.seed_difference(matched[:1], "a").std)
    assert np.isnan(compare.seed_difference([], "a").mean)
    with pytest.raises(RecastError, match="the seeds were run at different budgets"):
        compare.seed_difference(matched[:3], "a")


def test_wins_count_matched_pairs_and_not_ties() -> None:
    runs = [run("x", B1, 0, 1, 2), run("x", B2, 0, 1, 1), run("x", B1, 1, 9, 9)]
    runs += [run("y", B1, 0, 1, 1), run("y", B2, 0, 2, 0), run("y", B2, 1, 0, 0)]
    matched = compare.pairs(runs, "x", "y")
    assert [(first.budget, first.seed) for first, _ in matched] == [(B1, 0), (B2, 0)]
    assert compare.wins(matched, "a") == (0, 2)
    assert compare.wins(matched, "b") == (2, 2)
    assert compare.wins(matched, AGGREGATE) == (1, 2)


@pytest.mark.parametrize(
    ("first", "second", "dominance"),
    [
        ((1, 1), (1, 1), "equal"),
        ((1, 2), (1, 1), "first"),
        ((1, 1), (1, 2), "second"),
        ((2, 1), (1, 2), "mixed"),
    ],
)
def test_pareto(first: tuple[int, int], second: tuple[int, int], dominance: str) -> None:
    a, b = ({"a": float(x), "b": float(y)} for x, y in (first, second))
    assert compare.pareto(a, b, ("a", "b")) == dominance


def noisy(method: str, seed: int, shift: float, held_out: float = 0.0, images: int = 400) -> Run:
    """Scores of 400 prompts that differ much, the same for every method, and by a little from method to method."""
    prompts = np.random.default_rng(0).normal(0, 5, images)
    noise = np.random.default_rng([1, seed, *method.encode()]).normal(0, 0.5, (2, images))
    values = {"a": prompts + shift + noise[0], "held-out": prompts + held_out + noise[1]}
    return Run(method, (("a", 1.0),), seed, {name: float(row.mean()) for name, row in values.items()}, values)


def test_images_of_one_prompt_are_drawn_together() -> None:
    """Four copies of an image say no more than one: the interval is that of the prompts."""
    gaps = np.random.default_rng(0).normal(size=30)
    budget = (("a", 1.0),)

    def interval(values: np.ndarray, prompts: tuple[str, ...] | None) -> tuple[float, float]:
        runs = [Run("x", budget, 0, {"a": each.mean()}, {"a": each}, prompts) for each in (values, 0 * values)]
        found = compare.difference([(runs[0], runs[1])], "a")
        return found.low, found.high

    texts = tuple(f"prompt {k}" for k in range(30))
    once = interval(gaps, texts)
    assert once == interval(gaps, None)
    assert interval(np.tile(gaps, 4), texts * 4) == pytest.approx(once)
    narrow = interval(np.tile(gaps, 4), None)
    assert narrow[1] - narrow[0] < 0.6 * (once[1] - once[0])


def test_the_bootstrap_is_paired_and_covers() -> None:
    """Prompts spread by 5, pairs by 0.7: unpaired, a shift of 0.1 would drown."""
    matched = [(noisy("x", seed, 0.1), noisy("y", seed, 0.0)) for seed in range(3)]
    found = compare.difference(matched, "a")
    spread = np.sqrt(0.5 / 3 / 400)
    assert found.mean == pytest.approx(0.1, abs=3 * spread)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * spread, rel=0.15)
    assert found.p == pytest.approx(2 * binom.cdf(0, 3, 0.5)) == 0.25
    assert compare.difference(matched, "a") == found


def test_images_where_a_reward_does_not_apply_drop_out() -> None:
    first, second = noisy("x", 0, 1.0), noisy("y", 0, 0.0)
    assert first.values is not None
    first.values["a"][:200] = np.nan
    expected = (first.values["a"] - second.column("a"))[200:].mean()
    assert compare.difference([(first, second)], "a").mean == pytest.approx(expected)


def test_the_alarm_rings_when_rewards_rise_and_held_out_ones_fall() -> None:
    runs = [
        noisy("base", 0, 0.0),
        noisy("hacked", 0, 1.0, -0.5),
        noisy("good", 0, 1.0, 0.5),
        noisy("flat", 0, 0.0, -0.5),
    ]
    sentences = compare.hacking(runs, ["held-out"])
    assert len(sentences) == 1
    assert sentences[0].startswith("hacked raises its training rewards by")
    assert "the held-out reward held-out falls by" in sentences[0]
    assert compare.hacking(runs[1:], ["held-out"]) == []
