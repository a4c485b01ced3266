"""Measured gradients in the report: the table against Effects itself, the page in a browser, and the figure."""

import csv
import io
import json
import re
from pathlib import Path

import browser
import numpy as np
import pytest
from browser import Browser
from test_report import write_run

from recast import GainCurves, weigh
from recast.core.effects import Effects
from recast.errors import RecastError
from recast.report import effects, stage
from recast.weigh import static

SIGMAS = np.array([0.0, 0.3, 0.7, 1.0])
BUDGET = {"a": 1.0, "b": 1.0}


def measured(rewards: tuple[str, ...] = ("a", "b")) -> Effects:
    size = 3 * len(rewards)
    rng = np.random.default_rng(0)
    g = rng.normal(size=(size, 30)) + 0.7 * rng.normal(size=(8, size, 30))
    return Effects.measured(rewards, SIGMAS, np.einsum("qap,rbp->qrab", g, g), 4, batch=16, levels=3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    curves = GainCurves(("a", "b"), SIGMAS, [[0.9, 0.2, 0.1, 0.0], [0.5, 0.4, 0.3, 0.0]])
    for method, shift in (("static", 0.0), ("sinkhorn", 0.5)):
        write_run(folder / method, method, BUDGET, 0, shift)
        weigh(curves, BUDGET, method).save(folder / method / "weights.json")  # type: ignore[arg-type]
    curves.save(folder / "gains.json")
    measured().save(folder / "effects.json")
    return folder


def test_the_table_is_that_of_the_effects(runs: Path, tmp_path: Path) -> None:
    made = stage.report([runs], tmp_path)
    assert "gradients" in [table.name for table in made.tables]
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO((tmp_path / "tables/gradients.csv").read_text()))}
    found = measured()
    timed = weigh(GainCurves.load(runs / "gains.json"), BUDGET)
    assert list(rows) == ["static", "ReCAST"]
    assert rows["static"]["a, realized"] == "50.0 %"
    assert float(rows["static"]["cosine"]) == pytest.approx(found.static(timed), abs=6e-4)
    assert float(rows["ReCAST"]["cosine"]) == pytest.approx(found.efficiency(timed), abs=6e-4)
    assert rows["ReCAST"]["a, realized"] == f"{100 * timed.realized(found.effect)[0]:.1f} %"
    assert rows["ReCAST"]["− static"] == f"{100 * found.gain(timed)[0]:+.1f} %"
    assert rows["ReCAST"]["timing"] == f"{100 * found.timing(timed)[0]:+.1f} %"
    assert {path.name for path in tmp_path.glob("gradients.*")} == {"gradients.png", "gradients.pdf"}
    assert "From the gradients of 32 images before training" in (tmp_path / "report.md").read_text()
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', made.page.read_text(), re.DOTALL)[1])  # type: ignore[index]
    assert data["gradients"]["effect"] == found.effect.tolist()
    assert [line["method"] for line in data["gradients"]["lines"]] == ["static", "ReCAST"]


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
def test_the_page_draws_them(runs: Path, tmp_path: Path) -> None:
    made = stage.report([runs], tmp_path / "out")
    with browser.chromium(tmp_path / "profile") as view:
        view.open(made.page)
        _check(view)


def _check(view: Browser) -> None:
    assert view.run('return document.getElementById("gradients").hidden') is False
    count = 'return document.querySelectorAll("#{} polyline").length'
    assert [view.run(count.format(name)) for name in ("snr", "effect", "cosines")] == [2, 1, 2]
    said = view.run('return document.getElementById("predictions").textContent')
    assert "With 16 images per update" in said


def test_w_of_other_rewards_or_budgets_is_left_out(runs: Path, tmp_path: Path) -> None:
    found, folders = measured(), [runs / "static", runs / "sinkhorn", runs]
    assert list(effects.weights_of(found, folders, BUDGET)) == ["static", "sinkhorn"]
    assert list(effects.weights_of(found, folders, {"a": 1.0, "b": 2.0})) == ["static"]
    assert list(effects.weights_of(measured(("a", "c")), folders, BUDGET)) == ["static"]
    assert effects.weights_of(measured(("x", "y")), folders, BUDGET) == {}
    assert effects.locate([tmp_path / "inside"]) is None


def test_no_signal_leaves_gaps_and_no_nan() -> None:
    none = measured()
    silent = Effects(**{**vars(none), "cross": -0.01 * np.eye(6)[None].repeat(8, axis=0)})
    weights = {"static": static(BUDGET, SIGMAS)}
    assert effects.data(silent, weights)["lines"][0]["cosines"] == [None] * 11
    assert effects.table(silent, weights).rows[0][-4].text == "-"
    assert len(effects.figure(silent, weights).axes) == 4


def test_a_damaged_file_is_one_sentence(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "effects.json").write_text("{")
    with pytest.raises(RecastError, match=r"effects\.json: not valid JSON"):
        effects.locate([tmp_path])
