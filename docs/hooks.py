"""Reference pages from the code itself: help of the command line, settings of a recipe, types of docstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe
import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from recast.cli import app
from recast.config import Recipe

TYPES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "none", "object": "mapping"}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
LARGE = 2**31  # limits of seeds, which say nothing


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the two marks that pages of the reference have."""
    return markdown.replace("{{ cli }}", cli()).replace("{{ settings }}", settings()) if "{{" in markdown else markdown


def cli() -> str:
    """Help of every verb, as typer writes it; its lists of verbs are cut short there and left out here."""
    command = get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="recast")
    return re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", text.removeprefix("# `recast`"))


def settings() -> str:
    """One table per section of a recipe: key, type, default and meaning."""
    schema = Recipe.model_json_schema()
    parts = []
    for name, section in schema["properties"].items():
        model = schema["$defs"].get(section.get("$ref", "").rpartition("/")[2])
        if model is None:  # a mapping, such as `rewards`
            parts.append(f"## {name}\n\n{section['description']}\n")
            continue
        rows = [_row(f"{name}.{key}", each) for key, each in model["properties"].items()]
        head = "| setting | type | default | meaning |\n|---|---|---|---|"
        parts.append("\n".join([f"## {name}\n\n{model['description']}\n", head, *rows, ""]))
    return "\n".join(parts)


def _row(key: str, schema: dict[str, Any]) -> str:
    default = schema.get("default", {} if schema.get("type") == "object" else [])
    shown = "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    cells = (f"`{key}`", _type(schema), f"`{shown}`", schema.get("description", ""))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in words, limits included."""
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items') or schema['prefixItems'][0])}"
    limits = [f"{sign} {schema[word]:g}" for word, sign in LIMITS.items() if schema.get(word, LARGE) < LARGE]
    return " ".join([TYPES[schema["type"]], " and ".join(limits)]).strip()


class Types(griffe.Extension):
    """Changes docstrings before griffe reads them, where it would show something else than they say."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Shapes become prose, names that share a line stand alone, and a bare doctest gets its section.

        Griffe reads `array-like, (m,)` as an expression, which is a difference.
        """
        if obj.docstring is not None:
            kinds = "like|array|ensor|float64|float|str|mapping|tuple"
            text = re.sub(rf"({kinds}), (?:shape )?\(", r"\1 of shape (", obj.docstring.value)
            text = re.sub(r"^(\w+(?:, \w+)+)( : .*)?\n((?: {4}.*\n?)+)", _alone, text, flags=re.MULTILINE)
            if "Examples\n---" not in text:
                text = re.sub(r"^>>>", "Examples\n--------\n>>>", text, count=1, flags=re.MULTILINE)
            obj.docstring.value = text


def _alone(group: re.Match[str]) -> str:
    """One entry per name; griffe would give the type and the default of the first name to all."""
    return "".join(f"{name}{group[2] or ''}\n{group[3].rstrip()}\n" for name in group[1].split(", "))
