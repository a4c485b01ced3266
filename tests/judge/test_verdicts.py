"""The arithmetic of verdicts: closed forms, and the paper's own table."""

from pathlib import Path

import numpy as np
import pytest

from paper_results import BUDGETS, JUDGED, JUDGED_MEANS, TRAINED
from recast.core import artifact
from recast.errors import RecastError
from recast.judge.verdicts import ASPECTS, FORMAT, OVERALL, Verdicts, from_rows, interval, load, summary
from recast.report import judged, render


def verdicts(wins: dict[str, tuple[int, int]], pairs: int, **changes: object) -> Verdicts:
    """So many orderings won and decided for each aspect; the others undecided."""
    won = {}
    for aspect, (some, decided) in wins.items():
        flat = np.full(2 * pairs, np.nan)
        flat[:decided] = np.arange(decided) < some
        won[aspect] = flat.reshape(pairs, 2)
    settings = {
        "first": "sinkhorn",
        "second": "static",
        "budget": (("ocr", 1.0),),
        "seed": 0,
        "model": "gemini",
    } | changes
    prompts = tuple(f"prompt {k}" for k in range(pairs))
    return Verdicts(indices=tuple(range(pairs)), prompts=prompts, won=won, scores=np.full((pairs, 2), 4.0), **settings)  # type: ignore[arg-type]


def counted(rate: float, most: int) -> tuple[int, int]:
    """The largest even number of orderings, and wins among them, that give a printed rate to a tenth of its digit."""
    for decided in range(most, 0, -2):
        if abs(round(rate * decided) / decided - rate) < 1e-5:
            return round(rate * decided), decided
    raise AssertionError(rate)


def test_the_papers_five_budgets_give_its_means() -> None:
    group = []
    for k, weights in enumerate(BUDGETS):
        budget = tuple(zip(TRAINED["ocr"], map(float, weights), strict=True))
        wins = {OVERALL: counted(JUDGED[OVERALL][k], 2000)}
        pairs = wins[OVERALL][1] // 2
        wins |= {aspect: counted(JUDGED[aspect][k], 2 * pairs) for aspect in ASPECTS[1:]}
        group.append(verdicts(wins, pairs, budget=budget, dropped=1000 - pairs))
    assert [each.dropped for each in group] == [2, 0, 0, 0, 0]  # 0.6538 is no number of 2000ths
    table = judged.win_rates(group)
    assert table.header[1:6] == tuple(f"({', '.join(map(str, weights))})" for weights in BUDGETS)
    for row, aspect in zip(table.rows, ASPECTS, strict=True):
        assert [cell.text for cell in row[1:6]] == [f"{rate:.4f}" for rate in JUDGED[aspect]]
        assert row[6].text == f"{JUDGED_MEANS[aspect]:.4f}"
    assert "judge gemini prefers ReCAST to static: the win rate of ReCAST is 0.572" in judged.sentences(group)[0]
    for form in (render.markdown, render.latex, render.comma_separated, render.html):
        assert "0.5718" in form(table)


def rows(better: list[str], scores: list[tuple[int, int]]) -> list[dict[str, object]]:
    """Pairs whose answers in the two orders were so, aspects alike."""
    made: list[dict[str, object]] = []
    for k, (letters, numbers) in enumerate(zip(better, scores, strict=True)):
        orders = [
            {"won": dict.fromkeys(ASPECTS, int((letter == "A") != bool(order))), "score": number}
            for order, (letter, number) in enumerate(zip(letters, numbers, strict=True))
        ]
        made.append({"index": k, "prompt": f"p{k}", "seed": k, "status": "judged", "orders": orders})
    return made


MANIFEST = {
    side: {"method": name, "budget": {"ocr": 1.0}, "seed": 0} for side, name in (("first", "a"), ("second", "b"))
}


def test_rates_bias_consistency_and_contradictions_of_four_pairs_by_hand() -> None:
    # Shown as A then as B: the first run wins both, the second wins both, A twice, B twice.
    found = from_rows(MANIFEST, rows(["AB", "BA", "AA", "BB"], [(6, 1), (2, 5), (4, 3), (2, 1)]))
    assert found.won[OVERALL].tolist() == [[1, 1], [0, 0], [1, 0], [0, 1]]
    assert found.rate() == 0.5
    assert found.consistency == 0.5
    assert found.position_bias == 0.5
    assert found.contradictions == 1  # the third pair's second answer: A, but 3
    assert found.decisive() == [0]
    assert found.decisive(second=True) == []
    numbers = summary(found)
    assert numbers["decided"] == dict.fromkeys(ASPECTS, 8)
    assert numbers["decisive"] == {"first": 1, "second": 0}


def test_a_win_that_an_aspect_contradicts_is_not_decisive() -> None:
    made = rows(["AB", "AB", "AB", "BA"], [(6, 1), (6, 1), (6, 2), (1, 6)])
    made[1]["orders"][1]["won"]["aesthetics"] = 0  # type: ignore[index]
    made[0]["orders"][0]["won"]["faithfulness"] = None  # type: ignore[index]
    found = from_rows(MANIFEST, made)
    assert found.decisive() == [0]
    assert found.decisive(second=True) == [3]


