"""Imports point one way: core ← flow, rewards, shapes and shared modules ← stages ← cli; core ← integrations ← cli."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src/recast"
STAGES = ("propose", "estimate", "weigh", "train", "evaluate", "judge", "report", "sweep", "plan", "selftest")
"""In the order in which they may use each other: a later one may import an earlier one."""
HEAVY = [
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "matplotlib",
    "PIL",
    "scipy.stats",
    "scipy.optimize",
    "huggingface_hub",
    "safetensors",
    "rapidocr",
    "onnxruntime",
    "paddleocr",
    "rapidfuzz",
    "ftfy",
    "pydantic",
    "yaml",
    "rich.live",
    "rich.progress",
    "trackio",
    "fcntl",
    "urllib.request",
]
"""What a light command does without: slow to import, optional, or not on every platform."""


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module of the package by its dotted name below `recast`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Dotted names that a module imports, and whether inside a function; what only a type checker reads is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", inside) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        else:
            yield from imports(node, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@cache
def imported(path: Path) -> tuple[tuple[str, bool], ...]:
    return tuple(imports(ast.parse(path.read_text(encoding="utf-8"))))


def target(name: str, known: dict[str, Path]) -> str | None:
    """The module of this package behind an imported name, or None for another package's."""
    if not (name + ".").startswith("recast."):
        return None
    below = name.removeprefix("recast").removeprefix(".")
    while below and below not in known:
        below = below.rpartition(".")[0]
    return below


def violations(package: Path) -> list[str]:
    """Imports that point upwards, or into the insides of another stage."""
    known, found = modules(package), []
    for module, path in known.items():
        here = module.split(".")[0]
        for name, _ in imported(path):
            there = target(name, known)
            if there is None or module == "":
                continue
            top = there.split(".")[0]
            if here == "core":
                wrong = top not in ("core", "errors", "_version")
            elif here in STAGES:
                inside = top in STAGES and top != here
                later = inside and STAGES.index(top) > STAGES.index(here)
                open_to = (top, f"{top}.stage") if here in ("sweep", "plan") else (top,)
                wrong = top in ("integrations", "cli") or later or (inside and there not in open_to)
            elif here == "integrations":
                wrong = top not in ("integrations", "core", "errors")
            elif here in ("cli", "__main__"):
                wrong = False
            else:
                wrong = top in (*STAGES, "integrations", "cli")
            if wrong:
                found.append(f"recast.{module} imports {name}")
    return found


@cache
def weight(module: str) -> frozenset[str]:
    """The heavy packages that importing a module brings in."""
    known = modules()
    seen: set[str] = set()
    todo, found = [module], set()
    while todo:
        each = todo.pop()
        if each in seen or each not in known:
            continue
        seen.add(each)
        todo += [each.rpartition(".")[0]] if "." in each else []
        for name, inside in imported(known[each]):
            if inside:
                continue
            there = target(name, known)
            found |= {heavy for heavy in HEAVY if there is None and f"{name}.".startswith(f"{heavy}.")}
            todo += [] if there is None else [there]
    return frozenset(found)


def test_imports_point_one_way() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/extra.py", "from recast.flow import sampling"),
        ("flow/extra.py", "import recast.train.stage"),
        ("rewards/extra.py", "from recast.cli.console import console"),
        ("identity_extra.py", "from recast.propose import Store"),
        ("estimate/extra.py", "from recast.propose.store import Store"),
        ("propose/extra.py", "from recast.estimate import Rollouts"),
        ("judge/extra.py", "from recast.report import stage"),
        ("report/extra.py", "from recast.cli import tables"),
        ("integrations/extra.py", "from recast.train import advantage"),
        ("integrations/extra.py", "from recast.flow import sampling"),
        ("train/extra.py", "from recast.integrations import Mixer"),
        ("flow/extra.py", "from recast.integrations import Mixer"),
        ("train/extra.py", "def f():\n    from recast.estimate.stage import estimate"),
    ],
)
def test_an_upward_import_is_seen(tmp_path: Path, file: str, line: str) -> None:
    for path in modules().values():
        copy = tmp_path / (path.relative_to(PACKAGE))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("", encoding="utf-8")
    assert violations(tmp_path) == []
    (tmp_path / file).write_text(line, encoding="utf-8")
    assert len(violations(tmp_path)) == 1


def test_integrations_are_light() -> None:
    """W in a trainer needs neither torch nor the trainer before it is used."""
    for module in modules():
        assert not module.startswith("integrations") or not weight(module), module


def test_a_stage_exports_what_others_import_of_it() -> None:
    known = modules()
    for module, path in known.items():
        for name, _ in imported(path):
            there = target(name, known)
            if there in STAGES and module.split(".")[0] not in (there, "cli", "__main__"):
                exported = ast.parse(known[there].read_text(encoding="utf-8"))
                listed = next(
                    (ast.literal_eval(n.value) for n in exported.body if isinstance(n, ast.Assign)), []
                )  # `__all__` is the only assignment there
                attribute = name.rpartition(".")[2]
                assert attribute in (*listed, there), f"recast.{module} imports {name}"


def test_an_import_inside_a_function_keeps_something_heavy_out() -> None:
    known, found = modules(), []
    for module, path in known.items():
        for name, inside in imported(path):
            if not inside:
                continue
            there = target(name, known)
            brought = weight(there) if there is not None else {heavy for heavy in HEAVY if f"{name}.".startswith(heavy)}
            if not brought - weight(module):
                found.append(f"recast.{module}: {name}")
    assert found == []
