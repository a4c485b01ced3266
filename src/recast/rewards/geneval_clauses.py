"""What GenEval's metadata asks of an image, and which of it a list of detected objects confirms."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from recast.errors import RecastError

Mode = Literal["clauses", "strict", "partial"]
Kind = Literal["object", "count", "color", "position"]
Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right, bottom; the last two are past the end."""
Objects: TypeAlias = Mapping[str, Sequence[tuple[float, Box]]]
"""Score and box of each object, by class, the highest score first."""

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
MAX_OBJECTS = 16
"""Objects of one class that are looked at."""
# fmt: off
CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on
"""COCO's 80 classes in its order. GenEval has three names of its own: computer mouse, tv remote, computer keyboard."""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
_MARGIN, _CUT, _NOTHING = 0.1, 0.5, 1e-3


@dataclass(frozen=True)
class Entry:
    """`count` objects of a class, of a color and in a relation to an earlier entry where these are asked for."""

    name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


@dataclass(frozen=True)
class Request:
    """What one prompt asks for. Of a class in `exclude` there must be fewer than the number."""

    include: tuple[Entry, ...]
    exclude: tuple[tuple[str, int], ...] = ()
    counting: bool = False

    def counts(self, entry: Entry) -> bool:
        """Whether the entry has a count clause."""
        return self.counting or entry.count > 1 or any(name == entry.name for name, _ in self.exclude)


@dataclass(frozen=True)
class Clause:
    """One thing that the prompt asks of the objects of a class, and whether it was seen."""

    name: str
    kind: Kind
    confirmed: bool


@dataclass(frozen=True)
class Verdict:
    """The clauses of a prompt, the terms of its partial credit, and whether there are exactly as many of each class."""

    clauses: tuple[Clause, ...]
    terms: tuple[float, ...]
    exact: bool

    def score(self, mode: Mode) -> float:
        """A score in [0, 1]: see `recast.rewards.geneval.GenEval` for the modes."""
        confirmed = [clause.confirmed for clause in self.clauses]
        if mode == "clauses":
            return sum(confirmed) / len(confirmed)
        return float(self.exact and all(confirmed)) if mode == "strict" else sum(self.terms) / len(self.terms)


def parse(metadata: Mapping[str, Any] | None, prompt: str) -> Request | None:
    """What a row of GenEval's metadata asks for; None for a row without `include`.

    Anything malformed is an error: an unknown class, color, relation or key, a count that is no positive number, a
    position relative to anything but an earlier entry.
    """
    if not metadata or not metadata.get("include"):
        return None
    entries = tuple(_entry(row, k, prompt) for k, row in enumerate(_rows(metadata["include"], "include", prompt)))
    exclude = []
    for row in _rows(metadata.get("exclude") or [], "exclude", prompt):
        _check_keys(row, ("class", "count"), "exclude", prompt)
        exclude.append((_known("class", row.get("class"), CLASSES, prompt), _count(row.get("count"), None, prompt)))
    return Request(entries, tuple(exclude), metadata.get("tag") == "counting")


def _wrong(prompt: str, what: str) -> RecastError:
    return RecastError(f"the GenEval metadata of the prompt {prompt!r} cannot be used: {what}")


def _rows(value: Any, key: str, prompt: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list | tuple) or not all(isinstance(row, Mapping) for row in value):
        raise _wrong(prompt, f"{key!r} must be a list of objects with a class and a count, not {value!r}")
    return value


def _entry(row: Mapping[str, Any], number: int, prompt: str) -> Entry:
    _check_keys(row, ("class", "count", "color", "position"), "include", prompt)
    name = _known("class", row.get("class"), CLASSES, prompt)
    count = _count(row.get("count"), MAX_OBJECTS, prompt)
    color = None if row.get("color") is None else _known("color", row["color"], COLORS, prompt)
    place = row.get("position")
    if place is None:
        return Entry(name, count, color)
    if not isinstance(place, list | tuple) or len(place) != 2:
        raise _wrong(prompt, f"a position is a relation and the number of an earlier entry, not {place!r}")
    relation, target = _known("relation", place[0], RELATIONS, prompt), place[1]
    if type(target) is not int or not 0 <= target < number:
        earlier = f"from 0 to {number - 1}" if number > 1 else "0" if number else "none, as it is the first"
        raise _wrong(prompt, f"the position of entry {number} names entry {target!r}: the earlier ones are {earlier}")
    return Entry(name, count, color, (relation, target))


def _check_keys(row: Mapping[str, Any], known: Sequence[str], key: str, prompt: str) -> None:
    unknown = [each for each in row if each not in known]
    if unknown:
        raise _wrong(prompt, f"unknown key {unknown[0]!r} in {key!r}: an entry has {', '.join(known)}")


