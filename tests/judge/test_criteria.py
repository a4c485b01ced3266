"""How well the patterns read sentences: labelled ones, half of which nobody had seen when the patterns were fixed."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from recast.judge.criteria import side

ROWS = [
    json.loads(line) for line in (Path(__file__).parent / "sentences.jsonl").read_text(encoding="utf-8").splitlines()
]


def measured(split: str) -> tuple[int, int, int]:
    """Sentences, those the patterns decide, and those they decide rightly."""
    rows = [row for row in ROWS if row["split"] == split]
    found = [(side(row["text"]), row["label"]) for row in rows]
    decided = [(said, label) for said, label in found if said is not None]
    return len(rows), len(decided), sum(said == label for said, label in decided)


def test_the_file_is_large_varied_and_half_unseen() -> None:
    assert len({row["text"] for row in ROWS}) == len(ROWS) >= 120
    assert 2 * sum(row["split"] == "unseen" for row in ROWS) >= len(ROWS)
    labels = Counter(row["label"] for row in ROWS)
    assert set(labels) == {"A", "B", "tie", "na"}
    assert min(labels.values()) >= 10


def test_precision_and_coverage_are_those_of_the_docs() -> None:
    assert measured("seen") == (219, 111, 111)
    assert measured("unseen") == (219, 142, 135)
    page = next((Path(__file__).parents[2] / "docs").rglob("judge.md"))
    text = page.read_text(encoding="utf-8")
    assert "| unseen | 219 | 142 (65 %) | 135 (95.1 %) |" in text
    assert "| seen | 219 | 111 (51 %) | 111 (100 %) |" in text


def test_swapping_the_names_swaps_the_side() -> None:
    """No side is favoured by the patterns themselves; texts in which a letter stands alone are left out."""
    names, swapped = (
        re.compile(r"\b(Response|Image) ([AB])\b"),
        {"A": "B", "B": "A", "tie": "tie", "na": "na", None: None},
    )
    texts = [row["text"] for row in ROWS if not re.search(r"\b[AB]\b", names.sub("", row["text"]))]
    texts = [text for text in texts if not re.search(r"\b(?:former|latter|first|second|left|right)\b", text)]
    turned = [names.sub(lambda match: f"{match[1]} {swapped[match[2]]}", text) for text in texts]
    changed = [(text, other) for text, other in zip(texts, turned, strict=True) if text != other]
    assert len(changed) > 100
    assert [side(other) for _, other in changed] == [swapped[side(text)] for text, _ in changed]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Response A is better.", "A"),
        ("The edge goes to B.", "B"),
        ("Both are equal.", "tie"),
        ("Not Applicable", "na"),
        ("", None),
        ("Response A is not better than Response B.", None),
        ("Response A is better at hair, Response B is better overall. Response A wins.", None),
        ("Response A is brighter. Overall, Response B is better.", "B"),
        ("A better composition would have helped both.", None),
    ],
)
def test_plain_sentences(text: str, found: str | None) -> None:
    assert side(text) == found
