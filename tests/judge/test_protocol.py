"""Answers as models write them: repaired only when unambiguous, refused otherwise."""

import json

import pytest

from recast.judge import protocol
from recast.judge.protocol import CRITERIA, parse, parse_side

WHOLE = {
    "reasoning": {name: f"about {name}" for name in (*CRITERIA, "comparison_summary")},
    "score": 5,
    "better_response": "A",
    "confidence": 0.4,
    "confidence_rationale": "it was close",
}
TEXT = json.dumps(WHOLE, indent=4)


def test_a_whole_answer_is_taken_over() -> None:
    verdict = parse(TEXT)
    assert (verdict.better, verdict.score, verdict.confidence) == ("A", 5, 0.4)
    assert verdict.reasoning == WHOLE["reasoning"]
    assert verdict.rationale == "it was close"


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{TEXT}\n```",
        f"```\n{TEXT}\n```\nI hope this helps!",
        f"Let me think {{about}} it.\n\n{TEXT}",
        TEXT[:-1].rstrip() + ",\n}",
        TEXT.replace('"about overall_quality"', '"about overall_quality, }",').replace(",,", ","),
        TEXT.replace('"A"', '"a"'),
        TEXT.replace('"A"', '"Response A"'),
        TEXT.replace('"A"', '"RESPONSE_A."'),
        TEXT.replace('"A"', '"**[RESPONSE A:]**"'),
        TEXT.replace("5", '"5"'),
        TEXT.replace("5", "5.0"),
        TEXT.replace("5", '"5/6"'),
        TEXT.replace("5", '"5 (A is better)"'),
        TEXT.replace("about text_quality", "line one\nline two"),
        f"{TEXT}\n\n{TEXT}",
        f'<think>maybe {{"better_response": "B", "score": 1}}</think>{TEXT}',
    ],
)
def test_what_is_unambiguous_is_repaired(text: str) -> None:
    verdict = parse(text)
    assert (verdict.better, verdict.score) == ("A", 5)
    assert verdict.reasoning["faithfulness_to_prompt"] == "about faithfulness_to_prompt"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no complete JSON"),
        ("Response A is better.", "no complete JSON"),
        (TEXT[:-3], "no complete JSON"),
        (TEXT[: TEXT.index('"better')], "no complete JSON"),
        (TEXT.replace('"A"', '"A or B"'), "better_response is 'A or B'"),
        (TEXT.replace('"A"', '"tie"'), "better_response is 'tie'"),
        (TEXT.replace('"A"', "null"), "better_response is None"),
        (TEXT.replace('"A"', '"Answer"'), "better_response is 'Answer'"),
        (TEXT.replace("5", "7"), "score is 7"),
        (TEXT.replace("5", "4.5"), "score is 4.5"),
        (TEXT.replace("5", "true"), "score is True"),
        (TEXT.replace("5", "NaN"), "score is nan"),
        (TEXT.replace('"score": 5,', ""), "score is None"),
        (TEXT + TEXT.replace('"A"', '"B"'), "two different verdicts"),
        (TEXT.replace('"A"', '"A", "better_response": "B"'), "no complete JSON"),
        ("[" * 50000 + "{" * 30000, "no complete JSON"),
        ("x" * 100001, "the answer has 100001 characters"),
        ('Draft: {"better_response": "A", "score": 4} {"reasoning": {}, "better_response": "B", "sc', "incomplete"),
        ('{"draft": {"better_response": "A", "score": 4}, "final": {"better_response": "B", "sc', "incomplete"),
        (TEXT.replace("5", '"4 (or 3)"'), r"score is '4 \(or 3\)'"),
        (TEXT.replace("5", '"5 (out of 10)"'), "score is '5"),
        (TEXT.replace('"A"', '"≠A"'), "better_response is '≠A'"),
    ],
)
def test_what_could_be_read_two_ways_is_asked_again(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(text)


def test_what_no_verdict_depends_on_may_be_missing() -> None:
    for confidence in ("high", None, -0.1, 1.5, [1], 10**400):
        assert parse(json.dumps(WHOLE | {"confidence": confidence})).confidence is None
    assert parse(json.dumps(WHOLE | {"confidence": "0.7"})).confidence == 0.7
    assert parse(json.dumps(WHOLE | {"reasoning": "none"})).reasoning == {}
    assert parse(json.dumps(WHOLE | {"reasoning": {"overall_quality": 3, "text_quality": "ok"}})).reasoning == {
        "text_quality": "ok"
    }


def test_the_rubric_names_everything_that_the_answer_must_have() -> None:
    text = protocol.rubric()
    for name in (*CRITERIA, "comparison_summary", "score", "better_response", "confidence", "confidence_rationale"):
        assert f'"{name}"' in text
    assert all(f"{score}:" in text for score in range(1, 7))


def test_a_second_reader_answers_with_one_word() -> None:
    assert [parse_side(text) for text in ("A", "Response b.", " EQUAL\n", "<think>A?</think>Answer: **NONE**")] == [
        "A",
        "B",
        "tie",
        "na",
    ]
    for text in ("", "Response A is better", "A or B", "AB"):
        with pytest.raises(ValueError, match="none of"):
            parse_side(text)
    assert protocol.tie_break("B wins {x}")[0]["content"].endswith("B wins {x}")
