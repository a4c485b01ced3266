"""How the embedded world and its training were chosen: on the base or on static alone, and on validation prompts.

    python benchmarks/shapes_training.py

Five blocks, two runs at a time with one thread each. `grid`: the untrained base with several schedulers and two
samplers. `background`: training on the background reward alone, as it is and over the whole paper, as it was before.
`static`: recipes/shapes.yaml with static weights and equal budgets, three seeds, scored every quarter of training.
`small`: the same with 16 images per update and a quarter of the images, at three learning rates, for twice as long.
`anchor`: the same as `static` with the KL term on every fourth pair (train.kl_every).
Every number is measured on the averaged adapter, with eight images per prompt. Writes results/shapes_training.json
in this folder; takes about fifteen minutes on two cores.
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
REPEATS, SEED, SEEDS = 8, 42, (100, 101, 102)
TRAINED = ("composition", "alignment", "detail", "background")
WHOLE = "shapes_training:WholePaper"
GRIDS = ((3.0, None), (1.0, None), (1.0, 0.1), (1.5, 0.05), (1.5, 0.1), (2.0, 0.1))
"""Shift and terminal σ of the scheduler."""
SMALL = ("train.prompts_per_epoch=12", "train.batch=16", "train.epochs=32")
RATES = (2.5e-4, 5e-4, 1e-3)
ALONE, EPOCHS = ("background", WHOLE), 8
"""Rewards that are trained alone, and for how many epochs."""


class WholePaper:
    """The background reward until 0.2.0: exp(−error/0.008) over all pixels that no certain object covers."""

    def __call__(self, images: Any, texts: Any, metadata: Any = None) -> Any:
        """Cleanness of the whole paper, (B,)."""
        import torch

        from recast.shapes import detect, render

        reading = detect.read(images)
        cells, paper = (render.to_cells(each) for each in (images.float(), detect._paper(images.float())))
        touched = (render.objects().coverage > 0).float()[reading.held]
        inside = 1 - reading.certain[..., None] * touched
        stray = ((cells - paper).square().sum(2) * inside).sum((1, 2)) / (3 * inside.sum((1, 2)))
        error = (stray - detect._ROUNDING).clamp(min=0).sqrt()
        return torch.exp(-error / 0.008).double().numpy()


def evaluate(policy: Any, method: str = "dpm2") -> dict[str, float]:
    """The mean of every reward over the validation prompts, `REPEATS` images each, the same seeds for all policies."""
    import numpy as np

    from recast import prompts
    from recast.flow.generate import generate
    from recast.rewards import base

    rows = prompts.load("shapes:validation") * REPEATS
    texts = [row["prompt"] for row in rows]
    images = generate(policy, texts, [SEED + k for k in range(len(rows))], steps=10, method=method)  # type: ignore[arg-type]
    models: dict[str, Any] = {name: base.load(name) for name in (*TRAINED, "census")}
    means = np.nanmean(base.score(models | {"whole_paper": WholePaper()}, images, texts, rows), axis=1)
    found = dict(zip([*models, "whole_paper"], means.tolist(), strict=True))
    return {"sum": sum(found[name] for name in TRAINED), **found}


def grid(shift: float, terminal: float | None) -> dict[str, Any]:
    """Levels of a scheduler and the rewards of the base with it, for both samplers."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    from recast import config
    from recast.flow import families
    from recast.flow.pipeline import PipelinePolicy

    policy = families.load(config.policy(model="shapes"))
    assert isinstance(policy, PipelinePolicy)
    policy.pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift, shift_terminal=terminal)
    scores = {method: evaluate(policy, method) for method in ("dpm2", "euler")}
    return {"shift": shift, "terminal": terminal, "sigmas": policy.sigmas(10), "scores": scores}


def train(budget: dict[str, float], overrides: list[str]) -> dict[str, Any]:
    """Train one policy with static weights and score it at every quarter of training."""
    from recast import config, prompts
    from recast.train import stage
    from recast.weigh import static

    recipe = config.load(RECIPE, overrides).model_copy(update={"rewards": dict.fromkeys(budget)})
    with tempfile.TemporaryDirectory() as folder:
        accelerator = stage.accelerator_of(recipe, Path(folder))
        policy = stage._load_policy(recipe)
        weights = static(budget, policy.sigmas(recipe.estimate.steps))
        trainer = stage.build(recipe, weights, prompts.load(recipe.train.prompts), accelerator, policy)
        scores: dict[str, Any] = {}
        while trainer.position.epoch < recipe.train.epochs:
            trainer.epoch()
            done = trainer.position.epoch
            if done % (recipe.train.epochs // 4) == 0:
                with trainer.averaged():
                    scores[str(done)] = evaluate(trainer.policy)
    return {"overrides": overrides, "scores": scores}


def run(job: tuple[str, Any]) -> None:
    """Measure one job and write its line."""
    import torch

    torch.set_num_threads(1)
    name, facts = job
    block = name.split()[0]
    if block == "grid":
        found = grid(*facts)
    elif block == "background":
        found = train({facts: 1.0}, [f"train.seed={SEEDS[0]}", f"train.epochs={EPOCHS}"])
    else:
        found = train(dict.fromkeys(TRAINED, 1.0), facts)
    made = {"name": name, **found}
    print(json.dumps(made), flush=True)
    with LINES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(made) + "\n")


def jobs() -> list[tuple[str, Any]]:
    """All runs by their names, the longest first."""
    found: list[tuple[str, Any]] = [(f"static {seed}", [f"train.seed={seed}"]) for seed in SEEDS]
    found += [(f"anchor {seed}", ["train.kl_every=4", f"train.seed={seed}"]) for seed in SEEDS]
    found += [
        (f"small {rate:g} {seed}", [*SMALL, f"train.learning_rate={rate}", f"train.seed={seed}"])
        for seed in SEEDS
        for rate in RATES
    ]
    found += [(f"background {name}", name) for name in ALONE]
    return found + [(f"grid {shift:g} {terminal}", (shift, terminal)) for shift, terminal in GRIDS]


def finished() -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def main() -> None:
    """Run everything, print and write the results."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from recast.core import artifact

    done = {made["name"] for made in finished()}
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        pool.map(run, [job for job in jobs() if job[0] not in done], chunksize=1)
    known = {made["name"]: made for made in finished()}
    runs = [known[name] for name, _ in jobs()]
    artifact.write(RESULTS / "shapes_training.json", "recast.benchmark.shapes_training", {"runs": runs})


if __name__ == "__main__":
    main()
