"""The question to the judge and the parser of its answer: one user turn, and a JSON object.

The protocol is that of MMRBv2's image judge as the paper describes it (App. E.3). An answer is repaired only when that
is unambiguous (a code fence, a trailing comma, "Response A" for "A"); anything else is a ValueError, and the question
is asked again.
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

__all__ = [
    "CRITERIA",
    "GEMINI",
    "MODEL",
    "TEXT_OF",
    "Verdict",
    "parse",
    "parse_side",
    "question",
    "rubric",
    "tie_break",
]

GEMINI = "https://generativelanguage.googleapis.com/v1beta/openai"
MODEL = "gemini-3.5-flash"
"""The paper's judge, at its OpenAI-compatible address."""
CRITERIA = (
    "faithfulness_to_prompt",
    "text_rendering",
    "input_faithfulness",
    "image_consistency",
    "text_image_alignment",
    "text_quality",
    "overall_quality",
)
TEXT_OF = {"faithfulness": "faithfulness_to_prompt", "aesthetics": "overall_quality"}
"""The keys of the reasoning for the two aspects with separate win rates."""
_SUMMARY = "comparison_summary"
_STRING_OR_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
_LETTER = re.compile(
    r"[\s*_\[(\"'`]*(?:the\s+)?(?:(?:response|image|option)[\s_:\-]*)?([ab])[\s*_\])\"'`:.]*", re.IGNORECASE
)
_SCORE = re.compile(r"\s*([1-6])(?:\.0+)?\s*(?:/\s*6|\([^)\d]*\))?\s*")
_WORD = re.compile(r"[\s*_\"'`]*(?:answer[\s:*]+)?(?:response\s+)?(A|B|EQUAL|NONE)[\s*_\"'`.]*", re.IGNORECASE)
_KEY = re.compile(r'(?<!\\)"better_response"')
_LONGEST, _STARTS = 100_000, 50
"""Characters of the longest answer that is read, and opening braces that are tried."""


@dataclass(frozen=True)
class Verdict:
    """One answer of the judge: the response it calls better (A was shown first), its score and its reasons."""

    better: Literal["A", "B"]
    score: int
    confidence: float | None
    reasoning: Mapping[str, str]
    rationale: str

    def fields(self) -> dict[str, Any]:
        """The verdict as the log records it."""
        return {
            "better": self.better,
            "score": self.score,
            "confidence": self.confidence,
            "reasoning": dict(self.reasoning),
            "rationale": self.rationale,
        }


def rubric(path: str | Path | None = None) -> str:
    """The text that begins every question: that of a file, by default the rubric of the package."""
    source = files("recast.judge") / "data/rubric.txt" if path is None else Path(path).expanduser()
    try:
        text = source.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RecastError(f"the rubric {source} cannot be read: {error}") from error
    if not text:
        raise RecastError(f"the rubric {source} is empty: write the judge's instructions into it")
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
    """The messages that ask which response a criterion's text calls better, without images."""
    template = (files("recast.judge") / "data/tie_break.txt").read_text(encoding="utf-8").strip()
    return [{"role": "user", "content": template.replace("{text}", text)}]


def parse_side(text: str) -> Literal["A", "B", "tie", "na"]:
    """The answer to a tie-break: one word, without punctuation and emphasis around it.

    >>> parse_side("**B**."), parse_side("equal")
    ('B', 'tie')
    """
    found = _WORD.fullmatch(text.rpartition("</think>")[2])
    if not found:
        raise ValueError("the answer is none of A, B, EQUAL, NONE")
    word = found[1].upper()
    return {"A": "A", "B": "B", "EQUAL": "tie", "NONE": "na"}[word]  # type: ignore[return-value]


def parse(text: str) -> Verdict:
    r"""The verdict in an answer; ValueError if there is none, if there are several, or if it is ambiguous.

    >>> parse('```json\n{"score": "5", "better_response": "response a", "reasoning": {},}\n```').better
    'A'
    """
    answer = text.rpartition("</think>")[2]  # the reasoning of a thinking model precedes it
    if len(answer) > _LONGEST:
        raise ValueError(f"the answer has {len(answer)} characters, more than {_LONGEST}")
    found = [_verdict(content) for content in _objects(answer) if "better_response" in content]
    if not found:
        raise ValueError("the answer contains no complete JSON object with better_response")
    if len(_KEY.findall(answer)) > len(found):
        raise ValueError("the answer contains another verdict that is incomplete")
    if len({(each.better, each.score) for each in found}) > 1:
        raise ValueError("the answer contains two different verdicts")
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
    texts = {name: reasoning[name] for name in (*CRITERIA, _SUMMARY) if isinstance(reasoning.get(name), str)}
    rationale = content.get("confidence_rationale")
    return Verdict(
        "A" if letter[1].upper() == "A" else "B",
        int(number[1]),
        _confidence(content.get("confidence")),
        texts,
        rationale if isinstance(rationale, str) else "",
    )


def _confidence(value: Any) -> float | None:
    """A number in [0, 1], or None; no verdict depends on it."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number <= 1 else None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The complete JSON objects in a text, outermost first; a comma before a closing bracket is ignored."""
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_unique)  # line breaks inside strings are accepted
    start = text.find("{")
    for _ in range(_STARTS):
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
    """An object from its pairs; ValueError if a key appears twice with different values."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content and content[key] != value:
            raise ValueError(f"{key} appears twice with different values")
        content[key] = value
    return content
