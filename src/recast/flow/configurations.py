"""Configurations of pipelines, and pipelines without parameters made from them, for counting costs.

A configuration is read from a local folder, from the cache of the hub, or from those shipped for the supported
families. Nothing is downloaded, and parameters exist on the meta device only.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from recast.errors import RecastError
from recast.quiet import quiet

__all__ = ["Configuration", "Part", "pipeline", "read", "shipped", "transformer"]

_ENDLESS = 2**31
"""Tokens that a tokenizer without a limit takes."""


@dataclass(frozen=True)
class Part:
    """A component of a pipeline: its library, its class, and its settings."""

    library: str
    kind: str
    settings: Mapping[str, Any]

    def make(self) -> Any:
        """The component on the default device."""
        found = getattr(importlib.import_module(self.library), self.kind)
        if self.library != "transformers":
            return found.from_config(dict(self.settings))
        with torch.device("cpu"):  # some configurations compute with tensors
            config = found.config_class(**{k: v for k, v in self.settings.items() if k != "architectures"})
        return found(config)


@dataclass(frozen=True)
class Configuration:
    """A pipeline's class, its own settings, its components, the tokens that its tokenizers take, and where it is from.

    `origin` is "folder", "cache" or "shipped".
    """

    pipeline: str
    parts: Mapping[str, Part]
    tokens: Mapping[str, int]
    origin: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class _Tokenizer:
    """A tokenizer's limit, which is all that sizes depend on."""

    def __init__(self, limit: int) -> None:
        self.model_max_length = limit


@cache
def _published() -> dict[str, Any]:
    return json.loads((files("recast.flow") / "data/models.json").read_text(encoding="utf-8"))


def shipped() -> list[str]:
    """Hub names of the models whose configuration is shipped.

    >>> shipped()[0]
    'stabilityai/stable-diffusion-3.5-medium'
    """
    return list(_published()["models"])


def transformer(name: str) -> dict[str, Any]:
    """The settings of a shipped model's transformer.

    >>> transformer("Qwen/Qwen-Image")["num_layers"]
    60
    """
    return dict(_published()["models"][name]["transformer"][2])


def read(source: str) -> Configuration:
    """The configuration of a model: of its folder, of the hub's cache, or a shipped one.

    Parameters
    ----------
    source : str
        A folder in the layout of diffusers, or a hub name.

    Raises
    ------
    RecastError
        If there is none, or a file of it is missing.

    Examples
    --------
    >>> read("black-forest-labs/FLUX.1-dev").origin
    'shipped'
    """
    path = Path(source).expanduser()
    if (path / "model_index.json").is_file():
        return _of_folder(path, "folder")
    if (found := _cached(source)) is not None:
        return _of_folder(found, "cache")
    if source not in _published()["models"]:
        raise RecastError(
            f"the configuration of the model {source!r} is not known: give a folder with its model_index.json and "
            f"config.json files, or one of {', '.join(shipped())}"
        )
    content = _published()["models"][source]
    parts = {
        name: Part(*(_published()["parts"][value] if isinstance(value, str) else value))
        for name, value in content.items()
        if name not in ("pipeline", "tokens", "settings")
    }
    return Configuration(content["pipeline"], parts, content["tokens"], "shipped", content.get("settings", {}))


def _cached(source: str) -> Path | None:
    """The folder of the hub's cache with a model's index, if every config.json that it names is there as well."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(source, "model_index.json")
    except HFValidationError:  # a path that does not exist
        return None
    folder = Path(found).parent if isinstance(found, str) else None
    needed = () if folder is None else (name for name, _ in _listed(folder) if not name.startswith(("tok", "sched")))
    return folder if folder and all((folder / name / "config.json").is_file() for name in needed) else None


def _listed(folder: Path) -> list[tuple[str, list[str]]]:
    """The components that an index names."""
    index = _json(folder / "model_index.json")
    return [(name, value) for name, value in index.items() if isinstance(value, list) and value[0] is not None]


def _of_folder(folder: Path, origin: str) -> Configuration:
    index = _json(folder / "model_index.json")
    parts, tokens = {}, {}
    for name, (library, kind) in _listed(folder):
        if name.startswith("tokenizer"):
            limit = _json(folder / name / "tokenizer_config.json").get("model_max_length", _ENDLESS)
            tokens[name] = int(min(limit, _ENDLESS))
        elif name in ("vae", "transformer", "scheduler") or name.startswith("text_encoder"):
            file = "scheduler_config.json" if name == "scheduler" else "config.json"
            known = library in ("diffusers", "transformers") or library.startswith("recast.")
            parts[name] = Part(library if known else "diffusers", kind, _json(folder / name / file))
    own = {key: value for key, value in index.items() if not key.startswith("_") and not isinstance(value, list)}
    return Configuration(index["_class_name"], parts, tokens, origin, own)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RecastError(f"{path}: the configuration cannot be read: {error}") from error


def pipeline(found: Configuration, dtype: torch.dtype) -> Any:
    """The pipeline without parameters: its models on the meta device, the transformer and text encoders in `dtype`."""
    import diffusers

    kind = getattr(diffusers, found.pipeline)
    names = [name for name in kind._get_signature_keys(kind)[0] if name not in found.parts]
    parts: dict[str, Any] = {name: _Tokenizer(found.tokens[name]) if name in found.tokens else None for name in names}
    with quiet(), torch.device("meta"):
        for name, part in found.parts.items():
            if name == "scheduler":
                continue
            made = part.make()
            parts[name] = made if name == "vae" else made.to(dtype)
    parts["scheduler"] = found.parts["scheduler"].make()
    with quiet():
        return kind(**parts, **found.settings)
