"""The verb `run`."""

from __future__ import annotations

from pathlib import Path

from recast import processes
from recast.cli import show, tables
from recast.cli.arguments import Jobs, Overrides, RecipeFile, RunFolder
from recast.cli.console import console, needs
from recast.cli.jobs import observer
from recast.core import comparison
from recast.weigh import stage as weighing

__all__ = ["run"]


def run(
    recipe: RecipeFile, overrides: Overrides = None, out: RunFolder = Path("runs/recast"), jobs: Jobs = None
) -> None:
    """Run all stages of a recipe: propose, estimate, weigh, train every method and seed, evaluate, report.

    A stage whose artifact exists is skipped. Results of changed settings are set aside and made again. An interrupted
    run resumes where it stopped.

    Example: `recast run recipes/shapes.yaml --out runs/shapes`

    The exact world, whose curves are known: `recast run recipes/mixture.yaml --out runs/mixture`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    with needs("running a recipe", "train"):
        from recast.sweep import jobs as planning
        from recast.sweep import stage

        curves, truth = stage.curves_of(settings, out, observer(), jobs)
    effects = show.effects(settings, out)
    if processes.RANK == 0:
        weights = weighing.weigh_recipe(settings, curves, effects)
        exact = None if truth is None else weighing.weigh_recipe(settings, truth, effects)
        weighing.save(settings, weights, out)
        show.weights(curves, weights)
        if truth is not None:
            console.print(tables.comparison_table(comparison.compare(truth, curves), "exact", "estimated"))
        show.draw(curves, weights, out / "gains", truth, exact)
        names = f"recipe.yaml, gains.json, {'' if truth is None else 'exact.json, '}weights.json and gains.png"
        said = stage.cost_sentence(settings, curves, weights, exact)
        console.print(f"{said}\nwrote {names} in {out}", soft_wrap=True)
    if settings.run.methods:
        planned = planning.jobs_of(settings, out, settings.run.methods, settings.run.seeds, [settings.budget])
        with needs("comparing policies", "train,rewards"):
            made = stage.compare(settings, out, curves, planned, jobs, observer(), effects=effects)
        if made is not None:
            show.report(made, 2)
