"""The clauses in GenEval's metadata, and which of them the detected objects of an image confirm."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

from recast.errors import RecastError

__all__ = [
    "CLASSES",
    "COLORS",
    "MAX_OBJECTS",
    "RELATIONS",
    "TAGS",
    "Assessment",
    "Clause",
    "Entry",
    "Mode",
    "Objects",
    "Request",
    "assess",
    "colored",
    "parse",
    "relations",
]

Mode = Literal["clauses", "nft", "correct", "strict"]
_Kind = Literal["object", "count", "color", "position"]
_Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right, bottom; the last two are exclusive."""
Objects: TypeAlias = Mapping[str, Sequence[tuple[float, _Box]]]
"""Score and box of each detected object by class, in descending order of the score."""

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
MAX_OBJECTS = 16
"""Objects of one class that are considered."""
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
"""COCO's 80 classes in its order; GenEval renames three: computer mouse, tv remote, computer keyboard."""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
_MARGIN, _MIN_SHARE, _MIN_OFFSET = 0.1, 0.5, 1e-3


@dataclass(frozen=True)
class Entry:
    """`count` objects of a class; optionally with a color, and in a relation to an earlier entry."""

    name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


@dataclass(frozen=True)
class Request:
    """What one prompt asks for. There must be fewer objects of a class in `exclude` than its number."""

    include: tuple[Entry, ...]
    exclude: tuple[tuple[str, int], ...] = ()
    counting: bool = False

    def counts(self, entry: Entry) -> bool:
        """Whether the entry has a count clause."""
        return self.counting or entry.count > 1 or any(name == entry.name for name, _ in self.exclude)


@dataclass(frozen=True)
class Clause:
    """One requirement on the objects of a class, and whether the detections confirm it."""

    name: str
    kind: _Kind
    confirmed: bool


@dataclass(frozen=True)
class Assessment:
    """What each mode of the score is made of.

    `clauses` of the prompt; `exact`: every entry has exactly its count; `terms` of the mode `nft`.
    """

    clauses: tuple[Clause, ...]
    exact: bool
    terms: tuple[float, ...]

    def score(self, mode: Mode) -> float:
        """A score of at most 1; `recast.rewards.geneval.GenEval` defines the modes."""
        if mode == "nft":
            return sum(self.terms) / len(self.terms)
        confirmed = [clause.confirmed for clause in self.clauses]
        if mode == "clauses":
            return sum(confirmed) / len(confirmed)
        return float(all(confirmed) and (mode == "correct" or self.exact))