def _known(what: str, value: Any, known: Sequence[str], prompt: str) -> str:
    if value in known:
        return value
    if len(known) <= len(COLORS):
        raise _wrong(prompt, f"unknown {what} {value!r}: choose one of {', '.join(known)}")
    nearest = difflib.get_close_matches(str(value), known, 3, 0.0)
    raise _wrong(prompt, f"unknown {what} {value!r}: of the {len(known)} known the nearest are {', '.join(nearest)}")


def _count(value: Any, most: int | None, prompt: str) -> int:
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "of at least 1" if most is None else f"from 1 to {most}, the most objects of a class that are looked at"
        raise _wrong(prompt, f"a count is a whole number {limit}, not {value!r}")
    return value


def relations(box: Box, other: Box) -> frozenset[str]:
    """Where the first box lies, seen from the second: none, one or two of `RELATIONS`.

    The offset of the centres counts beyond a tenth of both boxes' sizes, as a part of its whole length: more than half.
    """
    offset = [(box[k] + box[k + 2] - other[k] - other[k + 2]) / 2 for k in (0, 1)]
    sizes = [box[k + 2] - box[k] + other[k + 2] - other[k] for k in (0, 1)]
    beyond = [max(abs(o) - _MARGIN * size, 0.0) for o, size in zip(offset, sizes, strict=True)]
    if max(beyond) < _NOTHING:
        return frozenset()
    length = math.hypot(*offset)
    pairs = zip((RELATIONS[:2], RELATIONS[2:]), offset, beyond, strict=True)
    return frozenset(names[o > 0] for names, o, part in pairs if part / length > _CUT)


def colored(request: Request, objects: Objects) -> dict[str, int]:
    """How many objects of which class need a color, the highest scores first."""
    wanted: dict[str, int] = {}
    for entry in request.include:
        if entry.color is not None and len(objects.get(entry.name, ())) >= entry.count:
            wanted[entry.name] = max(entry.count, wanted.get(entry.name, 0))
    return wanted


def judge(request: Request, objects: Objects, colors: Mapping[str, Sequence[str]]) -> Verdict:
    """Which clauses the objects confirm; `colors` has those of the objects that `colored` names, by class.

    Entries are judged on their own: two of the same class look at the same objects.
    """
    clauses: list[Clause] = []
    terms: list[float] = []
    groups: list[_Group | None] = []
    for entry in request.include:
        found = objects.get(entry.name, ())
        enough, exact = len(found) >= entry.count, len(found) == entry.count
        clauses.append(Clause(entry.name, "object", len(found) > 0))
        if request.counts(entry):
            fewer = all(len(found) < limit for name, limit in request.exclude if name == entry.name)
            clauses.append(Clause(entry.name, "count", enough and fewer))
        right = sum(color == entry.color for color in colors.get(entry.name, ())[: entry.count]) if enough else 0
        matched = enough and (entry.color is None or right == entry.count)
        group = _Group([box for _, box in found[: entry.count]], exact) if matched else None
        terms.append(max(0.0, 1 - abs(entry.count - len(found)) / entry.count))
        if not exact and (entry.color is not None or entry.position is not None):
            terms.append(0.0)
        if entry.color is not None:
            clauses.append(Clause(entry.name, "color", matched))
            terms += [right / entry.count] if exact else []
        if entry.position is not None:
            before, group = group, _placed(group, entry.position[0], groups[entry.position[1]])
            clauses.append(Clause(entry.name, "position", group is not None))
            terms += [float(group is not None and group.exact)] if before is not None and exact else []
        groups.append(group)
    named = {entry.name for entry in request.include}
    others = [(name, limit) for name, limit in request.exclude if name not in named]
    clauses += [Clause(name, "count", len(objects.get(name, ())) < limit) for name, limit in others]
    exactly = all(len(objects.get(entry.name, ())) == entry.count for entry in request.include)
    return Verdict(tuple(clauses), tuple(terms), exactly)


@dataclass(frozen=True)
class _Group:
    """Boxes of an entry whose clauses all hold, and whether there are exactly as many as asked for."""

    boxes: list[Box]
    exact: bool


def _placed(group: _Group | None, relation: str, target: _Group | None) -> _Group | None:
    """The group, if each of its boxes is in the relation to each of the target's."""
    if group is None or target is None:
        return None
    if not all(relation in relations(box, other) for box in group.boxes for other in target.boxes):
        return None
    return _Group(group.boxes, group.exact and target.exact)
