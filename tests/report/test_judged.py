"""Verdicts in the report: tables, the sentence, and the pictures that the judge was sure of beside a random sample."""

import shutil
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from PIL import Image
from test_page import needs_chromium
from typer.testing import CliRunner

from edited import edit
from judging import Known, expected, make_run, worths
from recast.cli import app
from recast.errors import RecastError
from recast.evaluate import Scores
from recast.judge import ASPECTS, Verdicts, stage
from recast.judge.ask import Settings
from recast.progress import no_progress
from recast.report import figures, gallery, judged
from recast.report import stage as reports
from server import serve

PAIRS = 40
KINDS = ("png", "pdf")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[reports.Report, Path]:
    folder = tmp_path_factory.mktemp("judged")
    first, second = worths(PAIRS)
    ours = make_run(folder / "runs" / "sinkhorn-s0", "sinkhorn", first)
    static = make_run(folder / "runs" / "static-s0", "static", second)
    with serve() as server:
        Known(server)
        settings = Settings("known", server.url, backoff=0.001)
        stage.judge([stage.two(ours, static, None)], settings, no_progress)
    return reports.report([folder / "runs"], folder / "out"), folder


def test_the_tables_and_the_sentence_have_the_judges_numbers(made: tuple[reports.Report, Path]) -> None:
    report, folder = made
    wanted = expected(*worths(PAIRS))
    tables = {table.name: table for table in report.tables}
    rates = tables["judged-sinkhorn-static"]
    assert [row[1].text for row in rates.rows] == [
        f"{wanted[aspect]:.4f}" for aspect in ("overall", "faithfulness", "aesthetics")
    ]
    (row,) = tables["judge-sinkhorn-static"].rows
    assert [cell.text for cell in row[:4]] == ["(1, 2)", "0", str(PAIRS), "0"]
    assert row[5].text == f"{wanted['consistency']:.3f}"
    assert row[6].text == f"{wanted['position_bias']:.3f}"
    assert row[7].text == str(wanted["contradictions"])
    assert row[8].text == "0.90 / 1.00"  # every tenth pair's reasons call it even
    assert f"the win rate of ReCAST is {wanted['overall']:.3f}" in report.found
    assert (folder / "out/tables/judged-sinkhorn-static.csv").is_file()
    shown = CliRunner().invoke(app, ["report", str(folder / "runs"), "--out", str(folder / "again")])
    assert "Pairwise judge known: ReCAST against static" in shown.stdout
    gallery_files = [f"decisive-{pair}.{kind}" for pair in ("sinkhorn-static", "static-sinkhorn") for kind in KINDS]
    assert sorted(path.name for path in (folder / "out").glob("decisive-*")) == sorted(gallery_files)
    for name in ("index.html", *gallery_files):
        assert (folder / "again" / name).read_bytes() == (folder / "out" / name).read_bytes()


