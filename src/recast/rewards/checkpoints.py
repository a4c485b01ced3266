"""Published weights: found by a hub name, an address or a path, and read without running what they hold."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from recast.errors import RecastError
from recast.quiet import quiet

_TROUBLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


@contextmanager
def loading(what: str, source: str | Path) -> Iterator[None]:
    """Turn what goes wrong while the block reads a model's files into one sentence that names the model."""
    try:
        with quiet():
            yield
    except RecastError:
        raise
    except _TROUBLE as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecastError(f"no {what} in {str(source)!r}: give a hub name or a path ({reason})") from error


def pretrained(
    kind: Any, source: str | Path | None, config: Any = None, state: Mapping[str, Tensor] | None = None, **options: Any
) -> Any:
    """A transformers model with exactly the weights it needs, from its files or from a state of one's own.

    `from_pretrained` alone would fill gaps at random.
    """
    if config is not None:
        options |= {"config": config, "state_dict": dict(state or {})}
    options = {"dtype": torch.float32} | options
    model, report = kind.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    if report["missing_keys"]:
        raise ValueError(f"it has no weights for {min(report['missing_keys'])}")
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        raise ValueError(f"its weights for {name} have the shape {tuple(found)}, not {tuple(wanted)}")
    if state is not None and report["unexpected_keys"]:
        raise ValueError(f"it has weights for {min(report['unexpected_keys'])}, which this model has not")
    return model


def find(source: str | Path, filename: str) -> Path:
    """The file of one's own (itself, or in a folder), of a hub repository `owner/name`, or at an https address.

    What has to be fetched is kept where the hub's library and torch keep theirs, and found there the next time.
    """
    path = Path(source)
    if path.is_dir():
        path = path / filename
    if path.is_file():
        return path
    address = str(source)
    if address.startswith("https://"):
        return _fetched(address)
    if len(Path(address).parts) != 2 or path.suffix in (".pt", ".pth", ".safetensors") or path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(address, filename))


def cached(address: str) -> Path:
    """Where the file of an https address is kept."""
    return Path(torch.hub.get_dir()) / "checkpoints" / unquote(Path(urlparse(address).path).name)


def _fetched(address: str) -> Path:
    path = cached(address)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(address, str(path), progress=False)
    return path


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt or .pth file, by name; a pickle that wants to run code is refused."""
    if path.suffix == ".safetensors":
        return load_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError, UnicodeDecodeError) as error:
        raise ValueError("it is not a file of plain weights by torch, or is cut short") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, not named weights")
    return {name.removeprefix("module."): value for name, value in content.items() if isinstance(value, Tensor)}


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model exactly these weights, in float32; a missing, superfluous or misshapen one is an error."""
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in weights:
            raise ValueError(f"it has no weights for {name}")
        if name not in wanted:
            raise ValueError(f"it has weights for {name}, which this model has not")
        if weights[name].shape != wanted[name]:
            shapes = tuple(weights[name].shape), tuple(wanted[name])
            raise ValueError(f"its weights for {name} have the shape {shapes[0]}, not {shapes[1]}")
    model.load_state_dict({name: value.float() for name, value in weights.items()}, assign=True)
