"""The grammar of the shapes world: about a thousand prompts, their meaning, and fixed splits.

The meaning of a prompt has GenEval's metadata format (`tag`, `include` with class, count, color and position), so both
kinds of files are loaded in the same way. The class is the shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from itertools import combinations, islice, product
from typing import Any, Literal

import numpy as np

from recast.errors import RecastError

__all__ = [
    "COLORS",
    "NUMBERS",
    "RELATIONS",
    "SHAPES",
    "SPLITS",
    "Split",
    "load",
    "meaning",
    "parse",
    "sentence",
    "write",
]

SHAPES = ("circle", "square", "triangle", "cross")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = ("a", "two", "three", "four")
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""`validation` is for model selection, `test` only for reporting."""

_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_PHRASE = re.compile(rf"({'|'.join(NUMBERS)}|an) ({'|'.join(COLORS)}) ({'|'.join(SHAPES)})(?:s|es)?")
_Include = dict[str, Any]
_TAGS = {
    "single": (20, 1, 3),
    "counting": (58, 5, 9),
    "colors": (175, 14, 27),
    "position": (408, 32, 64),
    "numbers": (155, 12, 25),
}
"""Number of prompts per kind in the three splits, with nearly the same shares in all."""


def load(split: Split) -> list[dict[str, Any]]:
    """The rows of a split in their fixed order: metadata, with the text under `prompt`."""
    if split not in SPLITS:
        raise RecastError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    text = files("recast.shapes").joinpath(f"data/prompts/{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def parse(prompt: str) -> tuple[_Include, ...]:
    """The `include` entries that a prompt of the grammar asks for."""
    text = " ".join(prompt.lower().split())
    for relation in RELATIONS:
        first, found, second = text.partition(f" {relation} ")
        if found:
            return _entry(second, prompt), _entry(first, prompt) | {"position": (relation, 0)}
    return tuple(_entry(part, prompt) for part in text.split(" and "))


def _entry(text: str, prompt: str) -> _Include:
    match = _PHRASE.fullmatch(text)
    if match is not None:
        number, color, shape = match.groups()
        entry = {"class": shape, "count": NUMBERS.index("a" if number == "an" else number) + 1, "color": color}
        if _phrase(entry) == text:
            return entry
    raise RecastError(
        f"the prompt {prompt!r} is not in the grammar of the shapes world at {text!r}: use phrases like "
        f"'two red circles', joined by 'and' or by one of {', '.join(RELATIONS)}"
    )


def _phrase(entry: Mapping[str, Any]) -> str:
    """The phrase of an `include` entry, such as `two red circles`."""
    number = NUMBERS[entry["count"] - 1]
    article = "an" if number == "a" and entry["color"][0] in "aeiou" else number
    plural = "" if entry["count"] == 1 else "es" if entry["class"].endswith("s") else "s"
    return f"{article} {entry['color']} {entry['class']}{plural}"


def sentence(include: Iterable[Mapping[str, Any]]) -> str:
    """The prompt that asks for these entries; `parse` is its inverse."""
    entries = list(include)
    if "position" in entries[-1]:
        relation, target = entries[-1]["position"]
        return f"{_phrase(entries[-1])} {relation} {_phrase(entries[target])}"
    return " and ".join(map(_phrase, entries))


def meaning(include: Iterable[Mapping[str, Any]]) -> frozenset[Any]:
    """The meaning of the entries, independent of the words: "A left of B" equals "B right of A"."""
    entries = list(include)
    things = [(entry["count"], entry["color"], entry["class"]) for entry in entries]
    if "position" not in entries[-1]:
        return frozenset(things)
    relation = entries[-1]["position"][0]
    return frozenset([(things[1], relation), (things[0], _OPPOSITE[relation])])


def _generate(seed: int = 0) -> dict[Split, list[dict[str, Any]]]:
    """The shipped splits: no two prompts with the same meaning, and the same share of each kind."""
    rng = np.random.default_rng(seed)
    splits: dict[Split, list[dict[str, Any]]] = {name: [] for name in SPLITS}
    for tag, sizes in _TAGS.items():
        every = _every(tag, rng)
        chosen = iter(rng.permutation(len(every)))
        for name, size in zip(SPLITS, sizes, strict=True):
            for k in islice(chosen, size):
                splits[name].append({"tag": tag, "include": every[k], "prompt": sentence(every[k])})
    return {name: [rows[k] for k in rng.permutation(len(rows))] for name, rows in splits.items()}


def _every(tag: str, rng: np.random.Generator) -> list[list[_Include]]:
    """Every meaning of one kind once, in words chosen at random if there are several."""
    things = [{"class": shape, "color": color} for shape, color in product(SHAPES, COLORS)]
    single = [[{**thing, "count": count}] for count in range(1, len(NUMBERS) + 1) for thing in things]
    if tag == "single":
        return single[: len(things)]
    if tag == "counting":
        return single[len(things) :]
    pairs = []
    for first, second in combinations(things, 2):
        ordered = [first, second] if rng.random() < 0.5 else [second, first]
        if tag == "position":
            for relation in ("left of", "above"):
                worded = relation if rng.random() < 0.5 else _OPPOSITE[relation]
                a, b = ({**thing, "count": 1} for thing in ordered)
                pairs.append([b, {**a, "position": [worded, 0]}])
                worded = _OPPOSITE[worded]
                pairs.append([b, {**a, "position": [worded, 0]}])
        else:
            counts = [(1, 1)] if tag == "colors" else [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2)]
            pairs += [[{**thing, "count": n} for thing, n in zip(ordered, ns, strict=True)] for ns in counts]
    return pairs


def write(folder: Any, seed: int = 0) -> None:
    """Write the splits as `SPLIT.jsonl` with metadata, and as `SPLIT.txt` with the prompts only."""
    for name, rows in _generate(seed).items():
        lines = [json.dumps({key: row[key] for key in ("tag", "include", "prompt")}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / f"{name}.txt").write_text("\n".join(row["prompt"] for row in rows) + "\n", encoding="utf-8")
