"""The report from evaluated runs: its tables in every form, its sentence, and what it refuses."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_compare import printed
from typer.testing import CliRunner

import paper_results as paper
from edited import edit
from recast import GainCurves, evaluate
from recast.cli import app
from recast.cli.tables import report_table
from recast.core import artifact, schedule
from recast.errors import RecastError
from recast.report import compare, render, sections, stage
from recast.report.compare import Run
from recast.report.render import Cell, Table

BUDGETS = ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0})


def write_run(folder: Path, method: str, budget: dict[str, float], seed: int, shift: float) -> None:
    """An evaluated run of 12 images whose scores are the prompts' own, shifted."""
    rng = np.random.default_rng([seed, len(method), *method.encode()])
    run = {"method": method, "budget": budget, "seed": seed}
    fields = {"settings": {}, "run": run, "trained": ["a", "b"], "held_out": ["census"]}
    artifact.write(folder / "scores/manifest.json", "recast.scores", fields)
    (folder / "scores/images").mkdir()
    lines = []
    for k in range(12):
        Image.new("RGB", (8, 8), (k, 0, 0)).save(folder / f"scores/images/{k}.png")
        scores = {"a": k + shift + rng.normal(0, 0.01), "b": k - shift, "census": None if k == 0 else k + shift}
        row = {"index": k, "prompt": f"prompt {k}", "seed": 42 + k, "file": f"images/{k}.png", "scores": scores}
        lines.append(json.dumps(row))
    (folder / "scores/scores.jsonl").write_text("\n".join(lines) + "\n")
    if method != "base":
        epochs = [{"epoch": e, "reward/a": float(e), "reward/b": None, "loss": 0.1} for e in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "base", "base", BUDGETS[0], 0, 0.0)
    for b, budget in enumerate(BUDGETS):
        for seed in (0, 1):
            for method, shift in (("static", 0.5), ("sinkhorn", 1.0 + seed), ("row", 0.75)):
                write_run(folder / f"{method}-{b}-{seed}", method, budget, seed, shift)
    D = np.array([[0.5, 0.2, 0.0], [0.5, 0.4, 0.0]])
    GainCurves(("a", "b"), schedule.from_shift(2), D).save(folder / "gains.json")
    return folder


def test_every_form_is_written_and_says_the_same(runs: Path, tmp_path: Path) -> None:
    made = stage.report([runs], tmp_path / "out")
    names = ["trained", "held-out", "trained-by-budget", "held-out-by-budget", "ablation", "certainty"]
    assert [table.name for table in made.tables] == names
    pooled = list(csv.DictReader(io.StringIO((tmp_path / "out/tables/trained.csv").read_text())))
    aggregate, a = pooled[0], pooled[1]
    assert [row["reward"] for row in pooled] == ["aggregate r", "a", "b"]
    assert float(a["ReCAST"]) == pytest.approx(5.5 + 1.5, abs=0.02)
    assert float(a["ReCAST std"]) == pytest.approx(np.sqrt(0.5), abs=0.02)
    # static is shifted by 0.5 and ReCAST by 1 + seed: 0.5 and 1.5 above
    assert float(a["ReCAST − static"]) == pytest.approx(1.0, abs=0.02)
    assert float(a["ReCAST − static std"]) == pytest.approx(np.sqrt(0.5), abs=0.02)
    assert pooled[2]["ReCAST − static"] == "-1.000"
    assert pooled[2]["ReCAST − static std"] == "0.707"
    assert a["win"] == "4/4"
    assert pooled[2]["win"] == "0/4"
    # a + b and a + 2b, a up by the shift and b down by it: 11 and 16.5 − shift
    assert float(aggregate["static"]) == pytest.approx((11 + 16.5 - 0.5) / 2, abs=0.02)
    assert float(aggregate["base"]) == pytest.approx((11 + 16.5) / 2, abs=0.02)
    assert {path.name for path in (tmp_path / "out").glob("differences.*")} == {"differences.png", "differences.pdf"}
    text, tex = (tmp_path / "out/report.md").read_text(), (tmp_path / "out/report.tex").read_text()
    assert made.found in text
    assert "| (1, 2) | static |" in text
    assert "| -1.000 ± 0.707 | 0/4 |" in text
    assert r"& -1.000$_{\pm0.707}$ & 0/4 \\" in tex
    assert "<td>-1.000<small> ±0.707</small></td>" in json.loads(_data(tmp_path / "out/index.html"))["tables"][0]
    assert "± 0.3" in made.found  # of the aggregate, by seed −0.25 and −0.75
    assert "over seeds, 95 %" in made.found
    assert tex.count(r"\begin{tabular}") == tex.count(r"\bottomrule") == 6
    assert r"\textbf{" in tex
    assert "mixed" in tex
    data = json.loads(_data(tmp_path / "out/index.html"))
    assert data["gallery"]["methods"] == ["base", "static", "ReCAST", "no-Sink"]
    assert len(data["training"]) == 12
    assert data["training"][0]["rewards"] == {"a": [1.0, 2.0], "b": [None, None]}
    assert data["curves"]["budget"] == [1.0, 1.0]
    again = stage.report([runs], tmp_path / "again")
    assert (tmp_path / "again/index.html").read_bytes() == (tmp_path / "out/index.html").read_bytes()
    assert again.found == made.found


