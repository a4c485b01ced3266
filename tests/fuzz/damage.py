"""Damage to files: bytes cut, flipped and inserted, lines lost and repeated, and values of JSON replaced by others."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import yaml

from recast.core import artifact

__all__ = ["RESEALED", "damaged"]

RESEALED = "resealed"
"""Begins the names of damages whose checksums fit."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, "text", "", "7", "../../elsewhere", "\ud800", [], {}, [[1, 2], [3]], {"a": {"b": 1}}),
    *(float("nan"), float("inf"), -1, 0, 1, 2, 0.5, 1e308, 10**30, 10**400, [None] * 3),
)
_TWICE = "key-twice"


def damaged(content: bytes, suffix: str, chance: random.Random) -> tuple[bytes, str]:
    """The content with one damage, and the name of the damage; by its suffix it is JSON, JSONL, YAML or neither."""
    ways: list[Callable[[bytes, random.Random], bytes]] = [cut, lose, flip, insert, zero]
    if suffix in (".json", ".jsonl", ".yaml"):
        ways += [_structured(suffix, way) for way in (replace, another_number, remove, repeat_key, nest)] * 2
    if suffix in (".json", ".jsonl"):
        ways += [_resealed(suffix, way) for way in (replace, another_number, remove, nest)]
    if suffix == ".jsonl":
        ways += [lose_line, repeat_line, swap_lines]
    for _ in range(100):
        way = chance.choice(ways)
        found = way(content, chance)
        if found != content:
            return found, way.__name__
    raise AssertionError("nothing changes this file")


def cut(content: bytes, chance: random.Random) -> bytes:
    """Without its end."""
    return content[: chance.randrange(len(content))]


def lose(content: bytes, chance: random.Random) -> bytes:
    """Without a few bytes."""
    start = _place(content, chance)
    return content[:start] + content[start + chance.randint(1, 16) :]


def flip(content: bytes, chance: random.Random) -> bytes:
    """With one bit flipped."""
    place = _place(content, chance)
    return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]


def insert(content: bytes, chance: random.Random) -> bytes:
    """With a few bytes more."""
    place = _place(content, chance)
    text = chance.choice([b"\0", b"9", b",", b"\n", b"\xff\xfe", b"}", b'"', b"0" * 500, chance.randbytes(4)])
    return content[:place] + text + content[place:]


def zero(content: bytes, chance: random.Random) -> bytes:
    """With a block of zeros, as a file system leaves one after a power failure."""
    place, size = _place(content, chance), chance.randint(1, 64)
    return content[:place] + bytes(len(content[place : place + size])) + content[place + size :]


def _place(content: bytes, chance: random.Random) -> int:
    """Anywhere, or every other time near the beginning, where a binary file has its header."""
    return chance.randrange(min(len(content), 400) if chance.random() < 0.5 else len(content))


def _structured(suffix: str, way: Callable[[Any, random.Random], Any]) -> Callable[[bytes, random.Random], bytes]:
    def change(content: bytes, chance: random.Random) -> bytes:
        if suffix == ".jsonl":
            lines = content.decode().removesuffix("\n").split("\n")
            k = chance.randrange(len(lines))
            lines[k] = _changed(json.loads(lines[k]), way, chance)
            return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
        tree = yaml.safe_load(content) if suffix == ".yaml" else json.loads(content)
        return _changed(tree, way, chance).encode("utf-8", "surrogatepass")

    change.__name__ = way.__name__
    return change


def _resealed(suffix: str, way: Callable[[Any, random.Random], Any]) -> Callable[[bytes, random.Random], bytes]:
    """The same change, with checksums that fit it: what a program or a person writes who knows the format."""

    def change(content: bytes, chance: random.Random) -> bytes:
        try:
            text = _structured(suffix, way)(content, chance).decode()
            rows = [json.loads(each) for each in ([text] if suffix == ".json" else text.splitlines())]
            if not all(isinstance(row, dict) for row in rows):
                return content
            for row in rows:
                row.pop(artifact.CHECKSUM, None)
            if suffix == ".jsonl":
                return artifact.lines(rows).encode()
            return json.dumps(rows[0] | {artifact.CHECKSUM: artifact.checksum(rows[0])}).encode()
        except (ValueError, TypeError, UnicodeError, RecursionError):
            return content

    change.__name__ = f"{RESEALED} {way.__name__}"
    return change


def _changed(tree: Any, way: Callable[[Any, random.Random], Any], chance: random.Random) -> str:
    tree = copy.deepcopy(tree)
    nodes = list(_nodes(tree))
    if not nodes:
        return json.dumps(tree)
    # Level by level, so that a long array does not hide the fields beside it.
    depth = chance.choice(sorted({each[0] for each in nodes}))
    _, holder, key = chance.choice([each for each in nodes if each[0] == depth])
    way((holder, key), chance)
    text = json.dumps(tree)
    return text.replace(f'"{_TWICE}"', json.dumps(key)) if way is repeat_key else text


def _nodes(tree: Any, depth: int = 0) -> Any:
    """Every (depth, holder, key) below a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield depth, tree, key
        yield from _nodes(value, depth + 1)


def replace(node: Any, chance: random.Random) -> None:
    """Another value, mostly of another type."""
    holder, key = node
    holder[key] = chance.choice(VALUES)


def another_number(node: Any, chance: random.Random) -> None:
    """A number that is only a little different, or a text with another letter."""
    holder, key = node
    value = holder[key]
    if isinstance(value, float):
        holder[key] = value + chance.choice([1e-3, -1e-3, 1.0])
    elif isinstance(value, int) and not isinstance(value, bool):
        holder[key] = value + chance.choice([1, -1, 10])
    elif isinstance(value, str):
        holder[key] = value + "x"
    else:
        holder[key] = None


def remove(node: Any, chance: random.Random) -> None:
    """Without a key or an item."""
    del node[0][node[1]]


def repeat_key(node: Any, chance: random.Random) -> None:
    """A key twice with different values; in a list, an item twice."""
    holder, key = node
    if isinstance(holder, dict):
        holder[_TWICE] = chance.choice(VALUES)
    else:
        holder.insert(key, holder[key])


def nest(node: Any, chance: random.Random) -> None:
    """A value inside many lists."""
    holder, key = node
    for _ in range(chance.choice([1, 2, 400])):
        holder[key] = [holder[key]]


def lose_line(content: bytes, chance: random.Random) -> bytes:
    """Without a line."""
    lines = content.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def repeat_line(content: bytes, chance: random.Random) -> bytes:
    """A line twice."""
    lines = content.splitlines(keepends=True)
    k = chance.randrange(len(lines))
    return b"".join([*lines[: k + 1], lines[k], *lines[k + 1 :]])


def swap_lines(content: bytes, chance: random.Random) -> bytes:
    """Two lines in the other order."""
    lines = content.splitlines(keepends=True)
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)
