"""Checkpoints: everything an exact resume needs, in folders that are published atomically."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from recast import config, identity
from recast.core import strict
from recast.errors import RecastError
from recast.flow.lora import require_finite
from recast.flow.sharded import like, whole

__all__ = [
    "Position",
    "all_of",
    "digest",
    "draft",
    "last_of",
    "load_moments",
    "load_tensors",
    "name",
    "optimizer_tensors",
    "prune",
    "pruned",
    "publish",
    "random_tensors",
    "read_state",
    "restore_optimizer",
    "restore_random",
    "save_tensors",
    "verify",
    "write_state",
]

_FORMAT = "recast.checkpoint"
_MOMENTS = ({"exp_avg", "exp_avg_sq", "step"}, {"state1", "step"})
"""What AdamW of torch and that of bitsandbytes, there also in a table, have for every parameter."""
_HASHED = {
    "weights": "W",
    "train.prompts": "prompt file (train.prompts)",
    "policy.lora": "adapter (policy.lora)",
    "train.lora": "adapter to start from (train.lora)",
    "train.resume_from": "checkpoint to resume from (train.resume_from)",
}
"""Names, for error messages, of the settings of which a checkpoint records only a hash."""


class _Schedule(strict.Strict):
    """The state of a scheduler of torch, as far as it is read by name; the rest differs between its releases."""

    model_config = ConfigDict(extra="allow")

    epoch: Annotated[strict.Count, Field(alias="last_epoch")]
    rates: Annotated[list[strict.Share], Field(alias="_last_lr")]


class _State(strict.Strict):
    """state.json; checkpoints of earlier releases have no hashes of their files."""

    epoch: strict.Count
    update: strict.Count
    step: strict.Count
    files: dict[str, str] = {}
    settings: dict[str, Any]
    policy: dict[str, Any] = {}
    schedule: _Schedule
    scaler: dict[str, Any] = {}


@dataclass(frozen=True)
class Position:
    """Finished epochs, finished optimizer steps of the current epoch, and optimizer steps in total."""

    epoch: int = 0
    update: int = 0
    step: int = 0


def name(position: Position) -> str:
    """The folder name of a checkpoint; names sort in the order of training."""
    within = f"-step-{position.update:03d}" if position.update else ""
    return f"epoch-{position.epoch:05d}{within}"


def all_of(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("epoch-*") if (path / "state.json").is_file())


def last_of(source: str) -> Path:
    """The checkpoint that `train.resume_from` names: itself, or that of the last epoch of a finished run."""
    folder = Path(source).expanduser()
    if (folder / "state.json").is_file():
        return folder
    found = all_of(folder / "checkpoints")
    if not found:
        raise RecastError(f"train.resume_from = {source} has no checkpoint: train that run first")
    epochs = config.load_run(folder / "recipe.yaml").train.epochs
    if found[-1].name != name(Position(epochs)):
        raise RecastError(
            f"train.resume_from = {source} is trained up to {found[-1].name} of {epochs} epochs: finish that run, or "
            f"name the checkpoint {found[-1]}"
        )
    return found[-1]


def digest(path: Path) -> str:
    """SHA-256 over the files of a checkpoint that `Trainer.start_from` reads."""
    found = hashlib.sha256()
    try:
        for file in sorted([*path.glob("*/*.safetensors"), path / "optimizer.safetensors", path / "state.json"]):
            found.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError as error:
        raise RecastError(f"{error.filename}: the checkpoint is not complete: {error.strerror or error}") from error
    return found.hexdigest()


def read_state(path: Path, settings: Mapping[str, Any] | None = None) -> tuple[Position, dict[str, Any]]:
    """The position of a checkpoint and its other facts; raises `StaleError` if it has other settings than those given.

    None accepts any settings.
    """
    remedy = f"remove {path} to resume from the checkpoint before it"
    content = strict.read(path / "state.json", _FORMAT, _State, remedy)
    position = Position(*(content[key] for key in ("epoch", "update", "step")))
    if position.step < position.epoch + position.update:
        raise RecastError(f"{path / 'state.json'} is damaged: its position is {position}")
    if settings is not None:
        identity.require_same(content["settings"], settings, f"{path} was trained", _HASHED)
    return position, content


def verify(path: Path, state: Mapping[str, Any]) -> None:
    """Raise if a file of a checkpoint has another content than the one that was saved, where that is recorded."""
    now, known = _hashes(path), state.get("files", {})
    for name in known:
        if now.get(name) != known[name]:
            reason = "has changed since it was saved" if name in now else "is missing"
            raise RecastError(f"{path / name} {reason}: the checkpoint is damaged")


def _hashes(path: Path) -> dict[str, str]:
    """SHA-256 by name of the files of a checkpoint but state.json."""
    files = sorted(file for file in path.glob("**/*") if file.is_file() and file.name != "state.json")
    try:
        return {file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    except OSError as error:
        raise RecastError(f"{error.filename}: cannot be read: {error.strerror or error}") from error


def write_state(path: Path, position: Position, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write the last file of a checkpoint; `all_of` takes its presence as a sign of completeness."""
    fields = {"epoch": position.epoch, "update": position.update, "step": position.step, "files": _hashes(path)}
    strict.write(path / "state.json", _FORMAT, _State, {**fields, "settings": settings, **facts})


