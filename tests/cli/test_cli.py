"""The commands as a person types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import recast
from recast.cli import app
from recast.core import schedule
from recast.core.effects import Effects
from recast.weigh import METHODS

ROOT = Path(__file__).parents[2]
QUICK = ["world.dimension=4", "world.prompts=3", "estimate.steps=6", "estimate.samples=2", "estimate.noisings=2"]


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def fails(*arguments: str | Path) -> str:
    """The one sentence of a command that must end with code 2 and no traceback."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def gains(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    mu = rng.random((10, 3, 11, 4)) * np.linspace(1, 0.2, 11)[:, None]
    mu[:, 2] = 0.5  # a reward with no gain at all
    curves = recast.GainCurves.from_mu(("clipscore", "ocr", "flat"), schedule.from_shift(10), mu)
    return curves.save(tmp_path / "gains.json")


def test_version_and_help() -> None:
    assert call("--version").output.strip() == f"recast {recast.__version__}"
    for verb in ("estimate", "weigh", "compare", "plot", "run"):
        assert verb in call("--help").output
        text = call(verb, "--help").output
        assert "Example:" in text
        assert f"recast {verb}" in text


def test_weigh_prints_a_table_and_a_heatmap_and_writes_the_file(gains: Path) -> None:
    result = call("weigh", gains, "--budget", "clipscore=1,ocr=2")
    assert result.exit_code == 0, result.output
    W = recast.WeightMatrix.load(gains.parent / "weights.json")
    assert W.rewards == ("clipscore", "ocr")
    np.testing.assert_allclose(W.budget, [1 / 3, 2 / 3])
    np.testing.assert_array_equal(
        W.matrix, recast.weigh(recast.GainCurves.load(gains), {"clipscore": 1, "ocr": 2}).matrix
    )
    for words in ("clipscore", "0.6667", "weights.json"):
        assert words in result.output.replace("\n", "")
    assert any(shade in result.output for shade in "░▒▓█")


def test_weigh_says_what_is_wrong_with_a_reward(gains: Path) -> None:
    output = call("weigh", gains, "--budget", "clipscore=1,flat=1,new=1").output.replace("\n", " ")
    assert "flat has no gain at any step" in output
    assert "new has no gain curve;" in output
    assert "did you mean clipscore?" in call("weigh", gains, "--budget", "clipscor=1,ocr=1").output


