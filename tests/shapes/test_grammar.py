"""The grammar: what is shipped is what it generates, splits do not overlap, and words and meaning agree."""

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recast.errors import RecastError
from recast.shapes import prompts

thing = st.fixed_dictionaries(
    {"class": st.sampled_from(prompts.SHAPES), "count": st.integers(1, 4), "color": st.sampled_from(prompts.COLORS)}
)


def test_the_shipped_files_are_what_the_grammar_generates(tmp_path: Path) -> None:
    prompts.write(tmp_path)
    shipped = files("recast.shapes").joinpath("data/prompts")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(f"{split}.{kind}" for split in prompts.SPLITS for kind in ("txt", "jsonl"))
    for name in names:
        assert shipped.joinpath(name).read_text() == (tmp_path / name).read_text()


def test_a_thousand_prompts_and_no_meaning_twice() -> None:
    rows = {split: prompts.load(split) for split in prompts.SPLITS}
    assert {split: len(each) for split, each in rows.items()} == {"train": 816, "validation": 64, "test": 128}
    meanings = Counter(prompts.meaning(row["include"]) for each in rows.values() for row in each)
    assert len(meanings) == 1008  # so no held-out prompt is a training prompt in other words
    assert {row["tag"] for row in rows["test"]} == {"single", "counting", "colors", "position", "numbers"}


def test_text_and_metadata_agree() -> None:
    for split in prompts.SPLITS:
        text = files("recast.shapes").joinpath(f"data/prompts/{split}.txt").read_text().splitlines()
        rows = prompts.load(split)
        assert text == [row["prompt"] for row in rows]
        for row in rows:
            assert json.loads(json.dumps(prompts.parse(row["prompt"]))) == row["include"]


def test_a_relation_is_written_as_geneval_writes_it() -> None:
    """`a cow right of a laptop` names the laptop first and gives the cow the position."""
    laptop, cow = prompts.parse("a red circle right of a blue square")
    assert laptop == {"class": "square", "count": 1, "color": "blue"}
    assert cow == {"class": "circle", "count": 1, "color": "red", "position": ("right of", 0)}


def test_the_same_meaning_in_other_words() -> None:
    def meaning(text: str) -> object:
        return prompts.meaning(prompts.parse(text))

    assert meaning("a red circle left of a blue square") == meaning("a blue square right of a red circle")
    assert meaning("a red circle above a blue square") != meaning("a red circle below a blue square")
    assert meaning("a red circle and two blue squares") == meaning("two blue squares and a red circle")
    assert meaning("a red circle and a blue square") != meaning("a red square and a blue circle")


@given(st.lists(thing, min_size=1, max_size=2), st.sampled_from([None, *prompts.RELATIONS]))
def test_parse_inverts_sentence(include: list[dict[str, object]], relation: str | None) -> None:
    if relation is not None and len(include) == 2:
        include[1] = {**include[1], "position": (relation, 0)}
    assert prompts.parse(prompts.sentence(include)) == tuple(include)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a dog",
        "a red circle near a blue square",
        "five red circles",
        "a red",
        "a red circles",
        "two red square",
        "a orange cross",
        "three blue crosss",
    ],
)
def test_words_outside_the_grammar_are_named(text: str) -> None:
    with pytest.raises(RecastError, match="is not in the grammar of the shapes world"):
        prompts.parse(text)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(RecastError, match="unknown split 'dev': choose one of train, validation, test"):
        prompts.load("dev")  # type: ignore[arg-type]


def test_what_parse_returns_is_the_callers_own() -> None:
    prompts.parse("a red circle")[0]["count"] = 3
    assert prompts.parse("a red circle")[0]["count"] == 1
    assert prompts.parse("  A Red   circle ") == prompts.parse("a red circle")
