"""What a judge is asked, and what counts as its answer: one user turn, and a JSON object that may need mending.

The protocol is that of MMRBv2's image judge as the paper describes it (App. E.3). An answer is mended where its meaning
is not in doubt (a fence, a trailing comma, "Response A" for "A"); anything else is a ValueError, and is asked again.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from recast.errors import RecastError

Letter = Literal["A", "B"]
CRITERIA = (
    "faithfulness_to_prompt",
    "text_rendering",
    "input_faithfulness",
    "image_consistency",
    "text_image_alignment",
    "text_quality",
    "overall_quality",
)
SUMMARY = "comparison_summary"
TEXT_OF = {"faithfulness": "faithfulness_to_prompt", "aesthetics": "overall_quality"}
"""Where the reasons for the two criteria with win rates of their own stand."""
_STRING_OR_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
_LETTER = re.compile(
    r"[\s*_\[(\"'`]*(?:the\s+)?(?:(?:response|image|option)[\s_:\-]*)?([ab])[\s*_\])\"'`:.]*", re.IGNORECASE
)
_SCORE = re.compile(r"\s*([1-6])(?:\.0+)?\s*(?:/\s*6|\([^)\d]*\))?\s*")
_WORD = re.compile(r"[\s*_\"'`]*(?:answer[\s:*]+)?(?:response\s+)?(A|B|EQUAL|NONE)[\s*_\"'`.]*", re.IGNORECASE)
_KEY = re.compile(r'(?<!\\)"better_response"')
LONGEST, STARTS = 100_000, 50
"""Letters of an answer that is read, and opening braces that are tried."""


@dataclass(frozen=True)
class Verdict:
    """One answer: the response that was called better, as it was shown, with the reasons."""

    better: Letter
    score: int
    confidence: float | None
    reasoning: Mapping[str, str]
    rationale: str

    def fields(self) -> dict[str, Any]:
        """As the log keeps it."""
        return {
            "better": self.better,
            "score": self.score,
            "confidence": self.confidence,
            "reasoning": dict(self.reasoning),
            "rationale": self.rationale,
        }


def rubric(path: str | Path | None = None) -> str:
    """The text that begins every question: the package's own, or that of a file."""
    source = files("recast.judge") / "data/rubric.txt" if path is None else Path(path).expanduser()
    try:
        text = source.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RecastError(f"the rubric {source} cannot be read: {error}") from error
    if not text:
        raise RecastError(f"the rubric {source} is empty: put the judge's instructions into it")
    return text


def question(rubric: str, prompt: str, first: bytes, second: bytes) -> list[dict[str, Any]]:
    """The messages for one ordering: `first` is shown as A."""
    texts = [f"{rubric}\n\n[ORIGINAL PROMPT TO MODEL:]\n{prompt}\n\n[RESPONSE A:]", "[RESPONSE B:]"]
    content: list[dict[str, Any]] = []
    for text, image in zip(texts, (first, second), strict=True):
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content += [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": content}]


def tie_break(text: str) -> list[dict[str, Any]]:
    """The messages that ask which response a criterion's text calls better; no images."""
    template = (files("recast.judge") / "data/tie_break.txt").read_text(encoding="utf-8").strip()
    return [{"role": "user", "content": template.replace("{text}", text)}]


def parse_side(text: str) -> Literal["A", "B", "tie", "na"]:
    """The answer to a tie-break: one word, whatever stands around it that is no word.

    >>> parse_side("**B**."), parse_side("equal")
    ('B', 'tie')
    """
    found = _WORD.fullmatch(text.rpartition("</think>")[2])
    if not found:
        raise ValueError("the answer is not one of A, B, EQUAL, NONE")
    word = found[1].upper()
    return {"A": "A", "B": "B", "EQUAL": "tie", "NONE": "na"}[word]  # type: ignore[return-value]


def parse(text: str) -> Verdict:
    r"""The verdict in an answer; ValueError where there is none, more than one, or one that can be read two ways.

    >>> parse('```json\n{"score": "5", "better_response": "response a", "reasoning": {},}\n```').better
    'A'
    """
    answer = text.rpartition("</think>")[2]  # before it, a model talks to itself
    if len(answer) > LONGEST:
        raise ValueError(f"the answer has {len(answer)} letters")
    found = [_verdict(content) for content in _objects(answer) if "better_response" in content]
    if not found:
        raise ValueError("the answer has no whole JSON object with better_response")
    if len(_KEY.findall(answer)) > len(found):
        raise ValueError("the answer has another verdict, which is not whole")
    if len({(each.better, each.score) for each in found}) > 1:
        raise ValueError("the answer has two verdicts that differ")
    return found[-1]


def _verdict(content: Mapping[str, Any]) -> Verdict:
    better, score = content["better_response"], content.get("score")
    letter = _LETTER.fullmatch(better) if isinstance(better, str) else None
    if not letter:
        raise ValueError(f"better_response is {better!r}, not A or B")
    number = _SCORE.fullmatch(str(score)) if isinstance(score, (int, float, str)) else None
    if not number:
        raise ValueError(f"score is {score!r}, not a whole number from 1 to 6")
    reasoning = content.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, Mapping) else {}
    texts = {name: reasoning[name] for name in (*CRITERIA, SUMMARY) if isinstance(reasoning.get(name), str)}
    rationale = content.get("confidence_rationale")
    return Verdict(
        "A" if letter[1].upper() == "A" else "B",
        int(number[1]),
        _confidence(content.get("confidence")),
        texts,
        rationale if isinstance(rationale, str) else "",
    )


def _confidence(value: Any) -> float | None:
    """A number in [0, 1], or None: nobody's verdict depends on it."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number <= 1 else None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text that are whole, outermost first; commas before a closing bracket are forgiven."""
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_unique)  # a line break inside a string is no harm
    start = text.find("{")
    for _ in range(STARTS):
        if start < 0:
            return
        rest = text[start:]
        for candidate in (rest, _STRING_OR_COMMA.sub(lambda match: match[1] or "", rest)):
            try:
                content, end = decoder.raw_decode(candidate)
            except (ValueError, RecursionError):
                continue
            yield content
            start += end - 1
            break
        start = text.find("{", start + 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are said once, or twice alike."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content and content[key] != value:
            raise ValueError(f"{key} is said twice")
        content[key] = value
    return content
