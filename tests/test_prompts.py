"""Prompt sets from the embedded world and from files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recast import identity, prompts
from recast.errors import RecastError


def test_text_files_are_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "ocr.txt"
    path.write_text('A sign that says "Hello"\n\n  a cat \n')
    assert prompts.load(str(path)) == [{"prompt": 'A sign that says "Hello"'}, {"prompt": "a cat"}]


def test_every_line_counts_except_where_prompts_must_differ(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a cat\na dog\na cat\na cow\n")
    texts = ["a cat", "a dog", "a cat", "a cow"]
    assert [row["prompt"] for row in prompts.load(str(path))] == texts
    assert [row["prompt"] for row in prompts.load(str(path), 3)] == texts[:3]
    with pytest.warns(UserWarning, match=r"p.txt has 4 prompts, 3 distinct: each is measured once"):
        distinct = prompts.load_distinct(str(path))
    assert [row["prompt"] for row in distinct] == ["a cat", "a dog", "a cow"]
    with pytest.warns(UserWarning, match="3 distinct"), pytest.raises(RecastError, match="3 distinct prompts, fewer"):
        prompts.load_distinct(str(path), 4)


def test_jsonl_keeps_genevals_metadata(tmp_path: Path) -> None:
    row = {"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": "a photo of two dogs"}
    path = tmp_path / "metadata.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert prompts.load(str(path)) == [row]


def test_count_takes_the_first_and_a_seed_chooses(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n".join(f"prompt {k}" for k in range(50)))
    assert [row["prompt"] for row in prompts.load(str(path), 3)] == ["prompt 0", "prompt 1", "prompt 2"]
    chosen = prompts.load_distinct(str(path), 3, seed=1)
    assert chosen == prompts.load_distinct(str(path), 3, seed=1)
    assert chosen != prompts.load_distinct(str(path), 3, seed=2)
    assert prompts.load_distinct(str(path), 5, seed=1)[:3] == chosen


def test_the_embedded_splits_by_name() -> None:
    assert len(prompts.load("shapes:validation")) == 64
    assert prompts.load("shapes:test", 1)[0]["include"]


def test_the_hash_tells_prompts_and_their_order_apart() -> None:
    a, b = {"prompt": "a"}, {"prompt": "b"}
    assert identity.prompts_hash([a, b]) == identity.prompts_hash([dict(a), dict(b)])
    assert len({identity.prompts_hash(rows) for rows in ([a, b], [b, a], [a], [{"prompt": "a", "tag": 1}])}) == 4


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "", "p.txt contains no prompts"),
        ("p.csv", "a", "not '.csv'"),
        ("p.jsonl", '{"prompt": "a"}\n{oops', "line 2: not valid JSON"),
        ("p.jsonl", '{"text": "a"}', "line 1: a line must be an object with a non-empty 'prompt'"),
        ("p.jsonl", '{"prompt": " "}', "line 1: a line must be an object with a non-empty 'prompt'"),
        ("p.txt", "a\nb", "has 2 prompts, fewer than the 3 requested"),
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
    ("change", "said"),
    [
        ({"include": {"class": "cat"}}, "'include' must be a list of objects with a class and a count"),
        ({"include": [{"count": 1}]}, "unknown class None"),
        ({"include": [{"class": "benchh", "count": 1}]}, "unknown class 'benchh'"),
        ({"include": [{"class": "cat", "count": 0}]}, "a count is an integer from 1 to 16"),
        ({"include": [{"class": "cat", "count": 1, "color": "redd"}]}, "unknown color 'redd': choose one of red"),
        (
            {"include": [{"class": "cat", "count": 1, "position": ["above", 0]}]},
            "the position of entry 0 names entry 0",
        ),
        ({"exclude": [{}]}, "unknown class None"),
    ],
)
def test_malformed_clauses_are_reported_with_file_and_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    good = {
        "tag": "position",
        "prompt": "x",
        "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["above", 0]}],
    }
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(good) + "\n\n" + json.dumps(good | {"prompt": "y"} | change) + "\n")
    with pytest.raises(RecastError, match=f"p.jsonl, line 3: .*prompt 'y'.*{re.escape(said)}"):
        prompts.load(str(path))
    path.write_text(json.dumps(good) + "\n")
    assert prompts.load(str(path)) == [good]


def test_other_worlds_metadata_are_left_alone(tmp_path: Path) -> None:
    rows = [*prompts.load("shapes:validation"), {"prompt": "mine", "tag": "mine", "include": "anything"}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert prompts.load(str(path)) == rows


def test_bytes_that_are_no_text_and_contradictions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"one\ntwo\n\xff\n")
    with pytest.raises(RecastError, match="p.txt, line 3: the prompts are not UTF-8 text"):
        prompts.load(str(path))
    path.write_bytes("\ufeffone\ntwo".encode())
    assert [row["prompt"] for row in prompts.load(str(path))] == ["one", "two"]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "k": 1}\n{"prompt": "a", "k": 1}\n')
    with pytest.warns(UserWarning, match="2 prompts, 1 distinct"):
        assert len(prompts.load_distinct(str(path))) == 1
    path.write_text('{"prompt": "a", "k": 1}\n{"prompt": "a", "k": 2}\n')
    with pytest.raises(RecastError, match="the prompt 'a' occurs twice with different metadata"):
        prompts.load_distinct(str(path))
    assert len(prompts.load(str(path))) == 2


def test_half_a_character_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a cat"}\n{"prompt": "\\ud800 cat"}\n')
    with pytest.raises(RecastError, match=r"p.jsonl, line 2: the prompt has half a character"):
        prompts.load(str(path))