def _data(page: Path) -> str:
    return page.read_text().split('type="application/json">')[1].split("</script>")[0]


def test_what_was_set_aside_is_left_out(runs: Path) -> None:
    (runs / "row-0-0").rename(runs / "row-0-0.stale-1")
    assert len(evaluate.find([runs])) == 12


def test_the_sentence_tells_which_way_it_goes(runs: Path) -> None:
    found = stage.sentence([Run.from_scores(policy) for policy in evaluate.find([runs])], ["census"])
    # (1, 1) ties, (1, 2) loses the shift: on average −0.5 · (1.5 − 0.5)
    assert found.startswith("ReCAST is below static on the training rewards: aggregate ")
    assert "0 of 4" in found or "1 of 4" in found or "2 of 4" in found
    assert "held-out rewards: census +1.000." in found
    assert "another seed" not in found
    one = [Run.from_scores(policy) for policy in evaluate.find([runs]) if policy.method in ("base", "static")]
    assert "no matched pair" in stage.sentence(one, ["census"])


def test_the_papers_tables_are_drawn_as_printed() -> None:
    runs, names = printed("ocr"), paper.TRAINED["ocr"]
    text = render.markdown(sections.by_budget(runs, names, "By budget", "x"))
    assert "| (1, 1, 1, 1) | static | 2.387 | 0.315 | 0.288 | 0.890 | 0.894 | ReCAST ≻ static |" in text
    assert "|  | ReCAST | 2.723 | **0.323** | 0.302 | **0.901** | 0.874 |  |" in text  # the tie at 0.302 is not bold
    panel = render.latex(sections.pooled(runs, paper.HELD_OUT, "Held-out rewards", "panel", aggregate=False))
    assert r"hpsv3 & 12.74 & \textbf{13.14} & +0.40 & 5/5 \\" in panel
    tie = render.markdown(sections.pooled(printed("geneval"), ("clipscore",), "x", "x", aggregate=False))
    assert "| clipscore | **0.299** | **0.299** | +0.000 | 0/5 |" in tie


