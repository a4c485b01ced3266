"""Published checkpoints: found by a hub name, an address or a path, and read without running any code in them."""

from __future__ import annotations

import pickle
import re
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

__all__ = ["cached", "fill", "find", "loading", "pretrained", "read"]

_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


@contextmanager
def loading(what: str, source: str | Path) -> Iterator[None]:
    """Turn errors of the block, which reads the files of a model, into one sentence that names the model."""
    try:
        with quiet():
            yield
    except RecastError:
        raise
    except _ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecastError(f"no {what} in {str(source)!r}: give a hub name or a path ({reason})") from error


def pretrained(
    kind: Any, source: str | Path | None, config: Any = None, state: Mapping[str, Tensor] | None = None, **options: Any
) -> Any:
    """A transformers model with exactly the tensors it needs, from its files or from `config` and `state`.

    `from_pretrained` alone would initialize missing tensors at random.
    """
    if config is not None:
        options |= {"config": config, "state_dict": dict(state or {})}
    options = {"dtype": torch.float32} | options
    model, report = kind.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    if report["missing_keys"]:
        raise ValueError(f"it has no tensor {min(report['missing_keys'])}")
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        raise ValueError(f"its tensor {name} has the shape {tuple(found)}, not {tuple(wanted)}")
    if state is not None and report["unexpected_keys"]:
        raise ValueError(f"it has a tensor {min(report['unexpected_keys'])}, which this model does not have")
    return model


def find(source: str | Path, filename: str) -> Path:
    """The path of a checkpoint: a local file or folder, a hub repository `owner/name`, or an https address.

    Downloads are stored in the caches of huggingface_hub and torch, and found there the next time.
    """
    path = Path(source)
    if path.is_dir():
        path = path / filename
    if path.is_file():
        return path
    address = str(source)
    if address.startswith("https://"):
        return _downloaded(address)
    if len(Path(address).parts) != 2 or path.suffix in (".pt", ".pth", ".safetensors") or path.exists():
        raise FileNotFoundError(f"the file {path} does not exist")
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(address, filename))


def cached(address: str) -> Path:
    """Path under which the file of an https address is cached."""
    return Path(torch.hub.get_dir()) / "checkpoints" / unquote(Path(urlparse(address).path).name)


def _downloaded(address: str) -> Path:
    path = cached(address)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = re.search(r"-([0-9a-f]{8,})\.pth?$", path.name)  # of the content, where the name has it
        torch.hub.download_url_to_file(address, str(path), digest and digest[1], progress=False)
    return path


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt or .pth file by name; a pickle that would run code is refused."""
    if path.suffix == ".safetensors":
        return load_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError, UnicodeDecodeError) as error:
        raise ValueError("it is not a file of plain tensors written by torch, or it is truncated") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise ValueError(f"it contains a {type(content).__name__}, not named tensors")
    return {name.removeprefix("module."): value for name, value in content.items() if isinstance(value, Tensor)}


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load exactly these tensors into a model, in float32; raises for a missing, unexpected or misshapen one."""
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise ValueError(f"it has no tensor {name}")
        if name not in wanted:
            raise ValueError(f"it has a tensor {name}, which this model does not have")
        if tensors[name].shape != wanted[name]:
            shapes = tuple(tensors[name].shape), tuple(wanted[name])
            raise ValueError(f"its tensor {name} has the shape {shapes[0]}, not {shapes[1]}")
    model.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
