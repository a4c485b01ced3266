"""Overhead of the estimate stage over its velocity calls, and the time either estimator needs for an accurate W.

    python benchmarks/estimate.py

The shapes recipe with eight prompts, on one thread. The stage (proposals read, encoded, noised, rolled out, decoded,
scored by four rewards, stored) is timed alternately with a loop of exactly its velocity calls. Then both estimators are
repeated on the same proposals: e is the L1 distance of W to the mean over the repeats, and the seconds to e = 0.1
follow from an error that falls with the square root of the time. Writes results/estimate.json next to this file; takes
about ten minutes.
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
from recast.estimate import from_rollouts, stage, worlds
from recast.progress import no_progress
from recast.propose.stage import propose
from recast.weigh import weigh

RESULTS = Path(__file__).parent / "results"
RECIPE = Path(__file__).parents[1] / "recipes/shapes.yaml"
PROMPTS, ROUNDS, REPEATS, ACCURACY = 8, 7, 16, 0.1
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


def main() -> None:
    """Measure, print, and write."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        propose(recipe(), folder, no_progress)
        ratio = rate(folder)
        found = {estimator: spread(folder, estimator) for estimator in SETTINGS}
    print(f"the stage makes {ratio:.3f} times the evaluations per second of a bare loop")
    for estimator, facts in found.items():
        print(estimator, {key: round(value, 3) for key, value in facts.items()})
    saved = found["paper"]["seconds_to_accuracy"] / found["coupled"]["seconds_to_accuracy"]
    print(f"to an L1 noise of {ACCURACY} in W, the paper's estimator takes {saved:.1f} times as long")
    artifact.write(
        RESULTS / "estimate.json",
        "recast.benchmark.estimate",
        {"stage_over_bare": ratio, "estimators": found, "paper_over_coupled": saved, "accuracy": ACCURACY},
    )


if __name__ == "__main__":
    main()
