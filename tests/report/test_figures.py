"""Figures hold what they were given: read back from the axes."""

import numpy as np
import pytest
import torch

import recast
from recast.core import schedule
from recast.core.comparison import overlay
from recast.core.curves import GainCurves
from recast.report import figures, sections
from recast.report.compare import Run


def test_a_contact_sheet_shows_each_image_under_its_prompt() -> None:
    prompts = [f"prompt {k}" for k in range(10)]
    rows = {name: torch.rand(10, 3, 4, 4) for name in ("renderer", "base")}
    sheet = figures.contact_sheet(prompts, rows, [f"note {k}" for k in range(10)])
    grid = np.array(sheet.axes).reshape(4, 8)
    for k, prompt in enumerate(prompts):
        line, column = divmod(k, 8)
        for r, (name, images) in enumerate(rows.items()):
            axes = grid[2 * line + r, column]
            np.testing.assert_allclose(axes.images[0].get_array(), images[k].permute(1, 2, 0), atol=1e-6)
            assert axes.get_title() == (prompt if r == 0 else "")
            assert axes.get_xlabel() == (f"note {k}" if r == 1 else "")
            assert axes.get_ylabel() == (name if column == 0 else "")


def test_the_panels_figure_shows_the_four_panels_of_each_run() -> None:
    D = np.array([[0.5, 0.4, 0.1, 0.05], [0.9, 0.2, 0.15, 0.1]])
    runs = {
        "first": GainCurves(("a", "b"), [0, 0.3, 0.6, 1], D),
        "second": GainCurves(("a", "b"), [0, 0.3, 0.6, 1], 2 * D),
    }
    grid = np.array(figures.panels_figure(runs).axes).reshape(2, 4)
    for line, curves in zip(grid, runs.values(), strict=True):
        shown = [np.array([ln.get_ydata() for ln in axes.lines if ln.get_label() in "ab"]) for axes in line]
        np.testing.assert_allclose(shown[0], curves.D - curves.D[:, -1:])
        np.testing.assert_allclose(shown[1], curves.gains)
        np.testing.assert_allclose(shown[2], curves.normalized())
        np.testing.assert_allclose(shown[3].sum(0), 1 / 3)
        np.testing.assert_allclose(shown[3].sum(1), 1 / 2)


def test_the_overlay_dashes_what_was_resampled_and_shows_shares_of_the_steps() -> None:
    coarse, fine = np.linspace(0, 1, 5), np.linspace(0, 1, 9)
    joint = GainCurves(("a", "b"), schedule.from_shift(4), [1 - coarse, 1 - coarse**2])
    text = GainCurves(("ocr",), schedule.from_shift(8), [1 - fine**3])
    laid = overlay({"joint": joint, "text": text})
    weights = recast.weigh(laid.curves, {"a": 1, "ocr": 1, "new": 2})
    figure = figures.overlay_figure(laid, weights)
    for axes, names, rows in zip(
        figure.axes,
        (laid.curves.rewards, laid.curves.rewards, weights.rewards),
        (laid.curves.gains, laid.curves.normalized(), weights.matrix),
        strict=True,
    ):
        lines = [line for line in axes.lines if line.get_label() in names]
        assert [line.get_label() for line in lines] == list(names)
        for line, row in zip(lines, rows, strict=True):
            np.testing.assert_allclose(line.get_xdata(), [0.25, 0.5, 0.75, 1.0])
            np.testing.assert_array_equal(line.get_ydata(), row)
            assert line.get_linestyle() == ("--" if line.get_label() == "ocr" else "-")
    static = [line.get_ydata()[0] for line in figure.axes[2].lines if line.get_linestyle() == ":"]  # type: ignore[index]
    assert static == pytest.approx([0.0625, 0.0625, 0.125])
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert said == ["a (T = 4)", "b (T = 4)", "ocr (from T = 8)", "new (no curve)"]


@pytest.mark.parametrize("method", ["sinkhorn", "matched", "row"])
def test_with_masses_the_factors_are_drawn_around_lambda(method: str) -> None:
    D = np.random.default_rng(0).gamma(1.0, size=(5, 2, 5)).cumsum(-1)[..., ::-1]
    curves = GainCurves(("a", "b"), schedule.from_shift(4), D.mean(0), D_prompts=D)
    weights = recast.weigh(curves, [1, 3], method, columns=[1, 2, 3, 0])
    axes = figures.gain_figure(curves, weights).axes[2]
    assert axes.get_title() == f"W/ν ({method}); dashed: static"
    lines = {line.get_label(): line for line in axes.lines}
    for name, row in zip("ab", weights.factors, strict=True):
        np.testing.assert_array_equal(lines[name].get_ydata(), row)
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [0.25, 0.75]  # type: ignore[index]
    assert len(axes.collections) == (0 if method == "row" else 2)


def test_methods_come_in_the_order_of_the_tables_under_their_names() -> None:
    order = sorted(["matched-reversed", "shuffled", "shared", "row", "base", "matched", "sinkhorn", "static", "hard"])
    names = [sections.shown(method) for method in sorted(order, key=sections.rank)]
    expected = ["base", "static", "ReCAST", "no-Sink", "matched", "hard", "shared", "shuffled", "reversed (matched)"]
    assert names == expected
    assert sections.shown("row-shuffled") == "shuffled (no-Sink)"


def test_the_differences_figure_has_a_dot_a_matched_pair_at_its_height() -> None:
    def run(method: str, budget: float, seed: int, a: float) -> Run:
        return Run(method, (("a", 1.0), ("b", budget)), seed, {"a": a, "b": 2.0})

    runs = [run("static", budget, seed, 0.5) for budget in (1.0, 2.0) for seed in (0, 1)]
    runs += [
        run("sinkhorn", budget, seed, 0.5 + 0.1 * budget + 0.01 * seed) for budget in (1.0, 2.0) for seed in (0, 1)
    ]
    runs.append(run("row", 1.0, 0, 0.25))
    figure = figures.differences_figure(runs, ("a", "b"))
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["aggregate r", "a", "b"]
    names = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert names == ["ReCAST", "no-Sink"]
    dots = [line for line in figure.axes[1].lines if line.get_marker() == "." and len(line.get_xdata())]
    heights = sorted(float(dot.get_ydata()[0]) for dot in dots)  # type: ignore[index]
    assert heights == pytest.approx([-0.25, 0.1, 0.11, 0.2, 0.21])
    assert len({dot.get_color() for dot in dots}) == 2
    assert figures.differences_figure(runs[:4], ("a",)) is None