@pytest.mark.parametrize(
    ("static", "ours", "gap"),
    [
        ((2.867, 0.026), (2.920, 0.028), "+0.053 ± 0.049"),
        ((0.893, 0.014), (0.900, 0.032), "+0.007 ± 0.046"),
        ((2.881, 0.021), (2.878, 0.015), "-0.003 ± 0.031"),
        ((0.873, 0.011), (0.874, 0.007), "+0.001 ± 0.017"),
        ((8.02, 0.95), (8.58, 0.56), "+0.56 ± 0.41"),
    ],
)
def test_the_papers_differences_over_seeds(static: tuple[float, float], ours: tuple[float, float], gap: str) -> None:
    """Three seeds with the printed deviations of both methods and of their difference come out as printed.

    Such seeds exist, so the paper's ± can be that of paired differences; unpaired, the first one would be 0.038.
    """
    (low, a), (high, b), d = static, ours, float(gap.split()[-1])
    correlation = max(-1.0, (a**2 + b**2 - d**2) / (2 * a * b))
    u, v = np.array([1, -1, 0]), np.array([1, 1, -2]) / np.sqrt(3)  # of deviation 1, and uncorrelated
    seeds = {"static": low + a * u, "sinkhorn": high + b * (correlation * u + np.sqrt(1 - correlation**2) * v)}
    runs = [Run(m, (("x", 1.0),), seed, {"x": value}) for m, row in seeds.items() for seed, value in enumerate(row)]
    assert f"| {gap} | " in render.markdown(sections.pooled(runs, ("x",), "x", "x", aggregate=False))
    for method, (mean, spread) in (("static", static), ("sinkhorn", ours)):
        found = compare.pool(compare.of(runs, method), "x")
        assert (found.mean, found.std) == (pytest.approx(mean), pytest.approx(spread))


def test_a_table_in_four_forms() -> None:
    table = Table("n", "50 % of a_b", ("λ", "x"), ((Cell("a|b"), Cell("1.0", "0.1", True)), (Cell("c"), Cell("2"))))
    assert render.markdown(table).splitlines()[2:] == [
        "| λ | x |",
        "|---|---:|",
        r"| a\|b | **1.0** ± 0.1 |",
        "| c | 2 |",
    ]
    assert r"\textbf{1.0}$_{\pm0.1}$" in render.latex(table)
    assert r"\caption{50 \% of a\_b.}" in render.latex(table)
    assert render.comma_separated(table) == "λ,x,x std\na|b,1.0,0.1\nc,2,\n"
    assert report_table(table).row_count == 2
    assert "<td><b>1.0</b><small> ±0.1</small></td>" in render.html(table)


