"""Error of gain curves and of W against the number of velocity evaluations, for `coupled` and the paper's Alg. 1.

    python benchmarks/estimator.py            # about seven minutes on two cores
    python benchmarks/estimator.py --quick    # a rough version, about a minute

Mixtures in 2, 32 and 256 dimensions, 20 prompts, N = 8 proposals per prompt, T = 25 on SD3's grid, α = 2.
Both estimators use the same proposals, and errors are relative to the exact conditional rewards at them. Each
setting is repeated with independent seeds, and the error is the root mean square over repeats and steps.
The paper's error has two parts, the noise of rollouts and the bias of plain ancestral steps on the grid;
`variance × evaluations` compares the noise only. The results are written to results/estimator.json next to
this file, and the figure to docs/images.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from recast import estimate
from recast.core import artifact, renyi, schedule, sinkhorn
from recast.flow.mixture import score_all
from recast.flow.mixture_prompts import REWARDS, MixturePrompt, exact_mu, mixture_prompt

RESULTS = Path(__file__).parent / "results"
DIMENSIONS = (2, 32, 256)
PROMPTS, SAMPLES, STEPS = 20, 8, 25
REFERENCE = "paper K=16"
# Name, options of the estimator, number of proposals; fewer than 8 proposals cost less than one noising of each.
SETTINGS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("paper K=1", {"estimator": "paper", "repeats": 1}, 8),
    ("paper K=4", {"estimator": "paper", "repeats": 4}, 8),
    (REFERENCE, {"estimator": "paper", "repeats": 16}, 8),
    ("coupled 1/4", {"noisings": 1}, 2),
    ("coupled 1/2", {"noisings": 1}, 4),
    ("coupled 1", {"noisings": 1}, 8),
    ("coupled 2", {"noisings": 2}, 8),
    ("coupled 4", {"noisings": 4}, 8),
    ("coupled 8", {"noisings": 8}, 8),
    ("coupled 16", {"noisings": 16}, 8),
)


def curves(moments: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Normalized gains (m, T) and W (m, T) for a uniform budget, from the moments of each prompt."""
    D = np.log(np.maximum(np.stack(moments), renyi.FLOOR)).mean(0)
    gains = renyi.gains(D)
    return renyi.normalized(gains), sinkhorn.project(gains, np.ones(len(gains))).weights


@dataclass(frozen=True)
class Problem:
    """Mixtures of one dimension, their proposals, and the exact normalized gains and W."""

    mixtures: list[MixturePrompt]
    proposals: list[Tensor]
    gains: np.ndarray
    weights: np.ndarray


def problem(dimension: int) -> Problem:
    """Seeded mixtures of one dimension, and their exact curves."""
    mixtures = [mixture_prompt(dimension, 6, seed=j) for j in range(PROMPTS)]
    proposals = [each.proposal.sample(SAMPLES, torch.Generator().manual_seed(j)) for j, each in enumerate(mixtures)]
    levels = schedule.from_shift(STEPS).tolist()
    pairs = enumerate(zip(mixtures, proposals, strict=True))
    gains, weights = curves([exact_mu(each, x, levels, 2048, j).mean(-1) for j, (each, x) in pairs])
    return Problem(mixtures, proposals, gains, weights)


def measure(given: Problem, options: dict[str, Any], samples: int, repeats: int, title: str) -> dict[str, Any]:
    """RMSE of the normalized gains per reward and of W (times mT), the noise of the gains, and the cost."""
    sigmas = schedule.from_shift(STEPS)
    gains, weights = [], []
    evaluations = 0
    for repeat in track(range(repeats), description=title):
        evaluations, moments = 0, []
        for j, (mixture, clean) in enumerate(zip(given.mixtures, given.proposals, strict=True)):
            found = estimate.rollouts(
                mixture.policy,
                clean[:samples],
                sigmas,
                score_all(list(mixture.rewards)),
                seed=1_000_003 * repeat + j,
                **options,
            )
            evaluations += found.evaluations
            moments.append(found.mu.mean(-1))
        found_gains, found_weights = curves(moments)
        gains.append(found_gains)
        weights.append(found_weights * found_weights.size)
    table = np.stack(gains)
    return {
        "evaluations": evaluations,
        "gains": np.sqrt(((table - given.gains) ** 2).mean((0, 2))).tolist(),
        "noise": np.sqrt(table.var(axis=0, ddof=1).mean(1)).tolist(),
        "W": float(np.sqrt(np.mean((np.stack(weights) - given.weights * given.weights.size) ** 2))),
    }


