"""Which response a judge's text calls better on one criterion, read by patterns (data/patterns.json).

A text is split into sentences in which every name of a response is replaced by @A or @B. Hypothetical sentences are
skipped, and so are clauses that concede or negate. The rest is searched for verdicts ("@A is better", "the edge goes to
@B", "a draw") and, if there are none, for comparisons ("@A is more legible", "@B is not as sharp"). A side is returned
only if everything found agrees; None means that the text must be read in another way.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Literal

__all__ = ["side"]

Side = Literal["A", "B", "tie", "na"]
_LONGEST = 8000
"""Characters of the longest text that is read; a longer one is no answer to a question about one criterion."""
_DATA = json.loads((files("recast.judge") / "data/patterns.json").read_text(encoding="utf-8"))
_PARTS: dict[str, str] = {name: f"(?:{'|'.join(words)})" for name, words in _DATA["words"].items()} | _DATA["parts"]


def _expand(template: str) -> str:
    """A pattern with every {name} replaced by the part of that name."""
    return re.sub(r"\{([a-z_]+)\}", lambda match: _expand(_PARTS[match[1]]), template)


def _compile(template: str) -> re.Pattern[str]:
    return re.compile(_expand(template), re.IGNORECASE)


_QUOTED = re.compile(r"\"[^\"\n]*\"|“[^”\n]*”|(?<!\w)['‘][^'’\n]*['’](?!\w)")
_MARKUP = re.compile(r"[*`#\[\]]+")
_NAMES = tuple((_compile(each["pattern"]), each["sides"]) for each in _DATA["responses"])
_BARE = re.compile(_expand(_DATA["bare"]))
_SUPPOSED, _CONCEDED, _CONCLUDED, _DENIED, _TIED, _NOT_APPLICABLE = (
    _compile(_DATA["sentences"][name])
    for name in ("supposed", "conceded", "concluded", "denied", "tied", "not_applicable")
)
# A pattern names one response; the flag tells whether the other one is the better.
_VERDICTS, _COMPARISONS = (
    tuple((_compile(each["pattern"]), each["better"] == "other") for each in _DATA[kind])
    for kind in ("verdicts", "comparisons")
)


def side(text: str) -> Side | None:
    """The response that a criterion's text calls better, "tie", "na" (not applicable), or None if undecided.

    >>> side("Although A has richer colours, Response B is clearly better."), side("Both are equal."), side("N/A")
    ('B', 'tie', 'na')
    >>> side("Response A has two crates, Response B has three.") is None
    True
    """
    if len(text) > _LONGEST:
        return None
    stated = [sentence for sentence in _sentences(text) if not _SUPPOSED.search(sentence)]
    last = [sentence for sentence in stated[-1:] if _CONCLUDED.search(sentence) and not _TIED.search(sentence)]
    if last and len(concluded := _claims(last[0], _VERDICTS)) == 1:
        return concluded.pop()
    verdicts = {found for sentence in stated for found in _claims(sentence, _VERDICTS)}
    tied = any(_TIED.search(sentence) for sentence in stated)
    if _NOT_APPLICABLE.search(text):
        return None if verdicts else "na"
    if tied:
        return None if verdicts else "tie"
    found = verdicts or {found for sentence in stated for found in _claims(sentence, _COMPARISONS)}
    return found.pop() if len(found) == 1 else None


def _sentences(text: str) -> list[str]:
    """Sentences without quotations and emphasis, names of responses as @A and @B."""
    text = _QUOTED.sub(" ", _MARKUP.sub(" ", text.replace("_", " ")))
    for pattern, sides in _NAMES:
        text = pattern.sub(lambda match, sides=sides: f"@{sides[match[1].lower()]}", text)  # type: ignore[misc]
    text = _BARE.sub(lambda match: "@" + next(filter(None, match.groups())), text)
    return [" ".join(part.split()) for part in re.split(r"(?<=[.!?;])\s+|\n+", text) if part.strip()]


def _claims(sentence: str, patterns: tuple[tuple[re.Pattern[str], bool], ...]) -> set[Literal["A", "B"]]:
    """The sides that a sentence calls better; none where it negates."""
    kept = _CONCEDED.sub(" ", sentence)
    kept = kept if "@" in kept else sentence
    found: set[Literal["A", "B"]] = set()
    for pattern, turned in patterns:
        for match in pattern.finditer(kept):
            is_a = next(filter(None, match.groups())).upper() == "A"
            before = kept[: match.start()].rsplit(",", 1)[-1] + ("" if turned else match[0])
            if not _DENIED.search(before):
                found.add("A" if is_a != turned else "B")
    return found
