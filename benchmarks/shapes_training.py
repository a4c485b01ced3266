"""Training on the embedded world: the choice of normalization, ReCAST against static, and training past the plateau.

    python benchmarks/shapes_training.py

Three blocks of runs of recipes/shapes.yaml, two at a time with one thread each; every number is measured on the
averaged adapter, with four images per prompt. `choice`: both normalizations, scored on the validation prompts, with
other seeds. `methods`: the recipe with static, Sinkhorn and time-reversed W, three seeds, scored on the held-out
prompts. `overshoot`: with DiffusionNFT's KL weight (1e-4) and the paper's learning rate, and for longer. Writes
results/shapes_training.json in this folder; takes about half an hour on two cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RECIPE = Path(__file__).parents[1] / "recipes/shapes.yaml"
LINES = RESULTS / "shapes_training.jsonl"
"""One line per finished run, which is not run again. Remove the file to measure again."""
REPEATS, SEED = 4, 42
TRAINED = ("composition", "alignment", "detail", "background")
HELD_OUT = ("census",)
CHOICE_SEEDS, SEEDS = (100, 101, 102), (0, 1, 2)
LONGER = ("train.kl_weight=1e-4", "train.epochs=48", "train.learning_rate=3e-4")


def evaluate(policy: Any, split: str) -> dict[str, float]:
    """The mean of every reward over the prompts of a split, `REPEATS` images each, the same seeds for all policies."""
    import numpy as np

    from recast import prompts
    from recast.flow.generate import generate
    from recast.rewards import base

    rows = prompts.load(f"shapes:{split}") * REPEATS
    texts = [row["prompt"] for row in rows]
    images = generate(policy, texts, [SEED + k for k in range(len(rows))], steps=10)
    models = {name: base.load(name) for name in (*TRAINED, *HELD_OUT)}
    means = np.nanmean(base.score(models, images, texts, rows), axis=1)
    found = dict(zip(models, means.tolist(), strict=True))
    return {"mean": sum(found[name] for name in TRAINED) / len(TRAINED), **found}


def run(job: tuple[str, str, str, list[str], str]) -> dict[str, Any]:
    """Train one policy and score it at a quarter, at half and at the end of training."""
    block, method, split, overrides, gains = job
    import torch

    from recast import GainCurves, config, prompts, weigh
    from recast.train import stage

    torch.set_num_threads(1)
    recipe = config.load(RECIPE, overrides)
    curves = GainCurves.load(gains)
    weights = weigh(curves, dict.fromkeys(curves.rewards, 1.0), method)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        accelerator = stage.accelerator_of(recipe, Path(folder))
        trainer = stage.build(recipe, weights, prompts.load(recipe.train.prompts), accelerator)
        scores: dict[str, Any] = {}
        while trainer.position.epoch < recipe.train.epochs:
            trainer.epoch()
            done = trainer.position.epoch
            if done % (recipe.train.epochs // 4) == 0:
                with trainer.averaged():
                    scores[str(done)] = evaluate(trainer.policy, split)
    made = {"block": block, "method": method, "split": split, "overrides": overrides, "scores": scores}
    print(json.dumps(made), flush=True)
    with LINES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(made) + "\n")
    return made


def jobs(gains: str) -> list[tuple[str, str, str, list[str], str]]:
    """All runs."""
    both = ("static", "sinkhorn")
    found = [
        ("choice", method, "validation", [f"train.seed={seed}", f"train.normalize={mode}"])
        for seed in CHOICE_SEEDS
        for mode in ("step", "reward")
        for method in both
    ]
    found += [("methods", method, "test", [f"train.seed={seed}"]) for seed in SEEDS for method in (*both, "reversed")]
    found += [("overshoot", method, "test", [f"train.seed={seed}", *LONGER]) for seed in (0,) for method in both]
    return [(*job, gains) for job in found]


def finished() -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def describe(job: Any) -> tuple[str, str, tuple[str, ...]]:
    """What identifies a run: its block, method and settings."""
    block, method, changes = (
        (job["block"], job["method"], job["overrides"]) if isinstance(job, dict) else (job[0], job[1], job[3])
    )
    return block, method, tuple(changes)


def measure_gains(folder: Path) -> str:
    """Estimate the curves of the recipe; returns the path of gains.json."""
    from recast import config
    from recast.estimate import stage
    from recast.progress import no_progress
    from recast.propose.stage import propose

    recipe = config.load(RECIPE)
    propose(recipe, folder, no_progress)
    stage.estimate(recipe, folder, no_progress)
    return str(folder / "gains.json")


def main() -> None:
    """Run everything, print and write the results."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from recast import config
    from recast.core import artifact
    from recast.flow import sd3

    with tempfile.TemporaryDirectory() as name:
        gains = measure_gains(Path(name))
        todo = [job for job in jobs(gains) if describe(job) not in map(describe, finished())]
        with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
            pool.map(run, todo, chunksize=1)
    found = [made for made in finished() if describe(made) in map(describe, jobs(""))]
    policy = sd3.load(config.policy(model="shapes"))
    base = {split: evaluate(policy, split) for split in ("validation", "test")}
    found.sort(key=lambda made: (made["block"], made["overrides"], made["method"]))
    artifact.write(RESULTS / "shapes_training.json", "recast.benchmark.shapes_training", {"base": base, "runs": found})


if __name__ == "__main__":
    main()