@contextmanager
def draft(folder: Path, mine: bool) -> Iterator[None]:
    """Write a checkpoint into a folder that is empty at first, and removed if the block fails, as on a full disk.

    `mine` says whether this process removes it, of several that write it together.
    """
    if mine:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    except BaseException:
        if mine:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def publish(temporary: Path, final: Path, keep: int) -> None:
    """Rename a finished checkpoint to its final name, and remove all but the `keep` latest."""
    try:
        if (final / "state.json").exists():  # the same state, written before the run was killed
            shutil.rmtree(temporary)
        else:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
    except OSError as error:
        raise RecastError(f"{final}: the checkpoint cannot be written: {error.strerror or error}") from error
    prune(final.parent, keep)


def pruned(folder: Path, keep: int) -> bool:
    """Whether there are no more checkpoints than `keep`, and no remains of any, as a kill leaves them."""
    return len(all_of(folder)) <= keep and not any(folder.glob(".*.tmp"))


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` latest, and what is left of others."""
    try:
        for old in all_of(folder)[:-keep]:
            os.replace(old, old.with_name(f".{old.name}.old.tmp"))  # atomic: a partly removed folder must not count
        for left in folder.glob(".*.tmp"):
            shutil.rmtree(left)
    except OSError as error:
        raise RecastError(f"{folder}: a checkpoint cannot be removed: {error.strerror or error}") from error


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name, as safetensors."""
    found = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    try:
        save_file(found, path)
    except (OSError, SafetensorError) as error:
        size = sum(each.numel() * each.element_size() for each in found.values())
        need = f" ({size:,} bytes are needed)" if "No space left" in str(error) else ""
        raise RecastError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}{need}") from error


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read what `save_tensors` wrote."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RecastError(f"{path}: not readable ({error})") from error


def load_moments(path: Path, parameters: int) -> dict[str, torch.Tensor]:
    """The state of an optimizer, checked to be finite and complete for so many parameters; empty at first."""
    found = load_tensors(path)
    require_finite(found, path)
    fields: dict[str, set[str]] = {}
    for key in found:
        fields.setdefault(key.partition(".")[0], set()).add(key.rpartition(".")[2])
    whole = any(all(wanted <= each for each in fields.values()) for wanted in _MOMENTS)
    if found and not (whole and fields.keys() == set(map(str, range(parameters)))):
        raise RecastError(f"{path} is damaged: it does not have the state of all {parameters} parameters")
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of an optimizer, by parameter number and name; bitsandbytes has a table of tensors under one name."""
    state = optimizer.state_dict()["state"]
    if state and isinstance(optimizer, torch.optim.AdamW):  # it has none for a parameter that never had a gradient
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for number in [number for number in range(len(parameters)) if number not in state]:
            zeros = torch.zeros_like(parameters[number])
            state[number] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    found = {f"{number}.{key}": value for number, of in state.items() for key, value in of.items()}
    for name in [name for name, value in found.items() if isinstance(value, Mapping)]:
        # Copied, since one map of quantization levels serves all parameters, and a file may not share tensors.
        found |= {f"{name}.{key}": torch.as_tensor(value).clone() for key, value in found.pop(name).items()}
    return {name: whole(torch.as_tensor(value)) for name, value in found.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore the state saved by `optimizer_tensors`; the settings of the parameter groups are kept."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        number, *table, field = key.split(".")
        place = state.setdefault(int(number), {})
        place = place.setdefault(table[0], {}) if table else place
        # bitsandbytes counts steps by a plain number, torch by a tensor.
        plain = field == "step" and not isinstance(optimizer, torch.optim.AdamW)
        place[field] = value.item() if plain else like(value, parameters[int(number)])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def random_tensors() -> dict[str, torch.Tensor]:
    """The states of all global random generators of this process, which rewards may use."""
    _, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - a reward may use it
    version, inner, follow = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        **{f"cuda.{k}": state for k, state in enumerate(_cuda_states())},
        "numpy.keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy.rest": torch.tensor([place, has_gauss, gauss], dtype=torch.float64),
        "python.inner": torch.tensor([version, *inner], dtype=torch.int64),
        "python.follow": torch.tensor([float("nan") if follow is None else follow], dtype=torch.float64),
    }


def restore_random(tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore the states saved by `random_tensors`."""
    torch.set_rng_state(tensors["torch"])
    for k in range(len(_cuda_states())):
        if f"cuda.{k}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{k}"], k)
    place, has_gauss, gauss = tensors["numpy.rest"].tolist()
    keys = tensors["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(place), int(has_gauss), gauss))  # noqa: NPY002
    version, *inner = tensors["python.inner"].tolist()
    follow = tensors["python.follow"].item()
    random.setstate((version, tuple(inner), None if follow != follow else follow))


def _cuda_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
