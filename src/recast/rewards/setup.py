"""Texts of others that decide a score, taken out of the user's own copy of the published code.

UnifiedReward's template and HPSv3's instruction belong to their authors and are not distributed here. `recast rewards
setup` finds them in a clone or in a wheel, whose code is parsed but never run, and stores them where the rewards find
them: $XDG_DATA_HOME/recast/rewards/NAME.txt (~/.local/share if the variable is not set).
"""

from __future__ import annotations

import ast
import hashlib
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

from recast.core import artifact
from recast.errors import RecastError

__all__ = ["SOURCES", "Source", "digest", "extract", "place", "store", "stored"]


@dataclass(frozen=True)
class Source:
    """Where a text was published: option of the reward, origin, remedy, file, assigned names, and its SHA-256.

    The text is the concatenation of the values of `names` at the top level of `file`; the fields of an f-string become
    placeholders.
    """

    option: str
    origin: str
    remedy: str
    file: str
    names: tuple[str, ...]
    sha256: str


SOURCES = {
    "unifiedreward": Source(
        "template",
        "CodeGoat24/UnifiedReward at ff6f520",
        "git clone https://github.com/CodeGoat24/UnifiedReward",
        "inference_qwen/UnifiedReward-2.0-inference/point_score_ACS_image_generation.py",
        ("problem",),
        "75d52d3ae771f89b682db3b74cdaca1c7bde373a39162bc1c9dabd63cdc9b851",
    ),
    "hpsv3": Source(
        "instruction",
        "hpsv3 1.0.0",
        "pip download --no-deps hpsv3==1.0.0",
        "hpsv3/dataset/data_collator_qwen.py",
        ("INSTRUCTION", "prompt_with_special_token"),
        "f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c",
    ),
}
"""The published texts by reward; each hash is that of the text before a prompt is inserted."""


def place(name: str) -> Path:
    """The file in which `recast rewards setup` stores the text of a reward.

    >>> place("hpsv3").parts[-3:]
    ('recast', 'rewards', 'hpsv3.txt')
    """
    home = os.environ.get("XDG_DATA_HOME", "")
    data = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "share"  # a relative one is to be ignored
    return data / "recast" / "rewards" / f"{name}.txt"


def stored(name: str) -> Path | None:
    """The same file if it exists, else None."""
    path = place(name)
    return path if path.is_file() else None


def digest(text: str) -> str:
    """The SHA-256 of a text in UTF-8, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def extract(name: str, copy: str | Path) -> str:
    r"""The published text of a reward, from a copy of the published code.

    Parameters
    ----------
    name : str
        A key of `SOURCES`.
    copy : str or Path
        A clone of the repository, a folder with the installed package, or a wheel.

    Returns
    -------
    str
        The text with its placeholders. Its SHA-256 is not compared with the published one: `store` does that.

    Raises
    ------
    RecastError
        If the copy cannot be read, or does not have the text at the published place.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> file = folder / SOURCES["unifiedreward"].file
    >>> file.parent.mkdir(parents=True)
    >>> _ = file.write_text("prompt = ''\nproblem = ('Grade ' f'[{prompt}]')")
    >>> extract("unifiedreward", folder)
    'Grade [{prompt}]'
    """
    source, copy = _source(name), Path(copy).expanduser()
    try:
        module = ast.parse(_content(copy, source.file))
        return "".join(_text(_assigned(module, each)) for each in source.names)
    except (OSError, ValueError, KeyError, SyntaxError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else error.args[0]
        raise RecastError(
            f"{str(copy)!r} has no {source.option} of {name} in {source.file} ({reason}): get a copy that has it with "
            f"`{source.remedy}`"
        ) from error


def store(name: str, copy: str | Path, out: str | Path | None = None) -> tuple[Path, str]:
    """Take the published text of a reward out of a copy and write it atomically; returns the file and the text.

    Parameters
    ----------
    name : str
        A key of `SOURCES`.
    copy : str or Path
        A clone of the repository, a folder with the installed package, or a wheel.
    out : str, Path or None
        The file to write; by default the one that the reward finds by itself, `place(name)`.

    Returns
    -------
    tuple of Path and str
        The file and the text.

    Raises
    ------
    RecastError
        If the copy has no such text, or another one than the published one.
    """
    source, text = _source(name), extract(name, copy)
    found = digest(text)
    if found != source.sha256:
        raise RecastError(
            f"the {source.option} of {name} in {str(copy)!r} is not that of {source.origin}: its SHA-256 is "
            f"{found[:12]}…, not {source.sha256[:12]}…; take that version, or set the option {source.option} to a file "
            "of your own"
        )
    path = place(name) if out is None else Path(out).expanduser()
    return artifact.write_text(path, text), text


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise RecastError(f"the reward {name!r} needs no setup: only {' and '.join(SOURCES)} use a text of others")
    return SOURCES[name]


def _content(copy: Path, file: str) -> bytes:
    """A file of a wheel or of a folder."""
    if copy.suffix == ".whl":
        with zipfile.ZipFile(copy) as wheel:
            return wheel.read(file)
    return (copy / file).read_bytes()


def _assigned(module: ast.Module, name: str) -> ast.expr:
    """The expression that a module assigns to a name at its top level."""
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return value
    raise KeyError(f"nothing is assigned to {name}")


def _text(node: ast.expr) -> str:
    """The text of a string or an f-string; the fields of the latter become placeholders."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name), conversion=-1, format_spec=None):
            return f"{{{name}}}"
    raise ValueError(f"line {node.lineno} is not a text")
