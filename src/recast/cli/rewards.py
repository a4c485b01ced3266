"""`recast rewards`: which rewards there are, what they still need, and whether they work."""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.console import console, needs
from recast.errors import RecastError
from recast.rewards import base, catalog

app = typer.Typer(
    help="Which rewards there are, what they need, and whether they work.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("list")
def list_all() -> None:
    """Every reward by its short name: what it is, its range, and the commands that get what is missing here.

    Example: `recast rewards list`
    """
    missing = {name: entry.missing() for name, entry in catalog.ENTRIES.items()}
    console.print(tables.rewards_table(catalog.ENTRIES, missing))
    commands: dict[str, list[str]] = {}
    for name, found in missing.items():
        for command in found:
            commands.setdefault(command, []).append(name)
    for command, names in commands.items():
        console.print(f"\n# for {', '.join(names)}\n{command}", soft_wrap=True)
    for name, entry in catalog.ENTRIES.items():
        if entry.remark:
            console.print(f"\n{name} {entry.remark}", soft_wrap=True)
    console.print("\nYour own: package.module:Object, a class or a function; see docs/rewards.md", soft_wrap=True)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="A short name, or package.module:Object.", show_default=False)],
    options: Annotated[
        list[str] | None, typer.Argument(help="The reward's options, as key=value.", show_default=False)
    ] = None,
) -> None:
    """Load a reward and score drawn pictures whose order is known; fails where the order is wrong.

    Example: `recast rewards check ocr`

    With weights of one's own: `recast rewards check hpsv2 weights=models/HPS_v2.1_compressed.pt device=cpu`
    """
    from recast import config

    base.find(name)
    settings = config.options(options or [])
    try:
        with needs(f"the reward {name}", "rewards"):
            from recast.rewards import check as trials

            outcomes = trials.run(name, settings)
    except RecastError as error:
        commands = catalog.ENTRIES[name].missing() if name in catalog.ENTRIES and not settings else []
        commands = [command for command in commands if command not in str(error)]
        hint = f"; get what is missing with: {' && '.join(commands)}" if commands else ""
        raise RecastError(f"{error}{hint}") from error
    console.print(tables.check_table(outcomes))
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    if wrong:
        same = all(outcome.better == outcome.worse for outcome in wrong)
        reason = "it gives the same score whatever it sees" if same else "wrong weights, or a broken installation"
        raise RecastError(f"the reward {name!r} failed {len(wrong)} of {len(outcomes)} trials: {reason}")
    console.print(f"{name} passed {len(outcomes)} of {len(outcomes)} trials")
