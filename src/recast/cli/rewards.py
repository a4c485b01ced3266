"""The verb `rewards`: the available rewards, what they need, and whether they work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli import tables
from recast.cli.console import console, needs
from recast.errors import RecastError
from recast.rewards import base, catalog, inventory
from recast.rewards import setup as published

__all__ = ["app"]

app = typer.Typer(
    help="List the available rewards, test them, and set up the two that need a text of their authors.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("list")
def list_all() -> None:
    """List every reward with its range and cost, and the commands that install or download what is missing.

    Example: `recast rewards list`
    """
    missing = {name: entry.missing() for name, entry in catalog.ENTRIES.items()}
    console.print(tables.rewards_table(catalog.ENTRIES, missing, catalog.measured()))
    console.print(f"\n{catalog.COST}", soft_wrap=True)
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
    """Load a reward, name what decides its scores, and score images whose order is known; fail if it is wrong.

    Example: `recast rewards check ocr`

    With a local checkpoint: `recast rewards check hpsv2 checkpoint=models/HPS_v2.1_compressed.pt device=cpu`
    """
    from recast import config

    base.find(name)
    settings = config.options(options or [])
    try:
        with needs(f"the reward {name}", "rewards"):
            from recast.rewards import check as trials

            outcomes, facts = trials.run(name, settings), inventory.rows(name, settings)
    except RecastError as error:
        commands = catalog.ENTRIES[name].missing() if name in catalog.ENTRIES and not settings else []
        commands = [command for command in commands if command not in str(error)]
        hint = f"; get the missing parts with: {' && '.join(commands)}" if commands else ""
        raise RecastError(f"{error}{hint}") from error
    console.print(tables.versions_table(facts))
    console.print(tables.check_table(outcomes))
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    if wrong:
        same = all(outcome.better == outcome.worse for outcome in wrong)
        reason = "it gives every image the same score" if same else "wrong checkpoint, or a broken installation"
        raise RecastError(f"the reward {name!r} failed {len(wrong)} of {len(outcomes)} trials: {reason}")
    console.print(f"{name} passed {len(outcomes)} of {len(outcomes)} trials")


@app.command()
def setup(
    name: Annotated[str, typer.Argument(help="unifiedreward or hpsv3.", show_default=False)],
    copy: Annotated[
        Path, typer.Option("--from", help="A clone of the published repository, or a wheel.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; by default the one that the reward finds by itself.", show_default=False),
    ] = None,
) -> None:
    """Take the template or instruction of a reward out of your copy of the published code, which is not run.

    UnifiedReward's template and HPSv3's instruction are texts of their authors and not part of this package.

    Example: `recast rewards setup unifiedreward --from UnifiedReward`, a clone of github.com/CodeGoat24/UnifiedReward

    From a wheel (`pip download --no-deps hpsv3==1.0.0`):
    `recast rewards setup hpsv3 --from hpsv3-1.0.0-py3-none-any.whl`
    """
    path, text = published.store(name, copy, out)
    source = published.SOURCES[name]
    console.print(f"{path}: the {source.option} of {source.origin}, {len(text)} characters", soft_wrap=True)
    console.print(f"SHA-256 {published.digest(text)}", soft_wrap=True)
    use = "by default" if out is None else f"with this line of a recipe:\n{name}: {{{source.option}: {path}}}"
    console.print(f"{name} uses it {use}", soft_wrap=True)
