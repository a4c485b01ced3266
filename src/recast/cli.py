"""The command line: one verb per stage, each a thin call into the module of that name."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from recast import processes, show, sweep_cli
from recast._version import __version__
from recast.analyze import app as analyze
from recast.arguments import Overrides, RecipeFile, RunFolder
from recast.console import console, duration, needs, progress
from recast.errors import RecastError
from recast.judge.cli import judge
from recast.report import cli as reporting
from recast.rewards.cli import app as rewards
from recast.shapes.cli import app as shapes
from recast.sweep import end_with_parent
from recast.train import cli as training


class _Group(TyperGroup):
    """Turns bad input into one sentence and exit code 2, and warnings into plain lines."""

    def invoke(self, ctx: Any) -> Any:
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        try:
            return super().invoke(ctx)
        except RecastError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="When each reward counts: from gain curves to a reward-by-timestep weight matrix.",
)
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # click's own, wherever this typer keeps click
app.add_typer(shapes, name="shapes")
app.add_typer(analyze, name="analyze")
app.add_typer(rewards, name="rewards")
app.command()(training.train)
app.command()(training.doctor)
app.command()(reporting.evaluate)
app.command()(reporting.report)
app.command()(judge)
app.command()(sweep_cli.run)
app.command()(sweep_cli.sweep)

Budget = Annotated[str | None, typer.Option("--budget", help="How much each reward counts: name=number,name=number,…")]
MethodName = Annotated[str, typer.Option("--method", help="sinkhorn, static, row, hard, shared, reversed or shuffled.")]
Tau = Annotated[float, typer.Option("--tau", help="Sinkhorn temperature: below 1 sharper, above 1 flatter.")]
Shrink = Annotated[bool, typer.Option("--shrink", help="Draw curves that are mostly noise towards static weights.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"recast {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before any verb."""


@app.command()
def propose(recipe: RecipeFile, overrides: Overrides = None, out: RunFolder = Path("runs/recast")) -> None:
    """Get the proposals, π+'s images for every prompt: RUN/proposals, with a manifest. Makes only what is missing.

    Example: `recast propose recipes/shapes.yaml prompts.count=16 --out runs/shapes`

    From an image API: `OPENAI_API_KEY=… recast propose recipe.yaml propose.source=openai propose.cap=640`
    """
    from recast import config

    settings = config.load(recipe, overrides or [])
    with needs("making proposals", "train"):
        from recast import propose as stage

        manifest = stage.propose(settings, out, progress)
    if not (out / "gains.json").exists():  # else it is the recipe of those curves
        settings.save(out / "recipe.yaml")
    lines = manifest.read_text(encoding="utf-8").count("\n")
    console.print(f"{lines} proposals by {stage.generator(settings)}; wrote {manifest}", soft_wrap=True)


@app.command()
def estimate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = Path("runs/recast"),
    alpha: Annotated[float | None, typer.Option("--alpha", help="Rényi order; the recipe's unless told.")] = None,
    reuse: Annotated[bool, typer.Option("--reuse", help="Only make curves again from the rollouts there are.")] = False,
    until_ci: Annotated[
        float | None,
        typer.Option("--until-ci", min=0, help="Stop once W's 95 % interval is this narrow."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what it will cost, and do nothing.")] = False,
) -> None:
    """Measure gain curves: RUN/gains.json, and RUN/exact.json where the truth is known.

    Rollouts are kept prompt by prompt in RUN/shards: started again, it goes on where it was. Start it again elsewhere
    with the same RUN, or under torchrun, and the processes share the prompts.

    Example: `recast estimate recipes/shapes.yaml --out runs/shapes`

    Another order from the same rollouts: `recast estimate recipes/shapes.yaml --alpha 4 --reuse --out runs/shapes`

    As many prompts as it takes: `recast estimate recipes/shapes.yaml prompts.count=816 --until-ci 0.1 --out runs/a`
    """
    from recast import config

    changed = [*(overrides or []), *([] if alpha is None else [f"estimate.alpha={alpha}"])]
    settings = config.load(recipe, changed)
    if plan:
        _plan(settings, out)
        return
    found = show.estimate(settings, out, reuse, until_ci)
    if found is None:  # another process of this launcher writes the curves
        raise typer.Exit
    curves, truth = found
    if until_ci is not None:
        from recast.estimate import stage

        used = 0 if curves.D_prompts is None else len(curves.D_prompts)
        found = stage.width(settings, curves)
        met = "narrow enough" if found <= until_ci else f"not {until_ci:g} yet: give it more prompts"
        console.print(f"after {used} prompts the interval of W is {found:.3f}, {met}")
    names = "gains.json" if truth is None else "gains.json and exact.json"
    console.print(f"wrote {names} in {out}", soft_wrap=True)


@app.command()
def weigh(
    source: Annotated[Path, typer.Argument(help="gains.json, or a recipe whose RUN folder has one.")],
    overrides: Overrides = None,
    budget: Budget = None,
    method: MethodName = "sinkhorn",
    tau: Tau = 1.0,
    shrink: Shrink = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write; default weights.json beside the curves (a recipe: its RUN)."),
    ] = None,
) -> None:
    """Turn gain curves and a budget into W: weights.json, a table and a heatmap.

    Example: `recast weigh gains.json --budget clipscore=1,ocr=2`

    Or by a recipe: `recast weigh recipes/mixture.yaml weigh.method=row --out runs/mixture`
    """
    from recast.core.curves import GainCurves
    from recast.weigh import weigh as solve

    if source.suffix in (".yaml", ".yml"):
        from recast import config, run

        if budget is not None or method != "sinkhorn" or tau != 1.0 or shrink:
            raise RecastError(
                "with a recipe, set weigh.budget.NAME=1, weigh.method, weigh.tau and weigh.shrink instead"
            )
        folder = out or Path("runs/recast")
        settings = config.load(source, overrides or [])
        curves = GainCurves.load(folder / "gains.json")
        weights = run.weigh_recipe(settings, curves)
        target = run.save_weights(settings, weights, folder)
    else:
        if overrides:
            raise RecastError(f"{overrides[0]!r} belongs to a recipe; with a gains file use --budget, --method, --tau")
        curves = GainCurves.load(source)
        weights = solve(curves, _budget(budget, curves.rewards), method, tau=tau, shrink=shrink)  # type: ignore[arg-type]
        target = out or source.parent / "weights.json"
        if target.resolve() == source.resolve():
            raise RecastError(f"{source}: the weights would overwrite the curves; choose another --out")
        weights.save(target)
    show.weights(curves, weights)
    console.print(f"wrote {target}", soft_wrap=True)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="gains.json to compare from.")],
    second: Annotated[Path, typer.Argument(help="gains.json to compare to.")],
    resample: Annotated[
        bool, typer.Option("--resample", help="Resample the second onto the first's grid if they differ.")
    ] = False,
) -> None:
    """Compare two gain curves reward by reward: correlations, peaks, total gain and what remains of it.

    Example: `recast compare base/gains.json trained/gains.json`
    """
    from recast.core import schedule
    from recast.core.curves import GainCurves, remaining
    from recast.core.curves import compare as compare_curves
    from recast.report import tables

    a, b = GainCurves.load(first), GainCurves.load(second)
    if not resample and not schedule.same(a.sigmas, b.sigmas):
        raise RecastError(
            f"{first} (T = {a.steps}) and {second} (T = {b.steps}) lie on different grids: add --resample"
        )
    console.print(
        tables.comparison_table(compare_curves(a, b.resample(a.sigmas) if resample else b), str(first), str(second))
    )
    console.print(tables.remaining_table(remaining(a, b), str(first), str(second)))


