"""What one shared π⁺ does to the curves and to W (App. A.3 and F), where the positive policy of each reward is known.

    python benchmarks/surrogate.py    # about a minute

The exact world of recipes/mixture.yaml (20 mixtures, 32 dimensions, T = 25, α = 2). Every curve is exact up to
sampling: conditional rewards in closed form at 2,048 noised samples per prompt and level. `own`: each reward's samples
come from its own positive policy π_i⁺ ∝ r_i·π, as the theory asks. `shared`: all come from one generator, the
positive policy of `mode`, of `mixed` (the recipe's) or of `fine`. The distance of normalized gains is the mean absolute
difference (their mean is 1), that of W is the L1 norm (at most 2). The bound of App. A.3 uses KL(π⁺‖π_i⁺) and R_i/Z_i
of the samples, averaged over prompts. Writes results/surrogate.json next to this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from recast import GainCurves, weigh
from recast.core import artifact, bounds, schedule
from recast.flow.mixture import GaussianMixture
from recast.flow.mixture_prompts import REWARDS, MixturePrompt, exact_mu, mixture_prompt

RESULTS = Path(__file__).parent / "results"
EQUAL = dict.fromkeys(REWARDS, 1.0)
DIMENSION, MODES, PROMPTS, STEPS, SAMPLES, NOISINGS = 32, 6, 20, 25, 256, 8


def curves(worlds: list[MixturePrompt], generators: list[list[GaussianMixture]]) -> GainCurves:
    """Curves whose row i uses samples of the generator i of each prompt."""
    sigmas, found = schedule.from_shift(STEPS).tolist(), []
    for k, (world, each) in enumerate(zip(worlds, generators, strict=True)):
        rows = []
        for i, generator in enumerate(each):
            clean = generator.sample(SAMPLES, torch.Generator().manual_seed(k))
            rows.append(exact_mu(world, clean, sigmas, NOISINGS, seed=k)[i])
        found.append(np.stack(rows))
    return GainCurves.from_mu(REWARDS, sigmas, np.stack(found))


def bound(worlds: list[MixturePrompt], number: int, total: np.ndarray) -> bounds.SurrogateBounds:
    """The bounds of App. A.3 for the positive policy of one reward in place of all."""
    mismatch, ratio = np.zeros((2, len(REWARDS)))
    for k, world in enumerate(worlds):
        positive = [reward.positive() for reward in world.rewards]
        x = positive[number].sample(SAMPLES, torch.Generator().manual_seed(k))
        own = world.policy.sample(SAMPLES, torch.Generator().manual_seed(k))
        for i, reward in enumerate(world.rewards):
            mismatch[i] += float((positive[number].log_density(x) - positive[i].log_density(x)).mean()) / PROMPTS
            scores = reward(torch.cat([own, x]))
            ratio[i] += float(scores.max() / reward(own).mean()) / PROMPTS
    return bounds.surrogate(mismatch.clip(0), ratio, 1.0, total, STEPS)


def main() -> None:
    """Measure and print the distances."""
    worlds = [mixture_prompt(DIMENSION, MODES, seed) for seed in range(PROMPTS)]
    positive = [[reward.positive() for reward in world.rewards] for world in worlds]
    own = curves(worlds, positive)
    W = weigh(own, EQUAL)
    results: dict[str, Any] = {}
    for number, name in enumerate(REWARDS):
        shared = curves(worlds, [[each[number]] * len(REWARDS) for each in positive])
        gap = np.abs(shared.normalized() - own.normalized()).mean(1)
        limit = bound(worlds, number, own.total)
        results[name] = {
            "normalized": dict(zip(REWARDS, gap.round(4).tolist(), strict=True)),
            "W": round(float(np.abs(weigh(shared, EQUAL).matrix - W.matrix).sum()), 4),
            "eta": dict(zip(REWARDS, limit.eta.round(3).tolist(), strict=True)),
            "bound on W": None if not limit.holds else round(limit.weights, 4),
        }
        print(name, results[name])
    static = float(np.abs(weigh(own, EQUAL, "static").matrix - W.matrix).sum())
    print("static", static)
    found = {"own positive policy": results, "static W": round(static, 4), "samples": SAMPLES * NOISINGS}
    artifact.write(RESULTS / "surrogate.json", "recast.benchmark", found)


if __name__ == "__main__":
    main()