def test_verdicts_are_found_where_they_are_named_and_left_out_where_the_images_have_changed(
    made: tuple[reports.Report, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = made
    monkeypatch.setattr(figures, "save", lambda figure, stem: [])  # the slow part, and not what is tested here
    shutil.copytree(folder / "runs", tmp_path / "runs")
    shutil.move(tmp_path / "runs/sinkhorn-s0/verdicts/static-s0", tmp_path / "elsewhere")
    assert "judge" not in reports.report([tmp_path / "runs"], tmp_path / "out").found
    assert "judge" in reports.report([tmp_path / "runs", tmp_path / "elsewhere"], tmp_path / "out").found
    with pytest.raises(RecastError, match="contain only verdicts: name the runs that were judged as well"):
        reports.report([tmp_path / "elsewhere"], tmp_path / "out")
    manifest = tmp_path / "runs/static-s0/scores/manifest.json"
    edit(manifest, '"policy.lora": "static"', '"policy.lora": "another"')
    with pytest.warns(UserWarning, match="elsewhere are about images that have changed since and are left out"):
        later = reports.report([tmp_path / "runs", tmp_path / "elsewhere"], tmp_path / "out")
    assert "judge" not in later.found


def verdicts(budget: float, seed: int, sure: Sequence[int], lost: Sequence[int] = (), offset: int = 0) -> Verdicts:
    """Six pairs: the first run wins those in `sure` decisively, the second those in `lost`, and the rest is close."""
    won, scores = np.ones((6, 2)), np.tile([5.0, 2.0], (6, 1))
    scores[list(sure)] = 6, 1
    won[list(lost)], scores[list(lost)] = 0, (1, 6)
    prompts = tuple(f"prompt {(k + offset) // 2}" for k in range(6))  # two images each
    same = dict.fromkeys(ASPECTS, won)
    return Verdicts("sinkhorn", "static", (("a", budget),), seed, tuple(range(6)), prompts, same, scores, model="known")


def test_two_decisive_wins_per_budget_by_image_number_and_of_different_prompts() -> None:
    group = [
        verdicts(1, 0, [1, 2, 5]),
        verdicts(1, 1, [0, 3, 4]),
        verdicts(2, 0, [0, 1, 2, 4, 5]),
        verdicts(3, 0, [3], lost=[0]),
        verdicts(4, 0, []),
    ]
    found = {budget[0][1]: rows for budget, rows in judged.decisive(group).items()}
    chosen = {budget: [(each.seed, each.indices[row]) for each, row in rows] for budget, rows in found.items()}
    # at budget 1 the images 0 and 1 show one prompt, as do 2 and 3; budget 2 has one prompt that was not shown yet
    assert chosen == {1: [(1, 0), (0, 2)], 2: [(0, 4), (0, 0)], 3: [(0, 3)], 4: []}
    said = judged.selection(group)
    assert "12 of 30 pairs were won by ReCAST in both orders" in said
    assert "Fewer: λ (3) has 1, λ (4) has none." in said
    assert "chosen by a reviewer" in said
    assert "1 of 30 pairs were won by static" in judged.selection(group, second=True)
    sample = judged.sample(group)
    assert (len(sample["first"]), len(sample["second"]), len(sample["random"])) == (5, 1, 5)
    assert judged.selection([verdicts(4, 0, [])]).endswith("and no aspect contradicts it.")


def test_the_figure_has_static_on_the_left_and_prompt_and_budget_below(tmp_path: Path) -> None:
    left, right = tmp_path / "left.png", tmp_path / "right.png"
    Image.new("RGB", (4, 4), (255, 0, 0)).save(left)
    Image.new("RGB", (512, 512), (0, 0, 255)).save(right)
    rows = {
        (("a", 1.0),): [("costs $5 and $6", left, right)] * 2,
        (("a", 2.0),): [("b", left, right)],
        (("a", 3.0),): [],
    }
    figure = gallery.gallery_figure(rows, ("static", "ReCAST"), "how they were selected")
    shown = sorted(figure.axes, key=lambda axes: (-axes.get_position().y0, axes.get_position().x0))
    colors = [axes.images[0].get_array()[0, 0].tolist() for axes in shown]  # type: ignore[index]
    assert colors == [[255, 0, 0], [0, 0, 255]] * 3
    assert max(axes.images[0].get_array().shape[0] for axes in shown) == 384  # type: ignore[union-attr]
    said = [text.get_text() for text in figure.texts]
    assert said[:4] == ["static", "ReCAST"] * 2
    assert said[-1] == "how they were selected"
    assert [said.count(f"λ = ({budget})") for budget in (1, 2, 3)] == [2, 2, 2]
    assert said.count("costs $5 and $6") == 2
    assert (said.count("no further decisive win"), said.count("no decisive win")) == (1, 2)
    assert [path.suffix for path in figures.save(figure, tmp_path / "figure")] == [".png", ".pdf"]  # $ is no formula


def test_the_baseline_is_on_the_left_whichever_run_was_named_first(tmp_path: Path) -> None:
    policies = [Scores.load(make_run(tmp_path / name, name, [9] * 6)) for name in ("static", "sinkhorn")]
    budget = tuple(policies[0].budget.items())
    one = replace(verdicts(1, 0, [0]), budget=budget, indices=tuple(range(6)))
    turned = replace(one, first="static", second="sinkhorn")
    for each, name in ((one, "decisive-sinkhorn-static"), (turned, "decisive-static-sinkhorn")):
        ((file, figure),) = gallery.decisive_figures([each], policies).items()
        assert file == name
        assert [text.get_text() for text in figure.texts][:2] == ["static", "ReCAST"]


@needs_chromium
def test_the_page_says_which_pairs_are_chosen_and_which_are_random(
    made: tuple[reports.Report, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    report, folder = made
    wanted = expected(*worths(PAIRS))
    with browser.chromium(tmp_path_factory.mktemp("profile")) as view:
        view.open(report.page)
        lists = view.run(
            """return [...document.querySelectorAll("#judgements .beside > section")].map(section => ({
                title: section.querySelector("h3").textContent, note: section.querySelector(".note").textContent,
                said: [...section.querySelectorAll("article .note")].map(p => p.textContent),
                prompts: [...section.querySelectorAll("article > p:first-child")].map(p => p.textContent)}))"""
        )
        assert [each["title"] for each in lists] == [
            "Decisive wins of ReCAST",
            "A random sample",
            "Decisive wins of static",
        ]
        assert len(lists[0]["prompts"]) == len(lists[1]["prompts"]) == 2
        assert wanted["decisive"] > 2
        assert f"Selected by the judge, not typical: {wanted['decisive']} of {PAIRS} pairs" in lists[0]["note"]
        assert "the first 2 of each budget by image number" in lists[0]["note"]
        assert "drawn at random regardless of the winner" in lists[1]["note"]
        assert all("order 1: ReCAST, score 6; order 2: ReCAST, score 1" in said for said in lists[0]["said"])
        assert all("order 1: static, score 1; order 2: static, score 6" in said for said in lists[2]["said"])
        first, second = worths(PAIRS)
        chosen = [int(prompt.split()[1]) for prompt in lists[0]["prompts"]]
        assert chosen == [k for k in range(PAIRS) if first[k] - second[k] >= Known.SURE and k % 50][:2]
        assert lists[1]["prompts"] != lists[0]["prompts"]
        sources = view.run('return [...document.querySelectorAll("#judgements article img")].map(image => image.src)')
    for run, source in zip(("static-s0", "sinkhorn-s0"), sources, strict=False):  # the baseline is on the left
        content = (folder / "runs" / run / f"scores/images/{chosen[0]:05d}.png").read_bytes()
        assert b64decode(source.split(",", 1)[1]) == content


@pytest.mark.parametrize("change", [{}, {"prompts": ("prompt 0", "prompt 9")}, {"seeds": (42, 7)}, {"indices": (0, 5)}])
def test_a_verdict_is_about_the_images_with_its_number(tmp_path: Path, change: dict[str, Any]) -> None:
    policy = Scores.load(make_run(tmp_path / "ours", "sinkhorn", [10, 20, 30]))
    facts: dict[str, Any] = {"indices": (0, 1), "prompts": ("prompt 0", "prompt 1"), "seeds": (42, 43)} | change
    won = dict.fromkeys(ASPECTS, np.ones((2, 2)))
    found = Verdicts("sinkhorn", "static", (), 0, won=won, scores=np.full((2, 2), 6.0), **facts)
    if not change:
        reports._require_prompts(found, [policy], tmp_path)
        return
    with pytest.raises(RecastError, match=r"a verdict on image [15], but that of .*ours has another prompt or seed"):
        reports._require_prompts(found, [policy], tmp_path)