@app.command()
def plot(
    gains: Annotated[Path, typer.Argument(help="gains.json to draw.")],
    budget: Budget = None,
    method: MethodName = "sinkhorn",
    tau: Tau = 1.0,
    shrink: Shrink = False,
    truth: Annotated[Path | None, typer.Option("--truth", help="Another gains.json to draw dotted.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File stem; default the name of the curves, beside them.")
    ] = None,
) -> None:
    """Draw the three-panel figure (gain, normalised gain, W) as PNG and PDF.

    Example: `recast plot gains.json --budget clipscore=1,ocr=2 --out figures/gains`
    """
    from recast.core.curves import GainCurves
    from recast.weigh import weigh as solve

    curves = GainCurves.load(gains)
    shares = _budget(budget, curves.rewards)
    weights = solve(curves, shares, method, tau=tau, shrink=shrink)  # type: ignore[arg-type]
    exact, exact_weights = None, None
    if truth is not None:
        exact = GainCurves.load(truth).select(curves.rewards)
        exact_weights = solve(exact, shares, method, tau=tau)  # type: ignore[arg-type]
    stem = gains.with_suffix("") if out is None else out
    stem = stem / "gains" if stem.is_dir() else stem
    stem = stem.with_suffix("") if stem.suffix in (".png", ".pdf") else stem
    for path in show.draw(curves, weights, stem, exact, exact_weights):
        console.print(f"wrote {path}", soft_wrap=True)


def _plan(settings: Any, out: Path) -> None:
    with needs("estimating", "train"):
        from recast.estimate import plan as planning

        made = planning.plan(settings, out)
    from recast.report import tables

    facts = {
        "prompts": made.prompts,
        "velocity evaluations": made.evaluations,
        "the paper's (Alg. 1, K = 16)": made.paper_evaluations,
        "images decoded": made.images,
        "reward calls": made.reward_calls,
        "time on this device, one process": duration(made.seconds),
    }
    console.print(tables.plan_table(facts))


def _budget(text: str | None, rewards: tuple[str, ...]) -> dict[str, float]:
    """`name=number,name=number` to a mapping; every reward alike when nothing is given."""
    if text is None:
        return dict.fromkeys(rewards, 1.0)
    budget: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not (equals and name) or not 0 <= value < float("inf"):
            raise RecastError(f"the budget {text!r} has {part!r}, where name=number with a number >= 0 is needed")
        if name in budget:
            raise RecastError(f"the budget {text!r} names {name} twice")
        budget[name] = value
    return budget


def main() -> None:
    """Entry point of the `recast` command."""
    end_with_parent()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without σ gets "?", not a traceback
    try:
        code = app(standalone_mode=False)
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            path = error.ctx.command_path if error.ctx else "recast"
            print(f"error: {error.format_message().rstrip('.')}. See '{path} --help'.", file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:  # newer typers turn an interrupt into this code themselves
        print("interrupted: run the same command again, and it goes on", file=sys.stderr)
    processes.part()
    sys.exit(code if isinstance(code, int) else 0)
