"""Time of one Sinkhorn solve compared with POT's `sinkhorn_log`, and of 1,000 budgets solved together.

    python benchmarks/sinkhorn.py

m = 4 rewards, T = 25 steps, tolerance 1e-9, medians over many solves of the same problems in one run; only the ratios
are reported. The results are written to results/sinkhorn.json next to this file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ot

from recast.core import artifact, renyi, sinkhorn

RESULTS = Path(__file__).parent / "results"
REWARDS, STEPS, TOLERANCE, BUDGETS = 4, 25, 1e-9, 1000


def median(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call in seconds, after one warm-up call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Measure the ratios, print them and write them to a file."""
    rng = np.random.default_rng(0)
    ours, theirs, batched, gaps = [], [], [], []
    for _ in range(10):
        gains = rng.gamma(2.0, size=(REWARDS, STEPS))
        lam, nu = rng.dirichlet(np.ones(REWARDS)), np.full(STEPS, 1 / STEPS)
        budgets = rng.dirichlet(np.ones(REWARDS), BUDGETS)
        cost = -renyi.normalized(gains)

        def solve(gains: np.ndarray = gains, lam: np.ndarray = lam) -> np.ndarray:
            return sinkhorn.project(gains, lam, tol=TOLERANCE).weights

        def with_pot(lam: np.ndarray = lam, nu: np.ndarray = nu, cost: np.ndarray = cost) -> np.ndarray:
            return np.asarray(ot.bregman.sinkhorn_log(lam, nu, cost, 1.0, stopThr=TOLERANCE, numItermax=1000))

        def together(gains: np.ndarray = gains, budgets: np.ndarray = budgets) -> np.ndarray:
            return sinkhorn.project_many(gains, budgets, tol=TOLERANCE).weights

        gaps.append(float(np.abs(solve() - with_pot()).max()))
        ours.append(median(solve, 200))
        theirs.append(median(with_pot, 50))
        batched.append(median(together, 20))
    pot_ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    batch_ratio = statistics.median(b / a for a, b in zip(ours, batched, strict=True))
    print(f"one solve: {1e3 * statistics.median(ours):.3f} ms, POT {1e3 * statistics.median(theirs):.3f} ms")
    print(f"POT takes {pot_ratio:.1f} times as long as one solve (largest difference of W {max(gaps):.1e})")
    print(f"{BUDGETS} budgets together take {batch_ratio:.1f} times as long as one")
    artifact.write(
        RESULTS / "sinkhorn.json",
        "recast.benchmark.sinkhorn",
        {"pot_over_ours": pot_ratio, "thousand_budgets_over_one": batch_ratio, "largest_difference": max(gaps)},
    )


if __name__ == "__main__":
    main()
