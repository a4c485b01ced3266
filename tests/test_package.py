"""What holds for the package as a whole: imports, style, types, sizes."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
HEAVY = ("torch", "diffusers", "transformers", "matplotlib", "scipy.stats", "scipy.optimize")


def python(*arguments: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize(
    "code",
    [
        "import recast",
        "import recast, recast.core.bounds; recast.GainCurves(('a',), [0, 1], [[1, 0]])",
        "import recast.cli",
    ],
)
def test_importing_recast_imports_nothing_heavy(code: str) -> None:
    result = python("-c", f"{code}\nimport sys; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr


def test_weighing_works_where_torch_does_not_exist(tmp_path: Path) -> None:
    """A researcher with a trainer of their own: core, `weigh` and `compare` with torch blocked."""
    code = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "diffusers", "transformers", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import numpy as np, recast
from recast.cli import app
curves = recast.GainCurves(("clip", "ocr"), [0, 0.5, 1], [[0.4, 0.3, 0.0], [0.9, 0.2, 0.0]])
W = recast.weigh(curves, {{"clip": 1, "ocr": 2}})
assert W.mix(np.ones((2, 2))).shape == (2, 2)
path = str(curves.save({str(tmp_path / "gains.json")!r}))
for arguments in (["weigh", path], ["compare", path, path]):
    app(arguments, standalone_mode=False)
for arguments, words in ((["plot", path], "plot"), (["run", {str(ROOT / "recipes/mixture.yaml")!r}], "train")):
    try:
        app(arguments, standalone_mode=False)
    except BaseException as error:
        assert getattr(error, "exit_code", getattr(error, "code", None)) == 2, repr(error)
"""
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert "pip install 'recast-diffusion[plot]'" in result.stderr
    assert "pip install 'recast-diffusion[train]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_core_never_imports_torch() -> None:
    for path in (ROOT / "src/recast/core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("torch", "diffusers", "transformers") for name in names), path


def test_files_and_functions_stay_small() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name}"


def test_ruff_is_clean() -> None:
    for arguments in (("check", "."), ("format", "--check", ".")):
        result = python("-m", "ruff", *arguments)
        assert result.returncode == 0, result.stdout + result.stderr


def test_mypy_is_clean() -> None:
    result = python("-m", "mypy")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_console_script_is_installed() -> None:
    result = subprocess.run(
        [str(Path(sys.executable).parent / "recast"), "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("recast ")


def test_no_path_of_this_machine_and_no_registry_is_committed() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git or no checkout here: there is nothing committed to look at")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    forbidden = ("/".join(("", "work", "")), "/".join(("", "opt", "pypi")), "pypi" + ".org", "files.python" + "hosted")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        assert not any(word.encode() in content for word in forbidden), name


def test_the_embedded_models_are_small_and_safe() -> None:
    data = ROOT / "src/recast/shapes/data"
    paths = [path for path in data.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) <= 12e6
    assert {path.suffix for path in paths} == {".json", ".jsonl", ".txt", ".safetensors"}
