"""Verdicts in the report: tables, the sentence, and the pictures that the judge was sure of beside a random sample."""

import shutil
from base64 import b64decode
from pathlib import Path

import browser
import pytest
from test_page import needs_chromium
from typer.testing import CliRunner

from judging import Known, expected, make_run, worths
from recast.cli import app
from recast.errors import RecastError
from recast.judge import stage
from recast.judge.ask import Settings
from recast.progress import no_progress
from recast.report import stage as reports
from server import serve

PAIRS = 40


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
    assert (folder / "again/index.html").read_bytes() == (folder / "out/index.html").read_bytes()


def test_verdicts_are_found_where_they_are_named_and_left_out_where_the_images_have_changed(
    made: tuple[reports.Report, Path], tmp_path: Path
) -> None:
    _, folder = made
    shutil.copytree(folder / "runs", tmp_path / "runs")
    shutil.move(tmp_path / "runs/sinkhorn-s0/verdicts/static-s0", tmp_path / "elsewhere")
    assert "judge" not in reports.report([tmp_path / "runs"], tmp_path / "out").found
    assert "judge" in reports.report([tmp_path / "runs", tmp_path / "elsewhere"], tmp_path / "out").found
    with pytest.raises(RecastError, match="contain only verdicts: name the runs that were judged as well"):
        reports.report([tmp_path / "elsewhere"], tmp_path / "out")
    manifest = tmp_path / "runs/static-s0/scores/manifest.json"
    manifest.write_text(manifest.read_text().replace('"policy.lora": "static"', '"policy.lora": "another"'))
    with pytest.warns(UserWarning, match="elsewhere are about images that have changed since and are left out"):
        later = reports.report([tmp_path / "runs", tmp_path / "elsewhere"], tmp_path / "out")
    assert "judge" not in later.found


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
        assert len(lists[0]["prompts"]) == len(lists[1]["prompts"]) == wanted["decisive"]
        assert f"Selected by the judge, not typical: {wanted['decisive']} of {PAIRS} pairs" in lists[0]["note"]
        assert "drawn at random regardless of the winner" in lists[1]["note"]
        assert all("order 1: ReCAST, score 6; order 2: ReCAST, score 1" in said for said in lists[0]["said"])
        assert all("order 1: static, score 1; order 2: static, score 6" in said for said in lists[2]["said"])
        first, second = worths(PAIRS)
        chosen = [int(prompt.split()[1]) for prompt in lists[0]["prompts"]]
        assert all(first[k] - second[k] >= Known.SURE for k in chosen)
        assert lists[1]["prompts"] != lists[0]["prompts"]
        sources = view.run('return [...document.querySelectorAll("#judgements article img")].map(image => image.src)')
    for run, source in zip(("sinkhorn-s0", "static-s0"), sources, strict=False):
        content = (folder / "runs" / run / f"scores/images/{chosen[0]:05d}.png").read_bytes()
        assert b64decode(source.split(",", 1)[1]) == content
