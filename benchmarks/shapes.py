"""Gain curves of the shapes world: where each reward peaks, whether seeds agree, and what coupling saves.

    python benchmarks/shapes.py [quality] [seeds] [estimators]

T = 10, 16 prompts of the validation split, N = 8 proposals, α = 2, on the shipped base. Three parts, all by default:
the rewards of the base on held-out prompts; two seeds with images of the renderer as π⁺, and two with the policy's own
images (App. B.3); both estimators eight times on the same images at nearly equal velocity evaluations. Writes
results/shapes.json next to this file and the figure of docs/shapes.md. About half an hour on one core.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recast import config
from recast.core import artifact, renyi
from recast.core.curves import GainCurves
from recast.estimate import rollouts
from recast.flow import families, sampling
from recast.flow.policy import conditioned
from recast.report import figures
from recast.rewards import base
from recast.shapes import prompts, render
from recast.shapes.pretrain import measure

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs/images"
REWARDS = ("composition", "alignment", "detail", "background")
STEPS, PROMPTS, SAMPLES, NOISINGS, REPEATS = 10, 16, 8, 4, 8
OWN = {"noisings": 1, "repeats": 16}
"""Self-rollouts square μ, so a single rollout would count its own noise as signal: K = 16, as in the paper."""
PARTS = ("quality", "seeds", "estimators")
EQUAL: dict[str, dict[str, Any]] = {"coupled": {"noisings": 6}, "paper": {"repeats": 10}}
"""Settings at which the two estimators take nearly the same number of velocity evaluations: the first 7 % more."""


class Setup:
    """The shipped base, its rewards and sixteen prompts."""

    def __init__(self) -> None:
        self.policy = families.load(config.policy(model="shapes"))
        self.models = {name: base.load(name) for name in REWARDS}
        self.rows = prompts.load("validation")[:PROMPTS]
        self.sigmas = self.policy.sigmas(STEPS)
        self.conditions = [self.policy.condition([row["prompt"]]) for row in self.rows]

    def clean(self, k: int, seed: int, self_rollout: bool) -> torch.Tensor:
        """Latents of π⁺ (the renderer), or of the policy by the sampler of its rollouts.

        Not by the sampler of training: the paper in its images is worse than in the rollouts, which would lower D.
        """
        if not self_rollout:
            return self.policy.encode(render.render([self.rows[k]] * SAMPLES, seed))
        generator = torch.Generator().manual_seed(seed)

        def noise(_level: int = 0) -> torch.Tensor:
            return torch.randn(SAMPLES, *self.policy.latent_shape, generator=generator)

        velocity = conditioned(self.policy, self.conditions[k])
        with torch.no_grad():
            levels = [*sampling.rollout_levels(self.sigmas), 1.0]
            return sampling.sample(velocity, noise(), levels, method="ancestral2", noise=noise)

    def mu(
        self, images_seed: int, noise_seed: int, self_rollout: bool = False, **options: Any
    ) -> tuple[np.ndarray, int]:
        """Conditional rewards (P, m, T+1, S), and the number of velocity evaluations."""
        tables, spent = [], 0
        for k, (row, condition) in enumerate(zip(self.rows, self.conditions, strict=True)):
            clean = self.clean(k, 1000 * images_seed + k, self_rollout)

            def score(latents: torch.Tensor, text: str = row["prompt"]) -> np.ndarray:
                return base.score(self.models, self.policy.decode(latents), [text] * len(latents))

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
    """Correlation per reward of the gains of two runs, before clipping, which would hide differences."""
    return [float(np.corrcoef(a, b)[0, 1]) for a, b in zip(raw(first), raw(second), strict=True)]


def raw(curves: GainCurves) -> np.ndarray:
    """Gains without clipping at 0."""
    return renyi.gains(curves.D, clip=False)


def seeds(setup: Setup, self_rollout: bool) -> tuple[dict[str, Any], GainCurves]:
    """Two runs with independent images and noise, and the curves of both together."""
    options = OWN if self_rollout else {"noisings": NOISINGS}
    runs, spent = zip(*(setup.mu(seed, seed, self_rollout, **options) for seed in (1, 2)), strict=True)
    first, second = (setup.curves(mu, self_rollout) for mu in runs)
    pooled = setup.curves(np.concatenate(runs, axis=-1), self_rollout)
    facts = {
        "evaluations": spent[0],
        "correlation": agreement(first, second),
        "total": pooled.total.tolist(),
        "below_zero": (pooled.D.min(1) - pooled.D[:, -1]).tolist(),
        "peak": (pooled.gains.argmax(1) + 1).tolist(),
        "mean_step": (pooled.normalized() @ np.arange(1, STEPS + 1) / STEPS).tolist(),
        "normalized": pooled.normalized().tolist(),
    }
    return facts, pooled


def variances(setup: Setup) -> dict[str, Any]:
    """Variance of the gains over eight repeats on the same images, for both estimators at equal cost."""
    gains: dict[str, list[np.ndarray]] = {"coupled": [], "paper": []}
    cost = {"coupled": 0, "paper": 0}
    for repeat in range(REPEATS):
        for estimator, options in EQUAL.items():
            mu, spent = setup.mu(9, 100 + repeat, estimator=estimator, **options)
            gains[estimator].append(raw(setup.curves(mu)))
            cost[estimator] = spent
        print(f"repeat {repeat + 1} of {REPEATS}", flush=True)
    spread = {name: np.stack(values).var(axis=0, ddof=1).mean(axis=1) for name, values in gains.items()}
    mean = {name: np.stack(values).mean(axis=0) for name, values in gains.items()}
    return {
        "evaluations": cost,
        "variance_ratio": (spread["paper"] / spread["coupled"]).tolist(),
        "deviation": {name: np.sqrt(values).tolist() for name, values in spread.items()},
        "mean": {name: values.tolist() for name, values in mean.items()},
        "means_differ": np.sqrt(((mean["coupled"] - mean["paper"]) ** 2).mean(axis=1)).tolist(),
        "means_correlate": [
            float(np.corrcoef(a, b)[0, 1]) for a, b in zip(mean["coupled"], mean["paper"], strict=True)
        ],
    }


def quality() -> dict[str, float]:
    """Mean rewards on held-out prompts, of the base with the sampler of training and of the renderer."""
    clip = files("recast.shapes").joinpath("data/clip")
    return measure("shapes", str(clip), "test", STEPS)


def main(parts: list[str]) -> None:
    """Measure, print, plot and write the given parts; the results of the others remain."""
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"unknown part {min(unknown)!r}: choose from {', '.join(PARTS)}")
    torch.set_num_threads(1)
    setup = Setup()
    path = RESULTS / "shapes.json"
    known = artifact.read(path, "recast.benchmark.shapes") if path.exists() else {}
    results = {key: value for key, value in known.items() if key not in ("format", "version")}
    results |= {"rewards": REWARDS, "sigmas": setup.sigmas}
    if "quality" in parts:
        results["quality"] = quality()
        for name, value in results["quality"].items():
            print(f"{name:24} {value:.3f}")
    if "seeds" in parts:
        (results["positive"], curves), (results["self"], own) = seeds(setup, False), seeds(setup, True)
        for key in ("correlation", "mean_step", "total"):
            print_table(f"{key}, π+", results["positive"][key])
            print_table(f"{key}, self", results["self"][key])
        sheet = figures.panels_figure({"renderer as π⁺": curves, "self-rollouts": own})
        figures.save(sheet, IMAGES / "shapes-self", ("png",))
    if "estimators" in parts:
        results["estimators"] = variances(setup)
        print_table("variance, paper / coupled", results["estimators"]["variance_ratio"])
    artifact.write(path, "recast.benchmark.shapes", results)


def print_table(title: str, values: list[float]) -> None:
    """Print one line per quantity, with one number per reward."""
    print(
        f"{title:28}" + "".join(f"{name:>13} {value:6.2f}" for name, value in zip(REWARDS, values, strict=True)),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:] or list(PARTS))