def test_runs_that_cannot_be_compared_are_refused(runs: Path, tmp_path: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(RecastError, match=words):
            stage.report([runs], tmp_path / "out")

    with pytest.raises(RecastError, match="contains no evaluated run: run recast evaluate"):
        evaluate.find([runs / "base/scores/images"])
    with pytest.raises(RecastError, match="nowhere is not a folder of runs"):
        evaluate.find([tmp_path / "nowhere"])
    write_run(runs / "twin", "row", BUDGETS[0], 0, 1.0)
    refused("are both row with the same budget and seed")
    path = runs / "twin/scores/manifest.json"
    edit(path, '"seed": 0', '"seed": 7')
    rows = runs / "twin/scores/scores.jsonl"
    edit(rows, '"seed": 42', '"seed": 41')
    refused("were evaluated on different prompts or seeds")


def test_scores_of_two_versions_of_a_reward_are_refused(runs: Path, tmp_path: Path) -> None:
    for k, folder in enumerate(sorted(runs.glob("*/scores"))):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["versions"] = {"a": {"engine": f"rapidocr 3.{8 + (k == 5)}.0"}}
        del manifest["checksum"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecastError, match=r"scores with a.engine = rapidocr 3.9.0, but in .* it is rapidocr 3.8.0"):
        stage.report([runs], tmp_path / "out")


def test_without_pillow_there_are_tables_and_a_page_without_pictures(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="the page has no images without Pillow"):
        made = stage.report([runs], tmp_path / "out")
    assert len(made.tables) == 6
    assert '"items": []' in made.page.read_text()


def test_half_a_line_of_metrics_is_named(runs: Path, tmp_path: Path) -> None:
    path = runs / "row-0-0/metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RecastError, match="metrics.jsonl, line 2: not valid JSON"):
        stage.report([runs], tmp_path / "out")


def test_the_verb(runs: Path, tmp_path: Path) -> None:
    def call(*words: object) -> Any:
        return CliRunner().invoke(app, ["report", *map(str, words)], env={"COLUMNS": "160"})

    result = call(runs, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "ReCAST is below static" in result.output
    assert f"the page is {tmp_path / 'out/index.html'}" in result.output.replace("\n", " ")
    bad = call(tmp_path / "nowhere")
    assert bad.exit_code == 2
    assert "is not a folder of runs" in bad.output


def test_a_method_is_a_name_and_images_lie_in_their_run(runs: Path, tmp_path: Path) -> None:
    manifest = runs / "row-0-0/scores/manifest.json"
    good = manifest.read_text()
    for name in ("../../../up", "", "a/b", "..", 7):
        manifest.write_text(good.replace('"row"', json.dumps(name)))
        with pytest.raises(
            RecastError,
            match="row-0-0/scores/manifest.json: (run.method must be a name of letters|the field run.method is 7)",
        ):
            stage.report([runs], tmp_path / "out")
    manifest.write_text(good)
    rows = runs / "row-0-0/scores/scores.jsonl"
    whole = rows.read_text()
    for file in ("../../gains.json", "/etc/passwd", ".", "x" * 5000, "a\0b"):
        rows.write_text(whole.replace('"images/3.png"', json.dumps(file)))
        with pytest.raises(RecastError, match=r"scores.jsonl: the file .* must lie in .*row-0-0/scores"):
            stage.report([runs], tmp_path / "out")
    rows.write_text(whole)
    (runs / "row-0-0/scores/images/3.png").write_text("no image")
    with pytest.raises(RecastError, match=r"images/3.png cannot be decoded as an image: .*: run recast evaluate again"):
        stage.report([runs], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("manifest.json", '"seed": 0', '"seed": "0"', "the field run.seed is '0': input should be a valid integer"),
        ("manifest.json", '"seed": 0', '"seed": true', "the field run.seed is True: input should be a valid integer"),
        ("manifest.json", '"a": 1.0', '"a": "1"', "the field run.budget.a is '1': input should be a valid number"),
        ("manifest.json", '"a": 1.0', '"a": -1.0', "the field run.budget.a is -1.0: input should be greater"),
        ("manifest.json", '["a", "b"]', '"ab"', "the field trained is 'ab': input should be a valid list"),
        ("manifest.json", '["a", "b"]', '["a", "a"]', "a reward is named twice among a, a, census"),
        (
            "scores.jsonl",
            '"seed": 45',
            '"seed": 45.5',
            "line 4: the field seed is 45.5: input should be a valid integer",
        ),
        (
            "scores.jsonl",
            '"prompt": "prompt 3"',
            '"prompt": 3',
            "line 4: the field prompt is 3: input should be a valid string",
        ),
        ("scores.jsonl", '"index": 3, ', "", "line 4: the field index is missing"),
        ("scores.jsonl", '"b": 2.25', '"b": "2.25"', "line 4: the field scores.b is '2.25'"),
        ("scores.jsonl", '"b": 2.25', '"b": Infinity', "line 4: not valid JSON .Infinity is no number"),
        ("scores.jsonl", '"b": 2.25', '"b": NaN', "line 4: not valid JSON .NaN is no number"),
        ("scores.jsonl", '"b": 2.25', '"b": true', "line 4: the field scores.b is True"),
        ("scores.jsonl", '"b": 2.25', '"b": 2.25, "b": 3', "line 4: not valid JSON"),
    ],
)
def test_a_damaged_run_never_becomes_a_number(
    runs: Path, tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    path = runs / "row-0-0/scores" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(RecastError, match=f"{file}.*{said}"):
        stage.report([runs], tmp_path / "out")
    assert not (tmp_path / "out").exists()
