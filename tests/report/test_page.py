"""The page in a real browser: W as Python solves it, pictures in order, no network, no mouse, no wide screen."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from browser import RIGHT, Browser
from PIL import Image

from recast import GainCurves, weigh
from recast.core import schedule, sinkhorn
from recast.evaluate import Scores
from recast.report import page
from recast.report.render import Cell, Table
from recast.weigh import METHODS

STEPS, REWARDS = 10, ("clip", "ocr", "flat", "</script><!--<script><b>")
needs_chromium = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())


def curves() -> GainCurves:
    rng = np.random.default_rng(0)
    gains = rng.gamma(0.5, 1.0, (4, 6, STEPS))
    gains[2] = 0.0  # never informative: log K = 0
    D = np.concatenate([gains[..., ::-1].cumsum(-1)[..., ::-1], np.zeros((4, 6, 1))], axis=-1)
    D = D.transpose(1, 0, 2)  # (prompts, rewards, levels)
    return GainCurves(REWARDS, schedule.from_shift(STEPS), D.mean(0), 2.0, D_prompts=D)


def policy(folder: Path, method: str, shift: float) -> Scores:
    """Four pictures of 512 pixels and their scores."""
    (folder / "images").mkdir(parents=True)
    images = []
    for k in range(4):
        Image.new("RGB", (512, 512), (40 * k, 100, 200)).save(folder / f"images/{k}.png")
        images.append({"index": k, "prompt": f"prompt {k}", "seed": 42 + k, "file": f"images/{k}.png"})
    values = np.array([[0.1, 0.4, np.nan, 0.2]]) * (1 + shift)
    return Scores(folder, method, {"clip": 1.0}, 0, ("clip",), (), tuple(images), values)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    table = Table("t", "A <title>", ("name", "value"), ((Cell("a & b"), Cell("1.0", "0.1", True)),), ("A note.",))
    training = [{"method": "ReCAST", "seed": 0, "epochs": [1, 2, 3], "rewards": {"clip": [0.1, None, 0.3]}}]
    policies = [
        policy(folder / name, name, shift) for name, shift in (("base", 0.0), ("static", 0.5), ("sinkhorn", 1.0))
    ]
    budget = {"clip": 1.0, "ocr": 2.0, "flat": 1.0, REWARDS[3]: 0.5}
    text = page.page("What <was> found.", ["An alarm."], [table], curves(), budget, training, policies)
    (folder / "index.html").write_text(text, encoding="utf-8")
    return folder / "index.html"


@pytest.fixture(scope="module")
def view(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as session:
        session.call("/window/rect", width=1200, height=900)
        session.open(path)
        yield session


def python_weights(budget: list[float], gains: Any = None) -> np.ndarray:
    return sinkhorn.project(curves().gains if gains is None else gains, budget, tol=1e-13, max_iter=100_000).weights


def test_the_file_stands_alone(path: Path) -> None:
    text = path.read_text()
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?!data:)", text.split("<script")[0])
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) == {"http://www.w3.org/2000/svg"}
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert data["curves"]["rewards"] == list(REWARDS)
    assert data["gallery"]["items"][2]["scores"]["base"]["clip"] is None
    assert data["gallery"]["items"][0]["images"]["ReCAST"].startswith("data:image/jpeg;base64,")


@pytest.mark.parametrize(
    ("installed", "packages"),
    [
        (("google-chrome", "chromedriver"), ""),
        (("chromium-browser",), "chromium-driver"),
        (("chromedriver",), "chromium"),
        ((), "chromium chromium-driver"),
    ],
)
def test_the_skip_names_the_packages_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], packages: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name in installed else None)
    assert browser.missing().partition("apt-get install ")[2] == packages


@needs_chromium
def test_w_is_pythons_to_a_billionth_as_one_drags(view: Browser) -> None:
    """The first slider by the keyboard, then all of them to budgets of every kind."""
    np.testing.assert_allclose(view.run("return window.solved.weights"), python_weights([1, 2, 1, 0.5]), atol=1e-9)
    view.press("#sliders label:nth-child(1) input", RIGHT * 4)
    np.testing.assert_allclose(view.run("return window.solved.weights"), python_weights([1.2, 2, 1, 0.5]), atol=1e-9)
    move = """const inputs = [...document.querySelectorAll("#sliders input")];
        inputs.forEach((input, i) => { input.value = arguments[0][i]; });
        inputs[0].dispatchEvent(new Event("input")); return window.solved.weights;"""
    for budget in ([4, 0.05, 0.05, 0.05], [0, 1, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]):
        np.testing.assert_allclose(view.run(move, budget), python_weights(budget), atol=1e-9)
    cells = view.run('return [...document.querySelectorAll("#heatmap td")].map(cell => cell.textContent)')
    expected = STEPS * python_weights([1, 1, 1, 1]).ravel()
    np.testing.assert_allclose(np.array(cells, float), expected, atol=0.00501)
    view.run('document.getElementById("reset").click()')
    np.testing.assert_allclose(view.run("return window.solved.weights"), python_weights([1, 2, 1, 0.5]), atol=1e-9)


@needs_chromium
@pytest.mark.parametrize("seed", range(3))
def test_the_browsers_solver_on_other_curves(view: Browser, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gains, budget = rng.gamma(0.3, 1.0, (4, 25)), rng.dirichlet(np.ones(4))
    kernel = gains / gains.mean(axis=1, keepdims=True)
    solved = view.run("return window.project(arguments[0], arguments[1])", kernel.tolist(), budget.tolist())
    np.testing.assert_allclose(solved["weights"], python_weights(budget.tolist(), gains), atol=1e-9)
    assert solved["error"] <= 1e-13


@needs_chromium
@pytest.mark.parametrize("columns", [None, [3, 1, 4, 1, 5, 9, 2, 6, 5, 0]])
def test_every_method_of_the_page_is_pythons(view: Browser, columns: list[float] | None) -> None:
    """W, the factors and the budget realized, with the data of a page whose run has these masses and a temperature."""
    shares = dict(zip(REWARDS, (1.0, 2.0, 1.0, 0.5), strict=True))
    run = weigh(curves(), shares, columns=columns, tau=0.5)
    text = page.page("", [], [], curves(), shares, [], [], weights=run)
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])["curves"]  # type: ignore[index]
    assert [method["name"] for method in data["methods"]][:4] == ["static", "sinkhorn", "row", "matched"]
    assert {method["name"] for method in data["methods"]} == {name for name in METHODS if "hard" not in name}
    for method in data["methods"]:
        tau = 0.5 if method["base"] == "sinkhorn" else 1.0
        for budget in ([1, 2, 1, 0.5], [0, 1, 3, 0]):
            expected = weigh(
                curves(), dict(zip(REWARDS, budget, strict=True)), method["name"], tau=tau, columns=columns
            )
            found = view.run("return window.weigh(...arguments)", data, method, budget)
            np.testing.assert_allclose(found["weights"], expected.matrix, atol=2e-9, err_msg=method["name"])
            np.testing.assert_allclose(found["factors"], expected.factors, atol=1e-6)
            np.testing.assert_allclose(found["realized"], expected.realized(), atol=1e-7)


@needs_chromium
def test_a_chosen_method_is_shown_with_the_budget_it_realizes(view: Browser) -> None:
    choose = """const box = document.getElementById("method");
        box.value = [...box.options].findIndex(option => option.textContent === arguments[0]);
        box.dispatchEvent(new Event("change"));
        return [[...document.querySelectorAll("#sliders output")].map(each => each.textContent),
            document.getElementById("marginals").textContent];"""
    W = weigh(curves(), dict(zip(REWARDS, (1.0, 2.0, 1.0, 0.5), strict=True)), "matched-reversed")
    numbers, said = view.run(choose, "reversed (matched)")
    assert said == "Columns sum to 1/T; the rows sum to the budget realized."
    shown = [f"{100 * a:.0f} %, realized {100 * b:.0f} %" for a, b in zip(W.budget, W.realized(), strict=True)]
    assert numbers == shown
    cells = view.run('return [...document.querySelectorAll("#heatmap td")].map(cell => cell.textContent)')
    np.testing.assert_allclose(np.array(cells, float), W.factors.ravel(), atol=0.00501)
    assert view.run(choose, "no-Sink")[1] == "Rows sum to λ; columns are free."
    assert view.run(choose, "static")[1] == "Rows sum to λ and columns to 1/T."
    numbers, said = view.run(choose, "ReCAST")
    assert said.startswith("Rows sum to λ and columns to 1/T within ")
    assert numbers[1] == "44 %"


@needs_chromium
def test_nothing_is_asked_of_a_network_and_no_text_is_markup(view: Browser) -> None:
    asked = view.run('return performance.getEntriesByType("resource").map(entry => entry.name)')
    assert [name for name in asked if not name.startswith("data:")] == []
    assert view.run('return document.querySelector("#found").textContent') == "What <was> found."
    assert view.run('return document.querySelector(".alarm").textContent') == "An alarm."
    assert view.run('return document.querySelector("#tables h3").textContent') == "A <title>"
    assert view.run('return document.querySelector("#tables td").textContent') == "a & b"
    assert view.run('return document.querySelectorAll("#sliders b, #heatmap b").length') == 0
    assert view.run('return document.querySelectorAll("#progress polyline").length') == 1


@needs_chromium
def test_pictures_are_sorted_by_difference(view: Browser) -> None:
    read = 'return [...document.querySelectorAll("#pairs p")].map(p => p.textContent.slice(0, 8))'
    assert view.run(read) == ["prompt 1", "prompt 3", "prompt 0", "prompt 2"]  # +0.2, +0.1, +0.05, unknown
    view.run(
        'const turn = document.getElementById("turn"); turn.checked = true; turn.dispatchEvent(new Event("change"))'
    )
    assert view.run(read) == ["prompt 0", "prompt 3", "prompt 1", "prompt 2"]
    captions = view.run(
        'return [...document.querySelectorAll("#pairs figcaption")].slice(0, 3).map(c => c.textContent)'
    )
    assert [caption.split()[0] for caption in captions] == ["base", "static", "ReCAST"]
    assert view.run("return [...document.images].every(image => image.alt && image.naturalWidth > 0)")


@needs_chromium
def test_it_fits_a_phone_by_day_and_by_night(view: Browser) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    view.emulate("Emulation.setDeviceMetricsOverride", **size)
    assert view.run("return document.documentElement.scrollWidth") <= 390
    colors = {}
    for scheme in ("light", "dark"):
        view.emulate("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        found = view.run("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
        colors[scheme] = [sum(map(int, re.findall(r"\d+", each)[:3])) for each in found]
    assert colors["light"][0] < 150 < 600 < colors["light"][1]
    assert colors["dark"][1] < 150 < 600 < colors["dark"][0]
    view.emulate("Emulation.clearDeviceMetricsOverride")


@needs_chromium
def test_the_keyboard_reaches_every_control(view: Browser) -> None:
    names = view.run(
        'return [...document.querySelectorAll("input, select, button")].filter(n => n.offsetParent)'
        ".map(n => n.tabIndex >= 0 && Boolean(n.getAttribute('aria-label') || n.textContent || n.labels.length))"
    )
    assert len(names) >= 9
    assert all(names)
