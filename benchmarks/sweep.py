"""The sweep of the embedded world at two batch sizes, and what the doctor predicts for it.

    python benchmarks/sweep.py [FOLDER] [--tables]

Four sweeps of recipes/shapes.yaml on the same gain curves: eight methods, five budgets and three seeds with 64 and with
16 images per update, and both again for two methods at equal budgets with weigh.columns = effect. The setting with 16
images has a quarter of the images per epoch and the learning rate that is best for static on validation prompts
(shapes_training.py, block `small`). The doctor measures the gradients of the base once. Everything is resumable:
policies that are finished in FOLDER (default runs/sweeps) are not trained again. Then the tables of
docs/results/shapes.md are printed and written to results/sweep.json; with --tables, from what is finished. Takes about
three hours on two cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recast import WeightMatrix, evaluate
from recast.core import artifact
from recast.core.effects import Effects
from recast.report import Run, compare

RESULTS = Path(__file__).parent / "results"
RECIPE = Path(__file__).parents[1] / "recipes/shapes.yaml"
SMALL = ["train.prompts_per_epoch=12", "train.batch=16", "train.learning_rate=5e-4"]
EQUAL = "{composition: 1, alignment: 1, detail: 1, background: 1}"
EFFECT = ["weigh.columns=effect", "sweep.methods=[sinkhorn,matched]", f"sweep.budgets=[{EQUAL}]"]
SWEEPS = {"b64": [], "b16": SMALL, "e64": EFFECT, "e16": [*SMALL, *EFFECT]}
"""Changes of the recipe by folder."""
REWARDS = ("composition", "alignment", "detail", "background")
METHODS = ("sinkhorn", "row", "matched", "reversed", "shuffled", "matched-reversed", "matched-shuffled")


def recast(*words: str) -> None:
    """Run a command, and stop if it fails."""
    subprocess.run([sys.executable, "-m", "recast", *words], check=True)


def train(folder: Path) -> None:
    """Measure curves and gradients, and train and evaluate all policies."""
    recast("run", str(RECIPE), "run.methods=[]", "--out", str(folder / "b64"))
    recast("doctor", str(RECIPE), "--gradients", "--prompts", "96", "--out", str(folder / "b64"))
    for name, changes in SWEEPS.items():
        for part in ("gains.json", "effects.json", "proposals", "shards"):
            source, target = folder / "b64" / part, folder / name / part
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        recast("sweep", str(RECIPE), *changes, "--out", str(folder / name))


def runs_of(folder: Path, names: tuple[str, ...]) -> list[Run]:
    """The evaluated policies of some sweeps; those with effect columns are methods of their own."""
    found = []
    for name in names:
        for scores in evaluate.find([folder / name]):
            run = Run.from_scores(scores)
            if name.startswith("e") and run.method != "base":
                run = Run(f"{run.method}, effect", run.budget, run.seed, run.means, run.values, run.prompts)
            found += [run] if not (name.startswith("e") and run.method == "base") else []
    return found


def outcomes(runs: list[Run], equal: bool) -> Iterator[dict[str, Any]]:
    """Each method against static: the difference of the aggregates and of census, with intervals over prompts."""
    for method in dict.fromkeys(run.method for run in runs if run.method not in ("base", "static")):
        pairs = [pair for pair in compare.pairs(runs, method, "static") if not equal or _even(pair[0])]
        if not pairs:
            continue
        found, held = (compare.difference(pairs, name) for name in (compare.AGGREGATE, "census"))
        seeds: dict[int, list[float]] = {}
        for one, two in pairs:
            seeds.setdefault(one.seed, []).append(one.aggregate - two.aggregate)
        by_seed = [float(np.mean(each)) for each in seeds.values()]
        yield {
            "method": method,
            "pairs": len(pairs),
            "wins": compare.wins(pairs, compare.AGGREGATE)[0],
            "difference": [found.mean, found.low, found.high],
            "seeds": [float(np.mean(by_seed)), float(np.std(by_seed, ddof=1)) if len(by_seed) > 1 else None],
            "census": [held.mean, held.low, held.high],
        }


def _even(run: Run) -> bool:
    return len({weight for _, weight in run.budget}) == 1


def predictions(folder: Path, images: int, effect: bool) -> Iterator[dict[str, Any]]:
    """What the doctor predicts for each W at equal budgets: budget realized, cosine, and what of it is timing."""
    found = Effects.load(folder / "e64/effects.json" if effect else folder / "b64/effects.json")
    name = f"{'e' if effect else 'b'}{images}"
    for method in METHODS:
        path = folder / name / ("" if effect else "b1-1-1-1") / f"{method}-s0/weights.json"
        if not path.exists():
            continue
        W = WeightMatrix.load(path)
        gain, timing = found.gain(W, images), found.timing(W, images)
        yield {
            "method": f"{method}, effect" if effect else method,
            "realized": found.realized(W)[0].tolist(),
            "cosine": found.efficiency(W, images),
            "static": found.static(W, images),
            "gain": list(gain),
            "timing": list(timing),
        }


def means(runs: list[Run], equal: bool) -> dict[str, dict[str, list[float]]]:
    """Mean of the seed-level means and their standard deviation, by method and reward, at complete seeds."""
    found = {}
    for method in dict.fromkeys(run.method for run in runs if run.method != "base"):
        chosen = [run for run in compare.of(runs, method) if not equal or _even(run)]
        budgets = {seed: {run.budget for run in chosen if run.seed == seed} for seed in {run.seed for run in chosen}}
        whole = max(budgets.values(), key=len)
        chosen = [run for run in chosen if budgets[run.seed] == whole]
        pooled = {name: compare.pool(chosen, name) for name in (compare.AGGREGATE, *REWARDS, "census")}
        found[method] = {name: [value.mean, value.std] for name, value in pooled.items()}
    return found


def table(folder: Path, images: int) -> dict[str, Any]:
    """Everything about one batch size."""
    runs = runs_of(folder, (f"b{images}", f"e{images}"))
    return {
        "images": images,
        "predicted": [*predictions(folder, images, False), *predictions(folder, images, True)],
        "equal": list(outcomes(runs, True)),
        "all": list(outcomes([run for run in runs if "effect" not in run.method], False)),
        "means": means(runs, True),
        "budgets": means([run for run in runs if "effect" not in run.method], False),
        "base": next(run.means for run in runs if run.method == "base"),
    }


def show(made: dict[str, Any]) -> None:
    """Print the tables of one batch size in Markdown."""
    print(f"\n{made['images']} images per update\n")
    for method, row in {"base": {k: [v, np.nan] for k, v in made["base"].items()}, **made["means"]}.items():
        print(f"| {method} | " + " | ".join(f"{mean:.3f} ± {std:.3f}" for mean, std in row.values()) + " |")
    predicted = {row["method"]: row for row in made["predicted"]}
    for key in ("equal", "all"):
        print(f"\n{key}: realized, cosine, gain, timing | difference, 95 %, ± over seeds, wins | census")
        for row in made[key]:
            told = predicted.get(row["method"])
            words = "" if told is None else " / ".join(f"{share:.0%}" for share in told["realized"])
            if told is not None:
                words += f" | {told['cosine']:.3f} ({told['static']:.3f})"
                words += "".join(f" | {each[0]:+.1%} ± {each[1]:.1%}" for each in (told["gain"], told["timing"]))
            mean, low, high = row["difference"]
            spread = "" if row["seeds"][1] is None else f"{row['seeds'][1]:.4f}"
            held = "{:+.4f} ({:+.4f} to {:+.4f})".format(*row["census"])
            print(
                f"| {row['method']} | {words} | {mean:+.4f} | {low:+.4f} to {high:+.4f} | {spread} | "
                f"{row['wins']}/{row['pairs']} | {held} |"
            )


def main(words: list[str]) -> None:
    """Train what is missing, unless only tables are asked for, then print and write the tables."""
    places = [word for word in words if not word.startswith("--")]
    folder = Path(places[0] if places else "runs/sweeps")
    if "--tables" not in words:
        train(folder)
    made = [table(folder, images) for images in (64, 16)]
    for each in made:
        show(each)
    artifact.write(RESULTS / "sweep.json", "recast.benchmark.sweep", {"sweeps": made})


if __name__ == "__main__":
    main(sys.argv[1:])
