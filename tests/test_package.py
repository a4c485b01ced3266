"""What holds for the package as a whole: imports, style, types, sizes."""

import ast
import importlib
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import recast

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
HEAVY = ("torch", "diffusers", "transformers", "matplotlib", "scipy.stats", "scipy.optimize")
MODULES = [path for path in SOURCES if path.name not in ("__main__.py", "_version.py")]
"""What is imported by name: these say what they export."""


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


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (["--help"], (*HEAVY, "pydantic", "yaml")),
        (
            ["weigh", "gains.json", "--out", "weights.json"],
            (*HEAVY, "yaml", "recast.config"),
        ),  # typer reads by pydantic
    ],
)
def test_light_commands_import_nothing_heavy(arguments: list[str], unused: tuple[str, ...], tmp_path: Path) -> None:
    recast.GainCurves(("a", "b"), [0, 0.5, 1], [[0.4, 0.3, 0.0], [0.9, 0.2, 0.0]]).save(tmp_path / "gains.json")
    code = f"""
import os, sys
os.chdir({str(tmp_path)!r})
from recast.cli import app
try:
    app({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {unused!r} if name in sys.modules])
"""
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "weights.json").exists() == (arguments[0] == "weigh")


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
    lengths = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                lengths[f"{path}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    assert {name: length for name, length in lengths.items() if length > 60} == {}
    assert statistics.median(lengths.values()) <= 10


def module_name(path: Path) -> str:
    """`recast.core.curves` for its file; the package for `__init__.py`."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_says_what_it_is_and_what_it_exports(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path} has no docstring"
    module = importlib.import_module(module_name(path))
    exported = getattr(module, "__all__", None)
    assert exported is not None, f"{path} has no __all__"
    assert [name for name in exported if not hasattr(module, name)] == []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    commands = [node for node in defined if any("app.command" in ast.unparse(each) for each in node.decorator_list)]
    missing = {node.name for node in defined if node not in commands} - set(exported)
    assert missing == set(), "export it, or begin its name with an underscore"


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Names of variables, arguments, attributes, functions and classes."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            if isinstance(found := getattr(node, field, None), str):
                yield found


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_one_word_for_one_thing(path: Path) -> None:
    """Old names: a progress callback is `on_progress`, rewards are no `judges`, and `normalize` has one spelling."""
    found = set(identifiers(ast.parse(path.read_text(encoding="utf-8"))))
    assert {name for name in found if name in ("tick", "judges") or "normalis" in name.lower()} == set()


def test_prose_says_by_default() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*"), *SOURCES]
    texts = {path: " ".join(path.read_text(encoding="utf-8").split()) for path in pages if path.is_file()}
    assert [str(path) for path, text in texts.items() if re.search("unless told", text, re.IGNORECASE)] == []


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
