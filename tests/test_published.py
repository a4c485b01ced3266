"""The table of comparisons with published scorers has a row for each result, with its numbers; and what compares."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from recast.rewards import NAMES

ROOT = Path(__file__).parents[1]
OWN = {"jpeg", "composition", "alignment", "detail", "background", "census"}
"""Rewards that nobody else has published."""
REWARDS = sorted(set(NAMES) - OWN)
EXACT = {"tokens", "pixels", "pixels of hpsv2.score"}
ROUNDED = {"scores": 2e-6, "scores of hpsv2.score": 2e-6, "probabilities": 5e-6, "scores in bfloat16": 0.01}
"""A few units in the last place of float32, at scores up to 7 and logits up to 99, and about one of bfloat16."""


def result(reward: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/published/{reward}.json").read_text(encoding="utf-8"))


def table() -> dict[str, list[str]]:
    """Cells by reward, of the section's table on the page."""
    page = (ROOT / "docs/guides/rewards.md").read_text(encoding="utf-8")
    section = page.split("## Compared with the published implementations\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0].strip("`"): row[1:] for row in rows}


def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_common", ROOT / "benchmarks/published/common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_reward_that_others_publish_has_a_row() -> None:
    assert sorted(table()) == REWARDS


@pytest.mark.parametrize("reward", REWARDS)
def test_a_row_has_the_numbers_of_its_result(reward: str) -> None:
    found, (source, compared, absent) = result(reward), table()[reward]
    assert found["reward"] == reward
    printed = [re.fullmatch(r"(.+) \(([\d,]+)\): (\S+)", part) for part in compared.split("<br>")]
    assert [
        {"what": part[1], "count": int(part[2].replace(",", "")), "largest": float(part[3])} for part in printed if part
    ] == [part | {"largest": float(f"{part['largest']:.0e}")} for part in found["compared"]]
    assert absent == "; ".join(found["not_compared"])
    assert source.startswith(found["source"])
    assert all(commit.strip()[:7] in source for commit in found["commit"].split(";"))


@pytest.mark.parametrize("reward", ["aesthetic", "hpsv2", "hpsv3", "imagereward", "pickscore"])
def test_what_differs_is_rounding(reward: str) -> None:
    """A result with a larger difference may not be recorded without a change here."""
    found = result(reward)
    assert {part["what"] for part in found["compared"]} >= {"pixels", "scores"}
    for part in found["compared"]:
        assert part["count"] >= 16
        assert part["largest"] <= (0 if part["what"] in EXACT else ROUNDED[part["what"]])
    assert 0.12 <= round(found["spread_of_scores"], 2) <= 0.29  # the page says so


def test_a_difference_is_found_and_a_missing_value_is_an_error() -> None:
    compare = common().compare
    one = {"scores": [np.array([1.0, 2.0]), np.array([3.0])], "tokens": [np.array([[1, 2]])]}
    other = {"scores": [np.array([1.0, 2.5], np.float32), np.array([2.75])], "tokens": [np.array([[1, 2]])]}
    assert compare(one, other) == [
        {"what": "scores", "count": 3, "largest": 0.5},
        {"what": "tokens", "count": 1, "largest": 0.0},
    ]
    with pytest.raises(ValueError, match="compared are"):
        compare(one, {"scores": other["scores"]})
    with pytest.raises(ValueError, match="tokens: shapes"):
        compare(one, {**other, "tokens": [np.array([[1]])]})
    with pytest.raises(ValueError, match="zip"):
        compare(one, {**other, "scores": other["scores"][:1]})


def test_tokens_count_up_to_the_first_end_token() -> None:
    found = common().until_end([[7, 5, 9, 9], [7, 9, 0]], 9)
    assert found.tolist() == [[7, 5, 9, -1], [7, 9, -1, -1]]


def test_pictures_are_the_same_each_time_and_differ_within_a_size() -> None:
    pictures = common().pictures
    first = pictures(20, 30)
    assert first.shape == (4, 20, 30, 3)
    np.testing.assert_array_equal(first, pictures(20, 30))
    assert len({image.tobytes() for image in first}) == 4
