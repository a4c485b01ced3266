"""examples/: every script and the notebook run with small settings, and leave what they say they leave."""

import ast
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

import recast

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """What `python examples/NAME` prints in an empty folder, run here: a new process would import diffusers again."""

    def call(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
        monkeypatch.syspath_prepend(str(EXAMPLES))  # as `python FILE` does
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield call
    for path in SCRIPTS:
        sys.modules.pop(path.stem, None)


def check(W: recast.WeightMatrix, budget: list[float]) -> None:
    """Rows of W sum to λ, columns to 1/T."""
    np.testing.assert_allclose(W.matrix.sum(axis=1), np.array(budget) / sum(budget), atol=1e-8)
    np.testing.assert_allclose(W.matrix.sum(axis=0), 1 / W.steps, atol=1e-8)


def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def code() -> dict[str, str]:
    """The Python source of every example."""
    cells = [cell.source for cell in notebook().cells if cell.cell_type == "code"]
    lines = [line for cell in cells for line in cell.splitlines() if not line.startswith("%")]
    return {path.name: path.read_text(encoding="utf-8") for path in SCRIPTS} | {NOTEBOOK.name: "\n".join(lines)}


def test_the_readme_lists_every_example() -> None:
    listed = re.findall(r"\]\((\S+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted([NOTEBOOK.name, *(path.name for path in SCRIPTS)])


@pytest.mark.parametrize("name", code())
def test_examples_use_public_names_only(name: str) -> None:
    for node in ast.walk(ast.parse(code()[name])):
        if isinstance(node, ast.Attribute):
            assert not re.match(r"_(?!_)", node.attr), f"{name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "recast":
            module = importlib.import_module(node.module)
            for each in (alias.name for alias in node.names):
                submodule = importlib.util.find_spec(f"{node.module}.{each}") if hasattr(module, "__path__") else None
                assert submodule or each in module.__all__, f"{name}:{node.lineno} {node.module} exports no {each}"


def test_weights_from_own_curves(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("weights_from_own_curves.py", "--ocr", "3")
    W = recast.WeightMatrix.load(tmp_path / "weights.json")
    check(W, [1, 3])
    assert W.matrix[0].argmax() > W.matrix[1].argmax(), "clipscore is decided at noisier steps than ocr"
    numbers = [[float(word) for word in re.findall(r"[\d.]+", line)] for line in printed.splitlines() if "[" in line]
    mixed = W.mix([[0.31, 0.80], [0.29, 0.10], [0.33, np.nan]])
    np.testing.assert_allclose(numbers[3:6], mixed, atol=6e-4)
    by_slot = [[mixed[0, 3], mixed[0, 0]], [mixed[1, 0], mixed[1, 4]], [mixed[2, 1], mixed[2, 2]]]
    np.testing.assert_allclose(numbers[6:9], by_slot, atol=6e-4)


def test_weights_need_no_torch(tmp_path: Path) -> None:
    code = f"""
import runpy, sys
sys.modules["torch"] = sys.modules["matplotlib"] = None  # importing either raises
sys.argv = ["weights_from_own_curves.py"]
runpy.run_path({str(EXAMPLES / "weights_from_own_curves.py")!r}, run_name="__main__")
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=True)
    check(recast.WeightMatrix.load(tmp_path / "weights.json"), [1, 2])


def test_own_reward(run: Callable[..., str], tmp_path: Path) -> None:
    settings = ["--prompt-count", "2", "--steps", "4", "--samples", "2", "--noisings", "1"]
    printed = run("own_reward.py", "--out", "out", *settings)
    curves = recast.GainCurves.load(tmp_path / "out" / "gains.json")
    W = recast.WeightMatrix.load(tmp_path / "out" / "weights.json")
    assert W.rewards == curves.rewards == ("composition", "own_reward:Clean")
    assert (curves.steps, len(curves.D_prompts)) == (4, 2)
    check(W, [1, 1])
    # The option `scale` and the map `positive` reach the curve: D is the log of a moment of scores in (0, 1].
    assert (curves.D[1] < 0).all()
    assert curves.gains[1].argmax() < 2, "noise in an image is decided at the clean steps"
    raw = [float(value) for value in re.findall(r"own_reward:Clean (-\d\.\d+)", printed)]
    assert len(raw) == 4
    assert all(-5 < value < 0 for value in raw)


def test_own_training_loop(run: Callable[..., str]) -> None:
    settings = ["--epochs", "2", "--prompt-count", "3", "--images-per-prompt", "4", "--steps", "4"]
    printed = run("own_training_loop.py", *settings)
    rows = [[float(value) for value in re.findall(r" (-?[\d.]+|nan|inf)", line)] for line in printed.splitlines()]
    table = np.array(rows)  # epoch, mean reward, three rewards, loss
    assert table.shape == (2, 6)
    np.testing.assert_allclose(table[:, 1], table[:, 2:5].mean(1), atol=2e-3)
    assert ((table[:, 1:5] > 0) & (table[:, 1:5] < 1)).all()
    assert np.isfinite(table[:, 5]).all()
    assert (table[:, 5] > 0).all()


def test_the_notebook_is_committed_without_outputs() -> None:
    found = notebook()
    nbformat.validate(found)
    assert found.metadata.kernelspec.name == "python3"
    assert NOTEBOOK.stat().st_size < 200_000
    for cell in found.cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)


def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this interpreter, without reading or writing anything in the home folder."""
    write_kernel_spec(tmp_path / "jupyter" / "kernels" / "python3")  # argv starts with sys.executable
    spec = json.loads((tmp_path / "jupyter/kernels/python3/kernel.json").read_text(encoding="utf-8"))
    assert spec["argv"][0] == sys.executable
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))  # is searched first
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = notebook()
    (parameters,) = [cell for cell in found.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source = 'RUN = Path("run")\nPROMPTS, STEPS, IMAGES = 3, 8, 2'
    found.cells[0:0] = [nbformat.v4.new_code_cell("import sys\n\nprint(sys.executable)")]
    client = NotebookClient(found, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in found.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert text.splitlines()[0] == sys.executable
    assert "columns sum to 1/T: True" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2, "two figures are shown"
    W = recast.WeightMatrix.load(tmp_path / "run" / "weights.json")
    check(W, [1, 1, 1])
    assert W.steps == 8
    exact = recast.GainCurves.load(tmp_path / "run" / "exact.json")
    fine, mode = (exact.gains[exact.rewards.index(name)].argmax() for name in ("fine", "mode"))
    assert fine < mode, "fine detail is decided at cleaner steps than the mode"
