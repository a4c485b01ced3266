"""The verb `rewards`: the available rewards, what they need, and whether they work."""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.console import console, needs
from recast.errors import RecastError
from recast.rewards import base, catalog

__all__ = ["app"]

app = typer.Typer(
    help="List the available rewards, and test them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("list")
def list_all() -> None:
    """List every reward with its range, and the commands that install or download what is missing.

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
    custom = "Custom rewards: package.module:Object, a class or a function; see docs/guides/own-reward.md"
    console.print(f"\n{custom}", soft_wrap=True)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="A short name, or package.module:Object.", show_default=False)],
    options: Annotated[
        list[str] | None, typer.Argument(help="Options of the reward, as key=value.", show_default=False)
    ] = None,
) -> None:
    """Load a reward and score images whose order is known; fail if the order is wrong.

    Example: `recast rewards check ocr`

    With a local checkpoint: `recast rewards check hpsv2 checkpoint=models/HPS_v2.1_compressed.pt device=cpu`
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
        hint = f"; get the missing parts with: {' && '.join(commands)}" if commands else ""
        raise RecastError(f"{error}{hint}") from error
    console.print(tables.check_table(outcomes))
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    if wrong:
        same = all(outcome.better == outcome.worse for outcome in wrong)
        reason = "it gives every image the same score" if same else "wrong checkpoint, or a broken installation"
        raise RecastError(f"the reward {name!r} failed {len(wrong)} of {len(outcomes)} trials: {reason}")
    console.print(f"{name} passed {len(outcomes)} of {len(outcomes)} trials")
