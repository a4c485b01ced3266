"""Prompt sets from the embedded world and from files."""

import json
import re
from pathlib import Path

import pytest

from recast import prompts
from recast.errors import RecastError


def test_text_files_are_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "ocr.txt"
    path.write_text('A sign that says "Hello"\n\n  a cat \na cat\n')
    assert prompts.load(str(path)) == [{"prompt": 'A sign that says "Hello"'}, {"prompt": "a cat"}]


def test_jsonl_keeps_genevals_metadata(tmp_path: Path) -> None:
    row = {"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": "a photo of two dogs"}
    path = tmp_path / "metadata.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert prompts.load(str(path)) == [row]


def test_count_takes_the_first_and_a_seed_chooses(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n".join(f"prompt {k}" for k in range(50)))
    assert [row["prompt"] for row in prompts.load(str(path), 3)] == ["prompt 0", "prompt 1", "prompt 2"]
    chosen = prompts.load(str(path), 3, seed=1)
    assert chosen == prompts.load(str(path), 3, seed=1)
    assert chosen != prompts.load(str(path), 3, seed=2)
    assert prompts.load(str(path), 5, seed=1)[:3] == chosen


def test_the_embedded_splits_by_name() -> None:
    assert len(prompts.load("shapes:validation")) == 64
    assert prompts.load("shapes:test", 1)[0]["include"]


def test_the_digest_tells_prompts_and_their_order_apart() -> None:
    a, b = {"prompt": "a"}, {"prompt": "b"}
    assert prompts.digest([a, b]) == prompts.digest([dict(a), dict(b)])
    assert len({prompts.digest(rows) for rows in ([a, b], [b, a], [a], [{"prompt": "a", "tag": 1}])}) == 4


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "", "there are no prompts in it"),
        ("p.csv", "a", "not as '.csv'"),
        ("p.jsonl", '{"prompt": "a"}\n{oops', "line 2: not valid JSON"),
        ("p.jsonl", '{"text": "a"}', "line 1: a line is an object with a 'prompt'"),
        ("p.jsonl", '{"prompt": " "}', "line 1: a line is an object with a 'prompt'"),
        ("p.txt", "a\nb", "3 prompts were asked for, but it has 2"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecastError, match=words):
        prompts.load(str(tmp_path / name), 3)


def test_a_missing_file_or_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="cannot be read"):
        prompts.load(str(tmp_path / "none.txt"))
    with pytest.raises(RecastError, match="unknown split 'dev'"):
        prompts.load("shapes:dev")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"include": {"class": "cat"}}, "include is not a list of GenEval's clauses: it is a dict"),
        ({"include": [{"count": 1}]}, "{'count': 1} has no 'class'"),
        ({"include": [{"class": "cat", "count": 0}]}, "the count of 'cat' is 0, not a number from 1"),
        ({"include": [{"class": "cat", "count": "2"}]}, "the count of 'cat' is '2', not a number from 1"),
        ({"include": [{"class": "cat", "color": 3}]}, "the color of 'cat' is 3, not a word"),
        ({"include": [{"class": "cat", "position": "left"}]}, "the position of 'cat' is 'left', not"),
        ({"include": [{"class": "cat", "position": ["left of", 0]}]}, "names the entry 0, which is not another one"),
        ({"include": [{"class": "a"}, {"class": "b", "position": ["above", 2]}]}, "names the entry 2, which is not"),
        (
            {"include": [{"class": "a"}], "exclude": [{}]},
            "exclude is not a list of GenEval's clauses: {} has no 'class'",
        ),
    ],
)
def test_malformed_clauses_are_reported_with_file_and_line(tmp_path: Path, line: dict[str, object], said: str) -> None:
    good = {"prompt": "x", "include": [{"class": "a", "count": 1}, {"class": "b", "position": ["above", 0]}]}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({"prompt": "y"} | line) + "\n")
    with pytest.raises(RecastError, match=f"p.jsonl, line 3: .*{re.escape(said)}"):
        prompts.load(str(path))
    path.write_text(json.dumps(good) + "\n")
    assert prompts.load(str(path)) == [good]
