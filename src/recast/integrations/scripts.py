"""Edits of training scripts that have no place to hook into: whole lines that are inserted, and taken out again.

Places are found by what a statement does, in its syntax tree, so that another version of the script is edited too as
long as it does the same. Every inserted line ends in a mark, by which it is recognized and removed.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from recast.core import artifact
from recast.errors import RecastError

__all__ = ["MARK", "Peer", "Place", "State", "after_advantages", "after_shuffle", "apply", "revert", "state"]

MARK = "# recast"
State = Literal["plain", "edited"]


class _Line(NamedTuple):
    """Code that is inserted after a statement, at its indentation."""

    after: ast.stmt
    code: str


@dataclass(frozen=True)
class Place:
    """A statement that must occur once in a script: what it does, and how it is found and followed."""

    what: str
    follow: Callable[[ast.stmt], str | None]

    def find(self, tree: ast.Module, path: Path) -> _Line:
        """The line that follows the statement; an error if none or several statements do this."""
        found = [_Line(node, code) for node in _statements(tree) if (code := self.follow(node)) is not None]
        if len(found) != 1:
            count = "no statement" if not found else f"{len(found)} statements (lines {_lines(found)})"
            raise RecastError(
                f"{path} has moved on: {count} {self.what}, where one was expected; use recast.integrations.Mixer by "
                "hand, as docs/guides/integrate.md shows"
            )
        return found[0]


@dataclass(frozen=True)
class Peer:
    """A trainer whose script is edited.

    Parameters
    ----------
    name : str
        The module of `recast.integrations` that the inserted lines call.
    script : str
        The script, relative to the repository.
    tried : str
        The commit whose script was edited and run.
    slots : Place
        Where the trainer's slots are in their final order, beside a table of advantages.
    """

    name: str
    script: str
    tried: str
    slots: Place

    @property
    def places(self) -> tuple[Place, ...]:
        """All places, in any order."""
        return (Place("imports PerPromptStatTracker", self._after_import), _TABLE, self.slots)

    def _after_import(self, node: ast.stmt) -> str | None:
        if isinstance(node, ast.ImportFrom) and "PerPromptStatTracker" in [alias.name for alias in node.names]:
            return f"from recast.integrations import {self.name} as recast_peer"
        return None


def apply(peer: Peer, path: Path) -> None:
    """Insert the lines into the script at `path`, atomically; an error if they are there or have no place."""
    if state(peer, path) == "edited":
        raise RecastError(f"{path} is edited already: --revert takes the lines out")
    plain = _read(path)
    _write(path, _edited(peer, plain, path))


def revert(peer: Peer, path: Path) -> None:
    """Take the lines out of the script at `path` again, atomically; an error if there are none."""
    content = _read(path)
    plain = _without(content)
    if plain == content:
        raise RecastError(f"{path} is not edited: there is nothing to take out")
    _write(path, plain)


def state(peer: Peer, path: Path) -> State:
    """Whether the script is edited; an error if it cannot be, or holds only some of the lines."""
    content = _read(path)
    plain = _without(content)
    edited = _edited(peer, plain, path)
    if content not in (plain, edited):
        raise RecastError(f"{path} holds other marked lines than this version inserts: --revert takes them out")
    return "plain" if content == plain else "edited"


def _edited(peer: Peer, plain: bytes, path: Path) -> bytes:
    try:
        tree = ast.parse(plain)
    except SyntaxError as error:
        raise RecastError(f"{path} is not Python: {error}") from error
    lines = plain.splitlines(keepends=True)
    newline = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    for after, code in sorted((place.find(tree, path) for place in peer.places), key=_last, reverse=True):
        indent = lines[after.lineno - 1][: after.col_offset]
        lines.insert(_last(_Line(after, code)), indent + f"{code}  {MARK}".encode() + newline)
    edited = b"".join(lines)
    if not _parses(edited) or _without(edited) != plain:
        raise RecastError(f"{path} cannot be edited: a statement shares its last line with another one")
    return edited


def _parses(content: bytes) -> bool:
    try:
        ast.parse(content)
    except SyntaxError:
        return False
    return True


def _without(content: bytes) -> bytes:
    return b"".join(
        line for line in content.splitlines(keepends=True) if not line.rstrip().endswith(f"  {MARK}".encode())
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecastError(f"{path}: cannot be read: {error.strerror or error}; --path is the repository") from error


def _write(path: Path, content: bytes) -> None:
    mode = path.stat().st_mode
    artifact.write_bytes(path, content)
    os.chmod(path, mode)  # a script may be executable


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _last(line: _Line) -> int:
    return line.after.end_lineno or line.after.lineno


def _lines(found: Sequence[_Line]) -> str:
    return ", ".join(str(line.after.lineno) for line in found)


def _after_tracker(node: ast.stmt) -> str | None:
    """advantages = tracker.update(prompts, rewards["avg"]): all samples' rewards and prompts are at hand."""
    match node:
        case ast.Assign(
            targets=[ast.Name(id=result)],
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id=tracker), attr="update"),
                args=[
                    ast.Name(id=prompts),
                    ast.Subscript(value=ast.Name(id=rewards), slice=ast.Constant(value="avg")),
                    *_,
                ],
            ),
        ):
            return f"{result} = recast_peer.table({prompts}, {rewards}, {tracker}.global_std)"
    return None


_TABLE = Place('assigns what a tracker\'s update(prompts, rewards["avg"]) returns', _after_tracker)


def after_shuffle(node: ast.stmt) -> str | None:
    """for key in ["timesteps", …]: samples[key] = …, the shuffle of the slots."""
    match node:
        case ast.For(
            target=ast.Name(id=key),
            iter=ast.List(elts=[*names]) | ast.Tuple(elts=[*names]),
            body=[ast.Assign(targets=[ast.Subscript(value=ast.Name(id=samples), slice=ast.Name(id=index))]), *_],
        ) if key == index and any(isinstance(name, ast.Constant) and name.value == "timesteps" for name in names):
            return _slots(samples)
    return None


def after_advantages(node: ast.stmt) -> str | None:
    """samples["advantages"] = …, where slots are not shuffled."""
    match node:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=samples), slice=ast.Constant(value="advantages"))]):
            return _slots(samples)
    return None


def _slots(samples: str) -> str:
    return f'{samples}["advantages"] = recast_peer.slots({samples}["advantages"], {samples}["timesteps"])'
