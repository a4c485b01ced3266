"""README and the site: they build without a warning, links lead somewhere, and every name in them exists."""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mkdocs.config
import mkdocs.exceptions
import pytest
import yaml
from mkdocs.commands.build import build
from typer.main import get_command

import recast
from recast.cli import app
from recast.config import Recipe
from recast.rewards import NAMES
from recast.train.groups import batches

ROOT = Path(__file__).parents[1]
LINKED = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
RUN = ["README.md", "docs/index.md", "docs/shapes.md", *(f"docs/guides/{name}.md" for name in ("models", "sd35"))]
SECTIONS = "|".join(Recipe.model_fields)
SUFFIXES = {"html", "json", "jsonl", "md", "png", "py", "txt", "yaml"}
Fence = tuple[str, str]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(text: str) -> list[Fence]:
    """Language and code of every fenced block."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """Inline code, on one line each."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


@cache
def exists(name: str) -> bool:
    """Whether a dotted name is a module, or can be reached from one by attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part) and part not in getattr(found, "model_fields", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


@cache
def commands() -> dict[tuple[str, ...], set[str]]:
    """Options of every verb, by its words."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], set[str]]]:
        options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        yield words, options | {"--help"}
        for name, below in getattr(command, "commands", {}).items():
            yield from walk(below, (*words, name))

    return dict(walk(get_command(app), ()))


def bad_commands(text: str) -> Iterator[str]:
    """Verbs that do not exist, and options that a verb does not have, in a line of shell."""
    known = commands()
    groups = {words[:-1] for words in known}
    if text.startswith("--") and not any(text.split()[0] in options for options in known.values()):
        yield f"option {text}"
    words = text.split()
    for place in [k for k, word in enumerate(words) if word == "recast"]:
        verb: tuple[str, ...] = ()
        for word in words[place + 1 :]:
            if (*verb, word) in known:
                verb = (*verb, word)
            elif verb in groups and word.isalpha() and word.islower():
                yield f"verb {text}"
            elif word in ("|", "&&", ";", ">", "VERB"):
                break
            elif word.startswith("--") and word.partition("=")[0] not in known[verb]:
                yield f"option {word} of {text}"


def bad_names(text: str) -> Iterator[str]:
    """Names of the package, settings and paths in a piece of code that do not exist."""
    for name in re.findall(r"(?<![\w./-])recast(?:\.\w+)+", text):
        if not exists(name):
            yield f"name {name}"
    for path in re.findall(r"(?<![\w./-])(?:src/recast|tests|benchmarks|recipes|docs|examples)/[\w./-]*", text):
        if not (ROOT / path.rstrip(".")).exists():
            yield f"path {path}"


def bad_settings(text: str) -> Iterator[str]:
    """Settings that a recipe does not have; `rewards` has no keys of its own, and `rewards.load` is a function."""
    for section, key in re.findall(rf"(?<![\w./-])({SECTIONS})\.([a-z]\w*)", text):
        annotation: Any = Recipe.model_fields[section].annotation
        known = {
            *getattr(annotation, "model_fields", {}),
            *SUFFIXES,
            *(recast.rewards.__all__ if section == "rewards" else ()),
        }
        if key not in known:
            yield f"setting {section}.{key}"


def bad_options(rewards: dict[str, Any]) -> Iterator[str]:
    """Options that a reward of the package does not take."""
    for name, options in rewards.items():
        if name in NAMES:
            module, _, attribute = NAMES[name].partition(":")
            taken = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters
            yield from (f"option {key} of {name}" for key in options or {} if key not in taken)


def bad_python(code: str) -> Iterator[str]:
    """Imports from the package, and attributes of what was imported, that do not exist."""
    tree, bound = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "recast":
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names = [*bound.values()]
    names += [
        f"{bound[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound
    ]
    yield from (f"name {name}" for name in names if not exists(name))


