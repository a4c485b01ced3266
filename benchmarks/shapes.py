"""Gain curves of the embedded world: where each reward peaks, whether seeds agree, and what coupling saves.

    python benchmarks/shapes.py

T = 10, 16 prompts of the validation split, N = 8 proposals, α = 2, on the shipped base. Three parts: two seeds
with the renderer's images as π⁺; two with the policy's own (App. B.3); and both estimators eight times over the
same images at equal velocity evaluations. Writes results/shapes.json beside this file and the figure that
docs/shapes.md shows. About half an hour on one core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from recast import config
from recast.core import artifact
from recast.core.curves import GainCurves
from recast.estimate import rollouts
from recast.flow import sd3
from recast.flow.generate import generate
from recast.flow.policy import conditioned
from recast.report import figures
from recast.rewards import base
from recast.shapes import prompts, render

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs/images"
REWARDS = ("composition", "alignment", "detail", "background")
STEPS, PROMPTS, SAMPLES, NOISINGS, REPEATS = 10, 16, 8, 4, 8
EQUAL: dict[str, dict[str, Any]] = {"coupled": {"noisings": 6}, "paper": {"repeats": 10}}
"""Settings of the two estimators at which they take the same velocity evaluations, to half a percent."""


class World:
    """The shipped base, the trained rewards and sixteen prompts."""

    def __init__(self) -> None:
        self.policy = sd3.load(config.policy(model="shapes"))
        self.judges = {name: base.load(name) for name in REWARDS}
        self.rows = prompts.load("validation")[:PROMPTS]
        self.sigmas = self.policy.sigmas(STEPS)
        self.conditions = [self.policy.condition([row["prompt"]]) for row in self.rows]

    def proposals(self, row: dict[str, Any], seed: int, self_rollout: bool) -> torch.Tensor:
        """Images of π⁺, the renderer, or of the policy itself."""
        if not self_rollout:
            return render.render([row] * SAMPLES, seed)
        seeds = range(seed * SAMPLES, (seed + 1) * SAMPLES)
        return generate(self.policy, [row["prompt"]] * SAMPLES, seeds, steps=STEPS)

    def mu(
        self, images_seed: int, noise_seed: int, self_rollout: bool = False, **options: Any
    ) -> tuple[np.ndarray, int]:
        """Conditional rewards (P, m, T+1, S) and the velocity evaluations they took."""
        tables, spent = [], 0
        for k, (row, condition) in enumerate(zip(self.rows, self.conditions, strict=True)):
            clean = self.policy.encode(self.proposals(row, 1000 * images_seed + k, self_rollout))

            def score(latents: torch.Tensor, text: str = row["prompt"]) -> np.ndarray:
                return base.score(self.judges, self.policy.decode(latents), [text] * len(latents))

            found = rollouts(
                conditioned(self.policy, condition), clean, self.sigmas, score, seed=1000 * noise_seed + k, **options
            )
            tables.append(found.mu)
            spent += found.evaluations
        return np.stack(tables), spent

    def curves(self, mu: np.ndarray, self_rollout: bool = False) -> GainCurves:
        """Gain curves over all prompts."""
        return GainCurves.from_mu(REWARDS, self.sigmas, mu, 2.0, self_rollout=self_rollout)


def agreement(first: GainCurves, second: GainCurves) -> list[float]:
    """Correlation of two runs' gains, reward by reward."""
    return [float(np.corrcoef(a, b)[0, 1]) for a, b in zip(first.gains, second.gains, strict=True)]


def seeds(world: World, self_rollout: bool) -> tuple[dict[str, Any], GainCurves]:
    """Two independent runs, other images and other noise, and the curves of both together."""
    runs = [world.mu(seed, seed, self_rollout, noisings=NOISINGS)[0] for seed in (1, 2)]
    first, second = (world.curves(mu, self_rollout) for mu in runs)
    pooled = world.curves(np.concatenate(runs, axis=-1), self_rollout)
    facts = {
        "correlation": agreement(first, second),
        "total": pooled.total.tolist(),
        "falls": [int((np.diff(row) > 1e-9).sum()) for row in pooled.D],
        "peak": (pooled.gains.argmax(1) + 1).tolist(),
        "mean_step": (pooled.normalized() @ np.arange(1, STEPS + 1) / STEPS).tolist(),
        "normalized": pooled.normalized().tolist(),
    }
    return facts, pooled


def variances(world: World) -> dict[str, Any]:
    """Variance of the gains over eight repeats on the same images, both estimators at equal cost."""
    gains: dict[str, list[np.ndarray]] = {"coupled": [], "paper": []}
    cost = {"coupled": 0, "paper": 0}
    for repeat in range(REPEATS):
        for estimator, options in EQUAL.items():
            mu, spent = world.mu(9, 100 + repeat, estimator=estimator, **options)
            gains[estimator].append(np.diff(world.curves(mu).D[:, ::-1], axis=1)[:, ::-1])
            cost[estimator] = spent
        print(f"repeat {repeat + 1} of {REPEATS}", flush=True)
    spread = {name: np.stack(values).var(axis=0, ddof=1).mean(axis=1) for name, values in gains.items()}
    mean = {name: np.stack(values).mean(axis=0) for name, values in gains.items()}
    return {
        "evaluations": cost,
        "variance_ratio": (spread["paper"] / spread["coupled"]).tolist(),
        "deviation": {name: np.sqrt(values).tolist() for name, values in spread.items()},
        "means_correlate": [
            float(np.corrcoef(a, b)[0, 1]) for a, b in zip(mean["coupled"], mean["paper"], strict=True)
        ],
    }


def main() -> None:
    """Measure, print, draw and write."""
    torch.set_num_threads(1)
    world = World()
    positive, curves = seeds(world, False)
    own, own_curves = seeds(world, True)
    print_table("seeds correlate, π+", positive["correlation"])
    print_table("seeds correlate, self", own["correlation"])
    print_table("mean step, π+", positive["mean_step"])
    print_table("total gain, π+", positive["total"])
    print_table("total gain, self", own["total"])
    sheet = figures.sampling_figure({"renderer as π⁺": curves, "self-rollouts": own_curves})
    figures.save(sheet, IMAGES / "shapes-gains", ("png",))
    spread = variances(world)
    print_table("variance, paper / coupled", spread["variance_ratio"])
    artifact.write(
        RESULTS / "shapes.json",
        "recast.benchmark.shapes",
        {"rewards": REWARDS, "sigmas": world.sigmas, "positive": positive, "self": own, "estimators": spread},
    )


def print_table(title: str, values: list[float]) -> None:
    """One line a quantity, one number a reward."""
    print(
        f"{title:28}" + "".join(f"{name:>13} {value:6.2f}" for name, value in zip(REWARDS, values, strict=True)),
        flush=True,
    )


if __name__ == "__main__":
    main()