def test_weigh_defaults_to_an_even_budget_and_writes_the_same_bytes(gains: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert call("weigh", gains, "--out", tmp_path / name).exit_code == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    np.testing.assert_allclose(recast.WeightMatrix.load(tmp_path / "a.json").budget, 1 / 3)


@pytest.mark.parametrize("method", METHODS)
def test_weigh_offers_every_method(gains: Path, method: str) -> None:
    assert call("weigh", gains, "--method", method).exit_code == 0
    assert recast.WeightMatrix.load(gains.parent / "weights.json").method == method


def test_weigh_shows_the_budget_that_matched_shares_realize(gains: Path) -> None:
    result = call("weigh", gains, "--method", "matched", "--budget", "clipscore=1,ocr=2,new=1")
    W = recast.WeightMatrix.load(gains.parent / "weights.json")
    rows = {line.split("│")[1].strip(): line for line in result.output.splitlines() if "│" in line}
    for name, share, realized in zip(W.rewards, W.budget, W.realized(), strict=True):
        assert [cell.strip() for cell in rows[name].split("│")[2:4]] == [f"{share:.4g}", f"{realized:.4g}"]
    assert "realized" in result.output
    assert "new has no gain curve; it counts as equally informative at every step" in result.output.replace("\n", " ")
    assert "realized" not in call("weigh", gains).output


def test_weigh_takes_the_masses_of_the_steps(gains: Path, tmp_path: Path) -> None:
    curves = recast.GainCurves.load(gains)
    numbers = list(range(1, curves.steps + 1))
    result = call("weigh", gains, "--columns", ",".join(map(str, numbers)))
    assert result.exit_code == 0, result.output
    W = recast.WeightMatrix.load(gains.parent / "weights.json")
    np.testing.assert_array_equal(W.matrix, recast.weigh(curves, [1, 1, 1], columns=numbers).matrix)
    np.testing.assert_allclose(W.matrix.sum(0), np.array(numbers) / sum(numbers), atol=1e-9)
    assert "steps by ν" in result.output
    g = np.random.default_rng(0).normal(1.0, 0.5, (6, 3 * curves.steps, 20))
    products = np.einsum("qap,rbp->qrab", g, g)
    measured = Effects.measured(curves.rewards, curves.sigmas, products, 4, batch=32, levels=curves.steps)
    path = measured.save(tmp_path / "effects.json")
    result = call("weigh", gains, "--columns", path)
    W = recast.WeightMatrix.load(gains.parent / "weights.json")
    np.testing.assert_allclose(W.nu, measured.effect)
    assert W.info["columns"] == "effect"
    assert "steps by their effect" in result.output
    short = Effects.measured(curves.rewards, [0, 0.5, 1], products[:, :, :6, :6], 4, batch=32, levels=2)
    assert "another grid (T = 2)" in fails("weigh", gains, "--columns", short.save(tmp_path / "short.json"))
    assert "cannot be read" in fails("weigh", gains, "--columns", tmp_path / "none.json")
    assert "must be uniform, the path of an effects.json" in fails("weigh", gains, "--columns", "effect")
    assert "columns has 2 numbers" in fails("weigh", gains, "--columns", "1,2")
    assert "non-negative" in fails("weigh", gains, "--columns", ",".join(["-1"] * curves.steps))
    assert "finite" in fails("weigh", gains, "--columns", ",".join(["nan"] * curves.steps))


def test_weigh_takes_a_temperature(gains: Path) -> None:
    assert call("weigh", gains, "--tau", "0.2").exit_code == 0
    W = recast.WeightMatrix.load(gains.parent / "weights.json")
    np.testing.assert_array_equal(W.matrix, recast.weigh(recast.GainCurves.load(gains), [1, 1, 1], tau=0.2).matrix)


def test_weigh_shrinks_when_asked(gains: Path) -> None:
    assert call("weigh", gains, "--shrink").exit_code == 0
    W = recast.WeightMatrix.load(gains.parent / "weights.json")
    expected = recast.weigh(recast.GainCurves.load(gains), [1, 1, 1], shrink=True)
    np.testing.assert_array_equal(W.matrix, expected.matrix)
    assert W.info["shrink"] is True


def test_weigh_names_bad_input(gains: Path, tmp_path: Path) -> None:
    assert "No such file" in fails("weigh", tmp_path / "none.json")
    assert "'ocr=two'" in fails("weigh", gains, "--budget", "clipscore=1,ocr=two")
    assert "'ocr'" in fails("weigh", gains, "--budget", "ocr")
    assert "twice" in fails("weigh", gains, "--budget", "ocr=1,ocr=2")
    assert "name=number" in fails("weigh", gains, "--budget", "ocr=-1")
    assert "name=number" in fails("weigh", gains, "--budget", "ocr=nan")
    assert "unknown method 'best'" in fails("weigh", gains, "--method", "best")
    assert "tau must be a positive number" in fails("weigh", gains, "--tau", "0")
    assert "tau must be a positive number" in fails("weigh", gains, "--tau", "inf")
    assert "overwrite the curves" in fails("weigh", gains, "--out", gains)
    assert "none of new has a gain curve" in fails("weigh", gains, "--budget", "new=1")
    assert "is a setting of a recipe" in fails("weigh", gains, "weigh.tau=2")
    truncated = tmp_path / "half.json"
    truncated.write_text(gains.read_text()[:300])
    assert "truncated" in fails("weigh", truncated)
    content = json.loads(gains.read_text())
    content["version"] = 7
    truncated.write_text(json.dumps(content))
    assert "version 7" in fails("weigh", truncated)
    assert not (tmp_path / "weights.json").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(gains: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in fails("weigh", gains, "--out", tmp_path / "file" / "weights.json")
    assert "cannot be written" in fails("plot", gains, "--out", tmp_path / "file" / "figure")


def test_brackets_in_names_and_paths_are_just_text(gains: Path, tmp_path: Path) -> None:
    odd = recast.GainCurves.load(gains)
    odd = recast.GainCurves(("a[/b]", "[red]c", "d"), odd.sigmas, odd.D)
    path = odd.save(tmp_path / "x[bold]" / "gains.json")
    result = call("weigh", path)
    assert result.exit_code == 0, result.output
    assert "a[/b]" in result.output
    assert str(path.parent / "weights.json") in result.output
    assert call("compare", path, path).exit_code == 0


def test_the_heatmap_fits_the_terminal_and_keeps_names(gains: Path) -> None:
    from rich.console import Console

    from recast.cli.tables import ASCII_SHADES, heatmap, weights_table

    curves = recast.GainCurves.load(gains).resample(schedule.from_shift(100))
    for width in (40, 80, 200):
        lines = heatmap(recast.weigh(curves, [1, 1, 1]), width)
        assert all(len(line.plain) <= width for line in lines[1:])
        assert [line.plain.split()[0] for line in lines[1:]] == list(curves.rewards)
    assert heatmap(recast.weigh(curves, [1, 1, 1], "static"), 200)[1].plain.endswith("▒" * 100)
    table = Console(width=100, record=True)
    table.print(weights_table(recast.weigh(curves, [1, 1, 1]), curves))
    for name, row in zip(curves.rewards, curves.gains, strict=True):
        (line,) = (text for text in table.export_text(clear=False).splitlines() if f" {name} " in text)
        assert [cell.strip() for cell in line.split("│")][4] == str(row.argmax() + 1)
    hot = recast.WeightMatrix(("a",), [0, 0.5, 1], [[1.0, 0.0]], [1.0])
    assert heatmap(hot, 80, ASCII_SHADES)[1].plain == "a  ##  "


def test_a_terminal_without_unicode_gets_no_traceback(gains: Path) -> None:
    command = [str(Path(sys.executable).parent / "recast"), "weigh"]
    for arguments in ([str(gains)], ["--help"]):
        result = subprocess.run(
            command + arguments, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False
        )
        assert result.returncode == 0, result.stderr
        assert b"Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["weigh"], "Missing argument"),
        (["weigh", "x.json", "--tau", "abc"], "'--tau'"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["weigh", "x.json", "--budgit", "a=1"], "No such option"),
    ],
)
def test_a_wrong_call_is_one_sentence_too(arguments: list[str], words: str) -> None:
    result = subprocess.run([sys.executable, "-m", "recast", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert "--help'" in line


def test_no_arguments_show_the_help_and_success_is_zero(gains: Path) -> None:
    bare = subprocess.run([sys.executable, "-m", "recast"], capture_output=True, text=True, check=False)
    assert "Usage" in bare.stdout + bare.stderr
    for arguments, code in ((["--version"], 0), (["weigh", str(gains)], 0), (["weigh", "none.json"], 2)):
        command = [sys.executable, "-m", "recast", *arguments]
        assert subprocess.run(command, capture_output=True, check=False).returncode == code


def test_compare_prints_the_papers_two_tables(gains: Path) -> None:
    result = call("compare", gains, gains)
    assert result.exit_code == 0, result.output
    for words in ("Pearson", "Spearman", "1.000", "1.00×", "remaining", "all"):
        assert words in result.output


def test_compare_puts_the_first_file_first(gains: Path, tmp_path: Path) -> None:
    curves = recast.GainCurves.load(gains).select(["ocr"])
    half = recast.GainCurves(("ocr",), curves.sigmas, curves.D / 2).save(tmp_path / "half.json")
    output = call("compare", gains, half).output
    (row,) = (line for line in output.splitlines() if "ocr" in line and f"{curves.total[0]:.3f}" in line)
    assert [cell.strip() for cell in row.split("│")][2:5] == [
        f"{curves.total[0]:.3f}",
        f"{curves.total[0] / 2:.3f}",
        "0.50×",
    ]


def test_compare_needs_one_grid_or_the_flag(gains: Path, tmp_path: Path) -> None:
    other = recast.GainCurves.load(gains).resample(schedule.from_shift(25)).save(tmp_path / "other.json")
    assert "--resample" in fails("compare", gains, other)
    same_steps = recast.GainCurves.load(gains).resample(schedule.from_shift(10, 1.0)).save(tmp_path / "same.json")
    assert "--resample" in fails("compare", gains, same_steps)
    assert "different grids" in fails("plot", gains, "--truth", same_steps)
    result = call("compare", gains, other, "--resample")
    assert result.exit_code == 0
    total = recast.GainCurves.load(other).total[0]  # the drift table needs no common grid, and keeps its totals
    assert f"{total:.3f}" in result.output


def test_plot_draws_png_and_pdf_the_same_every_time(gains: Path, tmp_path: Path) -> None:
    for name in ("a", "b.png"):
        result = call("plot", gains, "--budget", "clipscore=1,ocr=2", "--truth", gains, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
    for kind, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
        assert first.startswith(magic)
        assert first == second
    result = call("plot", gains, "--budget", "clipscore=9,ocr=1", "--shrink", "--out", tmp_path)
    assert (tmp_path / "gains.png").read_bytes() != (tmp_path / "a.png").read_bytes()
    curves = recast.GainCurves.load(gains)
    of_two, of_all = result.output.splitlines()[:2]
    ratio = curves.select(("clipscore", "ocr")).demand_ratio([9, 1])
    assert f"of clipscore, ocr at λ = (9, 1): varies by {ratio:.2f}× over the steps 2 to 10" in of_two
    assert f"of all rewards at uniform λ: varies by {curves.demand_ratio():.2f}×" in of_all
    assert f"without ocr {curves.select(('clipscore', 'flat')).demand_ratio():.2f}×" in of_all


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Three files as in Sec. 3.5: two rewards at T = 4, and two files at T = 8 that share one of them."""
    steps = {4: np.linspace(0, 1, 5), 8: np.linspace(0, 1, 9)}
    sets = {"joint": (("even", "late"), 4), "text": (("late", "ocr"), 8), "objects": (("even", "geneval"), 8)}
    shapes = {
        "even": lambda u: 1 - u,
        "late": lambda u: 1 - u**2,
        "ocr": lambda u: 1 - u**3,
        "geneval": lambda u: 1 - u**8,
    }
    paths = []
    for name, (rewards, T) in sets.items():
        curves = recast.GainCurves(rewards, schedule.from_shift(T), [shapes[reward](steps[T]) for reward in rewards])
        paths.append(curves.save(tmp_path / f"{name}.json"))
    return paths


def test_plot_lays_curves_of_different_grids_over_each_other(three: list[Path]) -> None:
    result = call("plot", *three, "--budget", "even=1,ocr=1")
    assert result.exit_code == 0, result.output
    said = result.output
    assert f"note: late of {three[1]} is not drawn: an earlier file has it" in said
    assert f"note: even of {three[2]} is not drawn: an earlier file has it" in said
    # gains of 1 − u^n at t/T = 1/4 … 1: t^n − (t−1)^n over 4^n; normalized, they sum to 4
    n = np.array([1, 2, 3, 8])[:, None]
    gains = (np.arange(1, 5) / 4) ** n - (np.arange(4) / 4) ** n
    demand = 4 * gains.mean(0)[1:]
    assert f"of all rewards at uniform λ: varies by {demand.max() / demand.min():.2f}× over the steps 2 to 4" in said
    demand = 4 * gains[:3].mean(0)[1:]
    assert f"without geneval {demand.max() / demand.min():.2f}×" in said
    demand = 4 * gains[[0, 2]].mean(0)[1:]
    assert f"of even, ocr at uniform λ: varies by {demand.max() / demand.min():.2f}×" in said
    assert {path.name for path in three[0].parent.glob("overlay.*")} == {"overlay.png", "overlay.pdf"}


def test_plot_names_files_that_cannot_be_laid_over_each_other(three: list[Path], tmp_path: Path) -> None:
    assert "is named twice" in fails("plot", three[0], three[0])
    assert "--truth belongs to one file" in fails("plot", *three, "--truth", three[0])
    other = tmp_path / "other.json"
    curves = recast.GainCurves.load(three[0])
    curves.save(other)
    assert f"{other} adds no reward" in fails("plot", three[0], other)
    recast.GainCurves(("new",), curves.sigmas, curves.D[:1], alpha=4).save(other)
    assert f"{other} has alpha = 4.0, but {three[0]} has 2.0" in fails("plot", three[0], other)


def test_a_step_without_demand_is_said_in_words(tmp_path: Path) -> None:
    grid = schedule.from_shift(4)
    path = recast.GainCurves(("a", "b"), grid, [[3, 2, 2, 1, 1], [2, 1, 1, 0, 0]]).save(tmp_path / "gains.json")
    assert "none at t = 2, 4, so its ratio over the steps 2 to 4 is infinite" in call("weigh", path).output
    path = recast.GainCurves(("a", "b"), grid, [[3, 2, 2, 2, 2], [2, 1, 1, 1, 1]]).save(tmp_path / "gains.json")
    assert "none at the steps 2 to 4, because no reward has gain there" in call("weigh", path).output
    path = recast.GainCurves(("a", "b"), [0, 1], [[3, 2], [2, 1]]).save(tmp_path / "gains.json")
    assert "demand Σ" not in call("weigh", path).output


def test_the_figure_shows_the_numbers(gains: Path) -> None:
    from recast.report.figures import gain_figure

    curves = recast.GainCurves.load(gains)
    W = recast.weigh(curves, [1, 1, 1])
    left, middle, right = gain_figure(curves, W).axes
    bands = curves.intervals()
    for axes, band in (
        (left, bands["gains"]),
        (middle, bands["normalized"]),
        (right, curves.weight_intervals([1, 1, 1])),
    ):
        for i, area in enumerate(axes.collections):
            heights = area.get_paths()[0].vertices[:, 1]
            np.testing.assert_allclose([heights.min(), heights.max()], [band[0, i].min(), band[1, i].max()])
    for axes, rows in ((left, curves.gains), (middle, curves.normalized()), (right, W.matrix)):
        for line, row in zip(axes.lines, rows, strict=False):
            np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 11))
            np.testing.assert_array_equal(line.get_ydata(), row)


def test_a_reward_has_one_colour_in_every_panel(gains: Path) -> None:
    from recast.report.figures import gain_figure

    curves = recast.GainCurves.load(gains)
    left, _, right = gain_figure(curves, recast.weigh(curves, {"new": 1, "ocr": 2})).axes
    colour = {line.get_label(): line.get_color() for line in left.lines}
    drawn = {line.get_label(): line.get_color() for line in right.lines[:2]}
    assert drawn["ocr"] == colour["ocr"]
    assert drawn["new"] == colour["new (no curve)"]
    assert drawn["new"] not in (colour["clipscore"], colour["ocr"], colour["flat"])


def test_new_curves_do_not_stand_beside_old_weights(tmp_path: Path) -> None:
    recipe = ROOT / "recipes/mixture.yaml"
    assert call("run", recipe, *QUICK, "--out", tmp_path).exit_code == 0
    assert call("estimate", recipe, *QUICK, "estimate.aggregate=pooled", "--out", tmp_path).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "gains.json", "exact.json", "shards"}
    assert call("weigh", recipe, *QUICK, "weigh.budget.fine=9", "--out", tmp_path).exit_code == 0
    assert "fine: 9.0" in (tmp_path / "recipe.yaml").read_text()


def test_run_leaves_every_artifact_and_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        result = call("run", ROOT / "recipes/mixture.yaml", *QUICK, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "a").iterdir() if path.is_file()}
    assert names == {"recipe.yaml", "gains.json", "exact.json", "weights.json", "gains.png", "gains.pdf"}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    curves = recast.GainCurves.load(tmp_path / "a" / "gains.json")
    assert curves.rewards == ("mode", "mixed", "fine")
    assert curves.steps == 6
    assert curves.provenance["velocity_evaluations"] > 0
    assert "away from the W of the exact curves" in result.output.replace("\n", " ")


def test_every_setting_of_a_recipe_reaches_the_curves(tmp_path: Path) -> None:
    recipe = ROOT / "recipes/mixture.yaml"
    changes = (
        "estimate.seed=1",
        "estimate.spacing=0.3",
        "estimate.alpha=4",
        "estimate.aggregate=pooled",
        "world.seed=5",
    )
    changes += ("world.modes=4", "estimate.shift=1", "estimate.rollouts=2", "estimate.noisings=3", "estimate.samples=3")
    seen = []
    for change in ("estimate.seed=0", *changes):
        assert call("estimate", recipe, *QUICK, change, "--out", tmp_path / change).exit_code == 0
        seen.append(recast.GainCurves.load(tmp_path / change / "gains.json").D)
    for change, D in zip(changes, seen[1:], strict=True):
        assert not np.array_equal(D, seen[0]), change


def test_other_orders_with_few_rollouts_are_warned_of(tmp_path: Path) -> None:
    result = call("estimate", ROOT / "recipes/mixture.yaml", *QUICK, "estimate.alpha=0.5", "--out", tmp_path)
    assert result.exit_code == 0
    assert "warning: at alpha = 0.5" in result.stderr
    assert "set estimate.rollouts to 4 or more (it is 1)" in result.stderr


def test_the_verdict_is_the_distance_of_the_two_weight_matrices(tmp_path: Path) -> None:
    result = call("run", ROOT / "recipes/mixture.yaml", *QUICK, "weigh.tau=0.5", "--out", tmp_path)
    W = recast.WeightMatrix.load(tmp_path / "weights.json")
    assert W.info["tau"] == 0.5
    exact = recast.weigh(recast.GainCurves.load(tmp_path / "exact.json"), [1, 1, 1], tau=0.5)
    assert f"W is {np.abs(W.matrix - exact.matrix).sum():.1%} (L1)" in result.output
    assert f"Alg. 1 at K = 16 takes {3 * 2 * 16 * 21:,}" in result.output


def test_estimate_then_weigh_by_recipe_is_run(tmp_path: Path) -> None:
    recipe = ROOT / "recipes/mixture.yaml"
    assert call("run", recipe, *QUICK, "--out", tmp_path / "whole").exit_code == 0
    assert call("estimate", recipe, *QUICK, "--out", tmp_path / "parts").exit_code == 0
    assert call("weigh", recipe, *QUICK, "--out", tmp_path / "parts").exit_code == 0
    for name in ("gains.json", "weights.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_the_paper_estimator_runs_from_the_same_recipe(tmp_path: Path) -> None:
    more = ["estimate.estimator=paper", "estimate.rollouts=3", "--out", tmp_path]
    result = call("run", ROOT / "recipes/mixture.yaml", *QUICK, *more)
    assert result.exit_code == 0, result.output
    assert recast.GainCurves.load(tmp_path / "gains.json").provenance["velocity_evaluations"] == 3 * 2 * 3 * 21


def test_recipes_name_bad_input(tmp_path: Path) -> None:
    recipe = ROOT / "recipes/mixture.yaml"
    assert "did you mean 'noisings'" in fails("run", recipe, "estimate.noising=3", "--out", tmp_path)
    assert "No such file" in fails("run", tmp_path / "none.yaml", "--out", tmp_path)
    assert "gains.json: cannot be read" in fails("weigh", recipe, "--out", tmp_path)
    assert "weigh.budget.NAME=1" in fails("weigh", recipe, "--budget", "mode=1", "--out", tmp_path)
    assert list(tmp_path.iterdir()) == []
