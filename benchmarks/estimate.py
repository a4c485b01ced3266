"""Overhead of the estimate stage, the time either estimator needs for an accurate W, and where that time goes.

    python benchmarks/estimate.py

The shapes recipe with eight prompts, on one thread. The stage (proposals read, encoded, noised, rolled out, decoded,
scored by four rewards, stored) is timed alternately with a loop of exactly its velocity calls. Then both estimators are
repeated on the same proposals: e is the L1 distance of W to the mean over the repeats, and the seconds to e = 0.1
follow from an error that falls with the square root of the time. Last, many noisings of the same proposals say where
the noise of coupled rollouts comes from, and what fewer noisings at clean levels, or fewer levels per rollout, would
save. Writes results/estimate.json next to this file; takes about a quarter of an hour.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recast import config
from recast.core import artifact
from recast.core.curves import GainCurves
from recast.estimate import from_rollouts, stage, worlds
from recast.flow import sampling
from recast.progress import no_progress
from recast.propose.stage import propose
from recast.weigh import weigh

RESULTS = Path(__file__).parent / "results"
RECIPE = Path(__file__).parents[1] / "recipes/shapes.yaml"
PROMPTS, ROUNDS, REPEATS, ACCURACY = 8, 7, 16, 0.1
STEPS, SAMPLES, MANY, DRAWS = 10, 8, 24, 100
REWARDS = ("composition", "alignment", "detail", "background")
SETTINGS = {
    "coupled": ["estimate.noisings=2"],
    "paper": ["estimate.estimator=paper", "estimate.rollouts=4"],
}


def recipe(*more: str) -> config.Recipe:
    """The shapes recipe with fewer prompts."""
    return config.load(RECIPE, [f"prompts.count={PROMPTS}", *more])


class Recorded:
    """A velocity that records the size and level of its calls."""

    def __init__(self, velocity: Any) -> None:
        self.velocity = velocity
        self.calls: list[tuple[int, float]] = []

    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """The same velocity."""
        self.calls.append((len(x), sigma))
        return self.velocity(x, sigma)  # type: ignore[no-any-return]


def bare(world: worlds.World, calls: list[tuple[int, float]]) -> float:
    """Seconds of the velocity calls of all prompts alone."""
    velocities = [world.velocity(name) for name in world.names]
    x = torch.randn(max(size for size, _ in calls), *world.shape, dtype=world.dtype)
    begun = time.perf_counter()
    with torch.no_grad():
        for velocity in velocities:
            for size, sigma in calls:
                velocity(x[:size], sigma)
    return time.perf_counter() - begun


def rate(folder: Path) -> float:
    """Velocity evaluations per second of the stage, relative to those of the bare loop."""
    world = worlds.open_world(recipe(), folder)
    recorded = Recorded(world.velocity(world.names[0]))
    world.velocity = lambda _name: recorded  # type: ignore[assignment,method-assign]
    stage.sample_prompt(recipe(), world, world.names[0])
    world = worlds.open_world(recipe(), folder)
    ratios = []
    for _ in range(ROUNDS):
        loop = bare(world, recorded.calls)
        shutil.rmtree(folder / "shards", ignore_errors=True)
        begun = time.perf_counter()
        stage.estimate(recipe(), folder, no_progress)
        ratios.append(loop / (time.perf_counter() - begun))
        print(f"stage at {ratios[-1]:.3f} of the bare loop's rate", flush=True)
    return statistics.median(ratios)


def spread(folder: Path, name: str) -> dict[str, float]:
    """Seconds of one run, the L1 noise of its W, and the seconds to a noise of `ACCURACY`."""
    matrices, times, spent = [], [], 0
    for repeat in range(REPEATS):
        settings = recipe(*SETTINGS[name], f"estimate.seed={repeat}")
        world = worlds.open_world(settings, folder)
        begun = time.perf_counter()
        found = [stage.sample_prompt(settings, world, name).score(world.scorer(name)) for name in world.names]
        times.append(time.perf_counter() - begun)
        curves = from_rollouts(settings, world.sigmas, found, world.models)
        spent = sum(shard.evaluations for shard in found)
        matrices.append(weigh(curves, dict.fromkeys(curves.rewards, 1.0)).matrix)
    away = np.abs(np.stack(matrices) - np.mean(matrices, axis=0)).sum(axis=(1, 2)).mean()
    error = float(away * np.sqrt(REPEATS / (REPEATS - 1)))  # the mean is over the same repeats
    seconds = statistics.median(times)
    return {
        "evaluations": spent,
        "seconds": seconds,
        "l1_noise": error,
        "seconds_to_accuracy": seconds * (error / ACCURACY) ** 2,
    }


def rolled(folder: Path, spacing: float) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Scores (P, m, T+1, N, 2, MANY/2) of mirrored noisings, sigmas, and the evaluations from each level."""
    settings = recipe(f"estimate.noisings={MANY}", f"estimate.spacing={spacing}")
    world = worlds.open_world(settings, folder)
    tables = []
    for name in world.names:
        scores = stage.sample_prompt(settings, world, name).score(world.scorer(name)).scores[..., 0]
        tables.append(scores.reshape(*scores.shape[:2], settings.estimate.samples, 2, MANY // 2))
    walk = sampling.rollout_levels(world.sigmas, spacing)
    steps = [1 + sum(0 < level < start for level in walk) for start in world.sigmas[1:]]
    return np.stack(tables), np.asarray(world.sigmas), steps


def noise_of(scores: np.ndarray, sigmas: np.ndarray, pairs: list[int]) -> float:
    """L1 noise of W with so many mirrored pairs of noisings at each level, over random choices of them."""
    random, made = np.random.default_rng(0), []
    for _ in range(DRAWS):
        order = random.permuted(
            np.broadcast_to(np.arange(MANY // 2), (len(scores), 1, 1, scores.shape[3], 1, MANY // 2)), axis=-1
        )
        mixed = np.take_along_axis(scores, np.broadcast_to(order, scores.shape), -1)
        mu = np.stack(
            [mixed[:, :, 0].mean((-2, -1))]
            + [mixed[:, :, t, :, :, :count].mean((-2, -1)) for t, count in enumerate(pairs, start=1)],
            axis=2,
        )
        curves = GainCurves.from_mu(REWARDS, sigmas, mu, 2.0)
        made.append(weigh(curves, dict.fromkeys(REWARDS, 1.0)).matrix)
    away = np.abs(np.stack(made) - np.mean(made, axis=0)).sum((1, 2)).mean()
    return float(away / np.sqrt(1 - 2 * max(pairs) / MANY))  # drawn without replacement


def origins(folder: Path) -> dict[str, Any]:
    """Where the noise of coupled rollouts comes from, and what two ways to save evaluations would do."""
    scores, sigmas, steps = rolled(folder, 0.8)
    level = scores.mean(-2)  # mirrored pairs
    relative = level / level.mean((0, 3, 4), keepdims=True)
    own = relative.var(-1, ddof=1).mean((0, 3))  # (m, T+1)
    apart = (relative[:, :, :-1] - relative[:, :, 1:]).var(-1, ddof=1).mean((0, 3))
    plans = {"2 noisings": [1] * STEPS, "8 noisings": [4] * STEPS, "2, and 8 from t = 7 on": [1] * 6 + [4] * 4}
    found: dict[str, Any] = {
        "evaluations_by_level": steps,
        "variance_of_a_level": own[:, 1:].mean(0).tolist(),
        "variance_of_the_step": apart.mean(0).tolist(),
        "allocations": {},
        "spacings": {},
    }
    for name, pairs in plans.items():
        cost = 2 * SAMPLES * int(np.dot(pairs, steps))
        error = noise_of(scores, sigmas, pairs)
        found["allocations"][name] = {"evaluations": cost, "l1_noise": error, "product": error**2 * cost}
    whole = {}
    for spacing in (0.8, 1.6):
        scores, sigmas, steps = rolled(folder, spacing)
        error, cost = noise_of(scores, sigmas, [2] * STEPS), 4 * SAMPLES * sum(steps)
        curves = GainCurves.from_mu(REWARDS, sigmas, scores.mean((-2, -1)), 2.0)
        whole[spacing] = weigh(curves, dict.fromkeys(REWARDS, 1.0)).matrix
        away = float(np.abs(whole[spacing] - whole[0.8]).sum())
        facts = {"evaluations": cost, "l1_noise": error, "product": error**2 * cost, "l1_from_0.8": away}
        found["spacings"][str(spacing)] = facts
    return found


def main() -> None:
    """Measure, print, and write."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        propose(recipe(), folder, no_progress)
        ratio = rate(folder)
        found = {estimator: spread(folder, estimator) for estimator in SETTINGS}
        where = origins(folder)
    print(f"the stage makes {ratio:.3f} times the evaluations per second of a bare loop")
    for estimator, facts in found.items():
        print(estimator, {key: round(value, 3) for key, value in facts.items()})
    saved = found["paper"]["seconds_to_accuracy"] / found["coupled"]["seconds_to_accuracy"]
    for key, value in where.items():
        print(key, value)
    print(f"to an L1 noise of {ACCURACY} in W, the paper's estimator takes {saved:.1f} times as long")
    artifact.write(
        RESULTS / "estimate.json",
        "recast.benchmark.estimate",
        {"stage_over_bare": ratio, "estimators": found, "paper_over_coupled": saved, "accuracy": ACCURACY}
        | {"origins": where},
    )


if __name__ == "__main__":
    main()
