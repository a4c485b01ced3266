"""The verb `integrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli.console import console
from recast.errors import RecastError
from recast.integrations import diffusion_nft, flow_grpo, scripts

__all__ = ["integrate"]

PEERS = {peer.name: peer for peer in (diffusion_nft.PEER, flow_grpo.PEER)}


def integrate(
    trainer: Annotated[str, typer.Argument(help="diffusion_nft or flow_grpo.", show_default=False)],
    path: Annotated[Path, typer.Option("--path", help="The trainer's repository.", show_default=False)],
    check: Annotated[bool, typer.Option("--check", help="Only say whether W is in the script, or can be.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Insert three lines into the script.")] = False,
    revert: Annotated[bool, typer.Option("--revert", help="Take the lines out: the same bytes as before.")] = False,
    script: Annotated[
        str | None,
        typer.Option("--script", help="Another script of the repository.", show_default="the one that was tried"),
    ] = None,
) -> None:
    """Put W into the training script of another repository, or take it out again.

    Example: `recast integrate diffusion_nft --path DiffusionNFT --apply`

    Flow-Factory and verl-omni need no edit; see the guide *W in your own trainer*.
    """
    if trainer not in PEERS:
        raise RecastError(f"there is no edit for {trainer!r}: choose {' or '.join(PEERS)}")
    if check + apply + revert > 1:
        raise RecastError("choose one of --check, --apply and --revert")
    peer = PEERS[trainer]
    file = path / (script or peer.script)
    if apply:
        scripts.apply(peer, file)
        console.print(f"edited {file}: set RECAST_WEIGHTS to a weights.json and train as before", soft_wrap=True)
    elif revert:
        scripts.revert(peer, file)
        console.print(f"reverted {file}", soft_wrap=True)
    else:
        found = {"plain": "can be edited: --apply", "edited": "is edited: --revert takes the lines out"}
        console.print(f"{file} {found[scripts.state(peer, file)]} (tried at {peer.tried[:7]})", soft_wrap=True)