def parse(metadata: Mapping[str, Any] | None, prompt: str) -> Request | None:
    """The request in a row of GenEval's metadata; None for a row without `include`.

    Raises RecastError for malformed metadata: an unknown class, color, relation or key, a count that is not a positive
    integer, or a position relative to anything but an earlier entry.
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
        limit = (
            "of at least 1" if most is None else f"from 1 to {most}, the most objects of a class that are considered"
        )
        raise _wrong(prompt, f"a count is an integer {limit}, not {value!r}")
    return value


def relations(box: _Box, other: _Box) -> frozenset[str]:
    """The relations of the first box to the second: zero, one or two of `RELATIONS`.

    The offset of the centers along an axis is reduced by a tenth of both boxes' sizes; a relation holds if more than
    half of the length of the whole offset remains.
    """
    offset = [(box[k] + box[k + 2] - other[k] - other[k + 2]) / 2 for k in (0, 1)]
    sizes = [box[k + 2] - box[k] + other[k + 2] - other[k] for k in (0, 1)]
    beyond = [max(abs(o) - _MARGIN * size, 0.0) for o, size in zip(offset, sizes, strict=True)]
    if max(beyond) < _MIN_OFFSET:
        return frozenset()
    length = math.hypot(*offset)
    pairs = zip((RELATIONS[:2], RELATIONS[2:]), offset, beyond, strict=True)
    return frozenset(names[o > 0] for names, o, part in pairs if part / length > _MIN_SHARE)


def colored(request: Request, objects: Objects) -> dict[str, int]:
    """Number of objects per class, in descending order of the score, whose color has to be known."""
    wanted: dict[str, int] = {}
    for entry in request.include:
        if entry.color is not None and len(objects.get(entry.name, ())) >= entry.count:
            wanted[entry.name] = max(entry.count, wanted.get(entry.name, 0))
    return wanted


def assess(request: Request, objects: Objects, colors: Mapping[str, Sequence[str]]) -> Assessment:
    """What the objects confirm of a request; `colors`, by class, are those of the objects that `colored` names.

    Entries are assessed independently of each other: two entries of one class consider the same objects.
    """
    matches = [_match(entry, objects, colors) for entry in request.include]
    placed = _placed(matches)
    exactly = [holds and exact for holds, exact in zip(placed, _counted_exactly(matches), strict=True)]
    clauses = [*_entry_clauses(request, matches, placed), *_exclude_clauses(request, objects)]
    terms = [term for match, holds in zip(matches, placed, strict=True) for term in _terms(match, holds, exactly)]
    return Assessment(tuple(clauses), all(match.exact for match in matches), tuple(terms))


@dataclass(frozen=True)
class _Match:
    """An entry and the objects of its class.

    `found` objects in all; `boxes` of the best `count`, of which `right` have the color (0 if there are too few).
    """

    entry: Entry
    found: int
    boxes: tuple[_Box, ...]
    right: int

    @property
    def enough(self) -> bool:
        return self.found >= self.entry.count

    @property
    def exact(self) -> bool:
        return self.found == self.entry.count

    @property
    def in_color(self) -> bool:
        """Whether there are enough objects and the best `count` have the color, if one is asked for."""
        return self.enough and (self.entry.color is None or self.right == self.entry.count)


def _match(entry: Entry, objects: Objects, colors: Mapping[str, Sequence[str]]) -> _Match:
    found = objects.get(entry.name, ())
    boxes = tuple(box for _, box in found[: entry.count])
    seen = colors.get(entry.name, ())[: entry.count] if len(found) >= entry.count else ()
    return _Match(entry, len(found), boxes, sum(color == entry.color for color in seen))


def _placed(matches: Sequence[_Match]) -> list[bool]:
    """Per entry, whether its objects are there in their color and position; the target must be, too."""
    placed: list[bool] = []
    for match in matches:
        holds = match.in_color
        if match.entry.position is not None:
            relation, target = match.entry.position
            pairs = product(match.boxes, matches[target].boxes)
            holds = holds and placed[target] and all(relation in relations(*pair) for pair in pairs)
        placed.append(holds)
    return placed


def _counted_exactly(matches: Sequence[_Match]) -> list[bool]:
    """Per entry, whether it and all entries that its position depends on have exactly their counts."""
    exact: list[bool] = []
    for match in matches:
        exact.append(match.exact and (match.entry.position is None or exact[match.entry.position[1]]))
    return exact


def _entry_clauses(request: Request, matches: Sequence[_Match], placed: Sequence[bool]) -> Iterator[Clause]:
    for match, holds in zip(matches, placed, strict=True):
        entry = match.entry
        yield Clause(entry.name, "object", match.found > 0)
        if request.counts(entry):
            below = all(match.found < limit for name, limit in request.exclude if name == entry.name)
            yield Clause(entry.name, "count", match.enough and below)
        if entry.color is not None:
            yield Clause(entry.name, "color", match.in_color)
        if entry.position is not None:
            yield Clause(entry.name, "position", holds)


def _exclude_clauses(request: Request, objects: Objects) -> Iterator[Clause]:
    """Count clauses of the classes that only `exclude` names."""
    included = {entry.name for entry in request.include}
    for name, limit in request.exclude:
        if name not in included:
            yield Clause(name, "count", len(objects.get(name, ())) < limit)


def _terms(match: _Match, holds: bool, exactly: Sequence[bool]) -> Iterator[float]:
    """Terms of one entry in the mode `nft`; `holds`: its objects are there in their color and position.

    `exactly`: per entry, the same and the count is exact.
    """
    entry = match.entry
    yield 1 - abs(entry.count - match.found) / entry.count
    if not match.exact:
        if entry.color is not None or entry.position is not None:
            yield 0.0
        return
    if entry.color is not None:
        yield match.right / entry.count
    if entry.position is not None and match.in_color:
        known = exactly[entry.position[1]]
        if not (known and holds):
            yield 0.0
        if known:
            yield 1.0  # also after a 0 for a wrong relation: the published function adds both