def saving(cells: dict[str, dict[str, Any]], errors: dict[str, float]) -> tuple[float, bool]:
    """Ratio of evaluations that `coupled` saves at the reference's error, and whether it is a lower bound.

    It is interpolated between settings in log-log; if the cheapest setting already has a smaller error than the
    reference, its own saving is returned as a lower bound.
    """
    target, full = errors[REFERENCE], cells[REFERENCE]["evaluations"]
    points = [(cells[name]["evaluations"], errors[name]) for name, _, _ in SETTINGS if name.startswith("coupled")]
    if points[0][1] <= target:
        return full / points[0][0], True
    for (cost_a, error_a), (cost_b, error_b) in zip(points[:-1], points[1:], strict=True):
        if error_b <= target < error_a:
            share = math.log(error_a / target) / math.log(error_a / error_b)
            return full / math.exp(math.log(cost_a) + share * math.log(cost_b / cost_a)), False
    return math.nan, False  # no setting reaches the error; NaN propagates to every mean


def mean_ratio(ratios: list[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def draw(table: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Log-log figure: one panel per dimension, rewards by color, estimators by line style."""
    from matplotlib.figure import Figure

    from recast.report.figures import COLORS

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(table), sharey=True)
    for panel, (dimension, cells) in zip(axes, table.items(), strict=True):
        for i, reward in enumerate((*REWARDS, "W")):
            for kind, style in (("coupled", "-o"), ("paper", "--s")):
                rows = [cells[name] for name, _, _ in SETTINGS if name.startswith(kind)]
                errors = [row["W"] if reward == "W" else row["gains"][i] for row in rows]
                label = f"{reward}, {kind}" if dimension == next(iter(table)) else None
                cost = [row["evaluations"] for row in rows]
                panel.loglog(cost, errors, style, color=COLORS[i], markersize=3.5, linewidth=1.2, label=label)
        panel.set_title(f"{dimension} dimensions")
        panel.set_xlabel("velocity evaluations")
        panel.grid(alpha=0.3, which="both", linewidth=0.4)
    axes[0].set_ylabel("RMSE of normalized gains, and of mT·W")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    """Measure the results, print them and write them to files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 repeats, 2 and 32 dimensions, no files")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # the batches are small
    table: dict[str, dict[str, dict[str, Any]]] = {}
    savings: dict[str, float] = {}
    floors: list[str] = []
    efficiency: dict[str, float] = {}
    for dimension in DIMENSIONS[:2] if quick else DIMENSIONS:
        given = problem(dimension)
        cells = {
            name: measure(given, options, samples, 2 if quick else 8, f"{dimension}-d {name}")
            for name, options, samples in SETTINGS
        }
        table[str(dimension)] = cells
        for i, reward in enumerate(REWARDS):
            product = [cells[name]["evaluations"] * cells[name]["noise"][i] ** 2 for name in (REFERENCE, "coupled 4")]
            efficiency[f"{dimension}-d {reward}"] = product[0] / product[1]
        for i, reward in enumerate((*REWARDS, "W")):
            errors = {name: cell["W"] if reward == "W" else cell["gains"][i] for name, cell in cells.items()}
            key = f"{dimension}-d {reward}"
            savings[key], at_least = saving(cells, errors)
            floors += [key] if at_least else []
            row = "  ".join(f"{name} {error:.3f}" for name, error in errors.items())
            print(f"{key:12s} {'at least ' if at_least else ''}{savings[key]:.1f} times fewer evaluations   {row}")
    by_kind = {
        "gains": mean_ratio([value for key, value in savings.items() if not key.endswith("W")]),
        "W": mean_ratio([value for key, value in savings.items() if key.endswith("W")]),
        "noise alone": mean_ratio(list(efficiency.values())),
    }
    print("variance × evaluations, paper over coupled:", {key: round(value, 1) for key, value in efficiency.items()})
    print("geometric mean:", ", ".join(f"{kind} {value:.1f}" for kind, value in by_kind.items()))
    if quick:
        return
    summary = {
        "savings": savings,
        "lower_bounds": floors,
        "variance_times_evaluations": efficiency,
        "geometric_mean": by_kind,
        "table": table,
    }
    artifact.write(RESULTS / "estimator.json", "recast.benchmark.estimator", summary)
    draw(table, Path(__file__).parents[1] / "docs/images/estimator.png")


if __name__ == "__main__":
    main()