def problems(text: str) -> list[str]:
    """Everything in a document that names what is not there."""
    found = []
    for span in spans(text):
        found += [*bad_commands(span), *bad_names(span), *bad_settings(span)]
        if option := re.fullmatch(r"(\w+): \{(\w+): .*\}", span):
            found += bad_options({option[1]: {option[2]: None}})
    for language, code in fences(text):
        found += bad_names(code)
        if language == "python":
            found += bad_python(code)
        elif language == "yaml":
            content = yaml.safe_load(code)
            if set(content) <= set(Recipe.model_fields):
                found += bad_options(Recipe.model_validate(content).rewards)
        else:
            lines = code.replace("\\\n", " ").splitlines()
            for line in (re.sub(r"(^|\s)#.*", "", line) for line in lines):
                found += [*bad_commands(line), *bad_settings(line)]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_names_in_documents_exist(page: str) -> None:
    assert problems(read(page)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`recast.GainCurves.load(path)` and `recast.core.bounds`", []),
        ("`recast.GainCurve`", ["name recast.GainCurve"]),
        ("`recast.core.renyi.no_such(mu)`", ["name recast.core.renyi.no_such"]),
        ("`train.kl_weight: 0`, `train.md` and `rewards.load`", []),
        ("`train.penalty` and `train.groups`", ["setting train.penalty", "setting train.groups"]),
        ("```sh\nrecast train r.yaml \\\n  train.groups=3  # train.images\n```", ["setting train.groups"]),
        ("```sh\ntorchrun -m recast train r.yaml --out x --weights w.json | tee log\n```", []),
        ("`recast train r.yaml --until-ci 0.1`", ["option --until-ci of recast train r.yaml --until-ci 0.1"]),
        ("`recast sing`", ["verb recast sing"]),
        ("`recast analyze omega RUN` and `recast analyze alpha RUN`", ["verb recast analyze omega RUN"]),
        ("`--no-such`", ["option --no-such"]),
        ("`tests/test_docs.py`, `tests/no_such.py`", ["path tests/no_such.py"]),
        ("```python\nfrom recast.flow import sd3\n\nsd3.SD3Policy(1)\n```", []),
        ("```python\nfrom recast.flow import sd3\n\nsd3.no_such(1)\n```", ["name recast.flow.sd3.no_such"]),
        ("```python\nfrom recast.flow import sd4\n```", ["name recast.flow.sd4"]),
        ("```yaml\nrewards:\n  ocr: {threads: 4, colour: red}\n```", ["option colour of ocr"]),
        ("`geneval: {colour: red}`", ["option colour of geneval"]),
    ],
)
def test_a_wrong_name_is_seen(text: str, found: list[str]) -> None:
    assert problems(text) == found


@pytest.mark.parametrize("page", LINKED)
def test_relative_links_lead_somewhere(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", read(page)) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_site_builds_without_a_warning_and_without_network(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    for name, page in pages.items():
        assert re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*", page) == [], name
    for words in commands():
        assert f'id="{"-".join(("recast", *words))}"' in pages["reference/cli.html"] or not words
    for section, field in Recipe.model_fields.items():
        for key in getattr(field.annotation, "model_fields", ()):
            assert f"<code>{section}.{key}</code>" in pages["reference/settings.html"]
    for name in ("recast.GainCurves", "recast.WeightMatrix", "recast.weigh.weigh", "recast.estimate.rollouts"):
        assert f'id="{name}"' in pages["reference/python.html"]
    for name in ("recast.rewards.load", "recast.flow.policy.Policy", "recast.train.nft.loss", "recast.evaluate.Scores"):
        assert f'id="{name}"' in pages["reference/python.html"]


@pytest.mark.parametrize("link", ["[a](no-such.md)", "[a](#no-such)", "[a](index.md#no-such)", "![a](no-such.png)"])
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Title\n\n{link}\n", encoding="utf-8")
    folders = {"docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site")}
    config = mkdocs.config.load_config(str(ROOT / "mkdocs.yml"), **folders, nav=None, plugins=[], hooks=[])
    with pytest.raises(mkdocs.exceptions.Abort, match="warning"):
        build(config)


@pytest.mark.parametrize("page", RUN)
def test_python_of_documents_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("composition", "alignment", "detail", "background")
    curves = recast.GainCurves(names, [0, 0.3, 1], [[0.9, 0.1 * k, 0] for k in range(1, 5)])
    curves.save(Path("runs/shapes/gains.json"))
    for k, code in enumerate(code for language, code in fences(read(page)) if language == "python"):
        exec(compile(code, f"{page}, block {k + 1}", "exec"), {})


def test_custom_rewards_of_the_guide_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    page = read("docs/guides/own-reward.md")
    blocks = [code for language, code in fences(page) if language == "python"]
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    images, prompts = torch.rand(2, 3, 8, 8), ["a", "b"]
    for name, options in yaml.safe_load(dict(fences(page))["yaml"])["rewards"].items():
        found = recast.rewards.load(name, **options)(images, prompts)
        assert found == pytest.approx(2 * images.mean((1, 2, 3)).numpy())
    reward: Any = recast.rewards.load("my_rewards:Smoothness")
    assert (reward(images, prompts) < 0).all()
    assert (reward.positive(reward(images, prompts)) > 0).all()


def test_the_plan_in_the_guide_is_what_training_prints() -> None:
    (shown,) = [code for language, code in fences(read("docs/guides/scale.md")) if not language]
    plan, error = shown.splitlines()
    assert plan == batches(8, 48, 24, 1152, 25, 24).describe()
    with pytest.raises(recast.RecastError, match=re.escape(error.removeprefix("error: "))):
        batches(5, 48, 24, 1152, 25, 24)


def test_the_table_of_settings_is_the_recipes() -> None:
    """The page prints what benchmarks/published/settings.py found in DiffusionNFT, and the values of our recipe."""
    path = ROOT / "benchmarks/published/settings.py"
    spec = importlib.util.spec_from_file_location("published_settings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = json.loads(module.RESULTS.read_text())
    assert "\n".join(module.table(found["found"])) in read("docs/guides/sd35.md")
    assert found["commit"][:7] in read("docs/guides/sd35.md")