def test_undecided_orderings_leave_the_denominator_and_dropped_pairs_leave_everything() -> None:
    made = rows(["AB", "BA"], [(6, 1), (1, 6)])
    made[0]["orders"][0]["won"]["faithfulness"] = None  # type: ignore[index]
    dropped = {"index": 2, "prompt": "p", "seed": 2, "status": "dropped", "orders": made[0]["orders"]}
    found = from_rows(MANIFEST, [*made, dropped, dropped | {"status": "pending", "orders": []}])
    assert (found.rate(), found.rate("faithfulness"), found.rate("aesthetics")) == (0.5, 1 / 3, 0.5)
    assert (found.dropped, found.pending) == (1, 1)


def test_the_interval_is_that_of_a_binomial_over_prompts() -> None:
    consistent = verdicts(dict.fromkeys(ASPECTS, (1200, 2000)), 1000)
    low, high = interval([consistent])
    width = 1.96 * np.sqrt(0.6 * 0.4 / 1000)  # both orders agree, so there are 1000 draws and not 2000
    assert low == pytest.approx(0.6 - width, abs=0.003)
    assert high == pytest.approx(0.6 + width, abs=0.003)
    same = interval([consistent, consistent])
    assert same == pytest.approx((low, high), abs=1e-12)  # the same prompts in both: no more is known
    other = verdicts(dict.fromkeys(ASPECTS, (200, 2000)), 1000)
    both = interval([consistent, other])
    assert both[0] < 0.35 < both[1]
    assert both[1] - both[0] < high - low
    nobody = verdicts(dict.fromkeys(ASPECTS, (0, 0)), 10)
    assert np.isnan(interval([nobody])).all()
    assert np.isnan(nobody.rate())


def test_prompts_with_several_pictures_are_drawn_together() -> None:
    single = verdicts(dict.fromkeys(ASPECTS, (120, 200)), 100)
    repeated = Verdicts(
        **{
            **vars(single),
            "indices": tuple(range(400)),
            "prompts": single.prompts * 4,
            "won": {aspect: np.tile(values, (4, 1)) for aspect, values in single.won.items()},
            "scores": np.tile(single.scores, (4, 1)),
        }
    )
    assert interval([repeated]) == pytest.approx(interval([single]), abs=1e-12)


def test_the_random_sample_is_as_large_as_the_decisive_one_and_does_not_look_at_verdicts() -> None:
    made = rows(["AB"] * 5 + ["BA"] * 2 + ["AA"] * 93, [(6, 1)] * 5 + [(1, 6)] * 2 + [(4, 4)] * 93)
    found = judged.sample([from_rows(MANIFEST, made)])
    assert [row for _, row in found["first"]] == [0, 1]  # two per budget, by image number
    assert [row for _, row in found["second"]] == [5, 6]
    assert len(found["random"]) == 2
    assert any(row > 6 for _, row in found["random"])  # most pairs are not decisive
    turned = rows(["BA"] * 5 + ["AB"] + ["AA"] * 94, [(1, 6)] * 5 + [(6, 1)] + [(4, 4)] * 94)
    other = judged.sample([from_rows(MANIFEST, turned)])
    assert [row for _, row in other["random"]] == [row for _, row in found["random"]]
    assert (len(other["first"]), len(other["second"])) == (1, 2)


def test_budgets_count_alike_however_many_seeds_they_have() -> None:
    many = [verdicts(dict.fromkeys(ASPECTS, (180, 200)), 100, budget=(("ocr", 1.0),), seed=seed) for seed in range(3)]
    few = verdicts(dict.fromkeys(ASPECTS, (20, 200)), 100, budget=(("ocr", 2.0),))
    table = judged.win_rates([*many, few])
    assert table.rows[0][3].text == "0.5000"
    low, high = interval([*many, few])
    assert low < 0.5 < high
    assert (
        "no clear preference between ReCAST and static: the win rate of ReCAST is 0.500"
        in judged.sentences([*many, few])[0]
    )
    assert "prefers static to ReCAST: the win rate of ReCAST is 0.100" in judged.sentences([few])[0]


def test_verdicts_of_two_judges_are_never_pooled() -> None:
    one, other = (
        verdicts(dict.fromkeys(ASPECTS, (wins, 200)), 100, model=model) for model, wins in (("x", 150), ("y", 50))
    )
    tables = judged.tables([one, other])
    assert [table.name for table in tables] == [
        "judged-sinkhorn-static",
        "judge-sinkhorn-static",
        "judged-sinkhorn-static-2",
        "judge-sinkhorn-static-2",
    ]
    assert [table.rows[0][1].text for table in tables[::2]] == ["0.7500", "0.2500"]
    nobody = verdicts(dict.fromkeys(ASPECTS, (0, 0)), 0)
    assert judged.tables([nobody]) == judged.sentences([nobody]) == []


def test_a_damaged_table_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=r"manifest\.json: cannot be read"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "recast.verdicts", "version": 1, "first": {}}')
    with pytest.raises(
        RecastError, match=r"manifest\.json: the field first\.method is missing: run recast judge again"
    ):
        load(tmp_path)
    run = {"method": "static", "budget": {"ocr": 1.0}, "seed": 0}
    artifact.write(tmp_path / "manifest.json", FORMAT, {"first": run, "second": run})
    with pytest.raises(RecastError, match=r"verdicts\.jsonl: cannot be read: .*; run recast judge first"):
        load(tmp_path)
    (tmp_path / "verdicts.jsonl").write_text('{"status": "judged"}\n')
    with pytest.raises(RecastError, match=r"verdicts\.jsonl, line 1: the field index is missing: run recast judge"):
        load(tmp_path)
