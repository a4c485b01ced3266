"""The sweep of the embedded world at two batch sizes, and what the doctor predicts for it.

    python benchmarks/sweep.py [FOLDER] [--tables]

Four sweeps of recipes/shapes.yaml on the same gain curves: eight methods, five budgets and three seeds with 64 and with
16 images per update, and both again for sinkhorn at equal budgets with weigh.columns = effect; the factors of matched
do not depend on ν. The setting with 16 images has a quarter of the images per epoch and the learning rate that is best
for static on validation prompts (shapes_training.py, block `small`). The doctor measures the gradients of the base
once. results/sweep.jsonl has one line per finished policy, which is not trained again; remove the file to measure all
anew. Runs are in FOLDER (default runs/sweeps). Then the tables of docs/results/shapes.md are printed and written to
results/sweep.json; with --tables, from what is finished. About three hours on two cores for all 248 policies.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recast import GainCurves, WeightMatrix, config, evaluate
from recast.core import artifact
from recast.core.effects import Effects
from recast.report import Run, compare
from recast.sweep import jobs as planning
from recast.sweep import stage, workers

RESULTS = Path(__file__).parent / "results"
RECIPE = Path(__file__).parents[1] / "recipes/shapes.yaml"
SMALL = ["train.prompts_per_epoch=12", "train.batch=16", "train.learning_rate=5e-4"]
EQUAL = "{composition: 1, alignment: 1, detail: 1, background: 1}"
EFFECT = ["weigh.columns=effect", "sweep.methods=[sinkhorn]", f"sweep.budgets=[{EQUAL}]"]
SWEEPS = {"b64": [], "b16": SMALL, "e64": EFFECT, "e16": [*SMALL, *EFFECT]}
"""Changes of the recipe by folder."""
REWARDS = ("composition", "alignment", "detail", "background")
LINES = RESULTS / "sweep.jsonl"


def train(folder: Path) -> None:
    """Measure curves and gradients, and train and evaluate the policies that have no line yet."""
    for words in (["run", str(RECIPE), "run.methods=[]"], ["doctor", str(RECIPE), "--gradients", "--prompts", "96"]):
        subprocess.run([sys.executable, "-m", "recast", *words, "--out", str(folder)], check=True)
    curves, effects = GainCurves.load(folder / "gains.json"), Effects.load(folder / "effects.json")
    for name, changes in SWEEPS.items():
        settings = config.load(RECIPE, changes)
        budgets = planning.budgets_of(settings, settings.sweep.budgets)
        jobs = planning.jobs_of(settings, folder / name, settings.sweep.methods, settings.sweep.seeds, budgets)
        own = effects if settings.weigh.columns == "effect" else None
        stage.prepare(settings, folder / name, curves, jobs, {}, own)
        todo = [job for job in jobs if str(job.folder.relative_to(folder)) not in lines()]
        workers.run_jobs(todo, workers.workers_here(), lambda _: keep(folder))
        keep(folder)


def lines() -> dict[str, dict[str, Any]]:
    """The finished policies by folder."""
    text = LINES.read_text(encoding="utf-8") if LINES.exists() else ""
    return {made["name"]: made for made in map(json.loads, text.splitlines())}


def keep(folder: Path) -> None:
    """Write a line for every policy that has been evaluated since: its W, and the mean scores of every prompt."""
    known = lines()
    # Not by **: the checkpoints of running jobs come and go.
    for manifest in sorted(
        place for depth in ("*/*", "*/*/*") for place in folder.glob(f"{depth}/scores/scores.jsonl")
    ):
        run = manifest.parents[1]
        name = str(run.relative_to(folder))
        if name in known or not name.startswith(tuple(SWEEPS)) or ".stale-" in name:
            continue
        scores = evaluate.Scores.load(run)
        texts = [image["prompt"] for image in scores.images]
        rows = np.array([texts.index(text) for text in texts])
        means = {
            reward: [round(float(values[rows == row].mean()), 4) for row in dict.fromkeys(rows.tolist())]
            for reward, values in zip(scores.rewards, scores.values, strict=True)
        }
        facts = {"name": name, "method": scores.method, "budget": scores.budget, "seed": scores.seed}
        W = WeightMatrix.load(run / "weights.json") if scores.method != "base" else None
        shown = None if W is None or scores.seed else {"W": W.matrix.round(8).tolist(), "nu": W.nu.round(8).tolist()}
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts | {"W": shown, "scores": means}, separators=(",", ":")) + "\n")


def runs_of(names: tuple[str, ...]) -> list[Run]:
    """The evaluated policies of some sweeps; those with effect columns are methods of their own."""
    found = []
    for name, made in lines().items():
        sweep = name.split("/")[0]
        if sweep in names and not (sweep.startswith("e") and made["method"] == "base"):
            method = f"{made['method']}, effect" if sweep.startswith("e") else made["method"]
            values = {reward: np.array(each) for reward, each in made["scores"].items()}
            means = {reward: float(each.mean()) for reward, each in values.items()}
            found.append(Run(method, tuple(made["budget"].items()), made["seed"], means, values))
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


def predictions(found: Effects, images: int) -> Iterator[dict[str, Any]]:
    """What the doctor predicts for each W at equal budgets: budget realized, cosine, and what of it is timing."""
    for name, made in lines().items():
        sweep, even = name.split("/")[0], len(set(made["budget"].values())) == 1
        if sweep[1:] != str(images) or not even or made["W"] is None or made["method"] == "static":
            continue
        W = WeightMatrix(
            found.rewards, found.sigmas, made["W"]["W"], np.full(4, 0.25), made["method"], nu=made["W"]["nu"]
        )
        yield {
            "method": f"{made['method']}, effect" if sweep.startswith("e") else made["method"],
            "realized": found.realized(W)[0].tolist(),
            "cosine": found.efficiency(W, images),
            "static": found.static(W, images),
            "gain": list(found.gain(W, images)),
            "timing": list(found.timing(W, images)),
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
    """Everything about one batch size; without FOLDER/effects.json, the predictions of the last time."""
    if (folder / "effects.json").exists():
        predicted = list(predictions(Effects.load(folder / "effects.json"), images))
    else:
        known = artifact.read(RESULTS / "sweep.json", "recast.benchmark.sweep")["sweeps"]
        predicted = next(each["predicted"] for each in known if each["images"] == images)
    runs = runs_of((f"b{images}", f"e{images}"))
    return {
        "images": images,
        "predicted": predicted,
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
