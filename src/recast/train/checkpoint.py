"""Everything a run needs to go on as if it had never stopped, in folders that appear whole or not at all."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from recast import identity
from recast.core import artifact
from recast.errors import RecastError
from recast.flow.sharded import like, whole

FORMAT = "recast.checkpoint"
HASHED = {
    "weights": "W",
    "train.prompts": "prompt file (train.prompts)",
    "policy.lora": "adapter (policy.lora)",
    "train.lora": "adapter to start from (train.lora)",
}
"""Settings of which a checkpoint knows the hash only, as people call them."""


@dataclass(frozen=True)
class Position:
    """Epochs that are done, optimizer steps of the next one that are done, and optimizer steps in all."""

    epoch: int = 0
    update: int = 0
    step: int = 0


def name(position: Position) -> str:
    """A checkpoint's folder; in order of training where names are in order."""
    within = f"-step-{position.update:03d}" if position.update else ""
    return f"epoch-{position.epoch:05d}{within}"


def all_of(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("epoch-*") if (path / "state.json").is_file())


def read_state(path: Path, settings: Mapping[str, Any]) -> tuple[Position, dict[str, Any]]:
    """Where a checkpoint is, and its other facts; one of other settings is refused by the key that differs."""
    content = artifact.read(path / "state.json", FORMAT)
    identity.require_same(artifact.mapping(content, "settings", path), settings, f"{path} was trained", HASHED)
    try:
        position = Position(*(int(artifact.field(content, key, path)) for key in ("epoch", "update", "step")))
    except (TypeError, ValueError) as error:
        raise RecastError(f"{path / 'state.json'} is damaged: {error}") from error
    return position, content


def write_state(path: Path, position: Position, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """The last file of a checkpoint: what `all_of` looks for."""
    fields = {"epoch": position.epoch, "update": position.update, "step": position.step}
    artifact.write(path / "state.json", FORMAT, {**fields, "settings": settings, **facts})


def publish(temporary: Path, final: Path, keep: int) -> None:
    """Give a finished checkpoint its name, and remove all but the `keep` latest."""
    try:
        if (final / "state.json").exists():  # the same state, written before the run was killed
            shutil.rmtree(temporary)
        else:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
        for old in all_of(final.parent)[:-keep]:
            os.replace(old, old.with_name(f".{old.name}.old.tmp"))  # at once: half a folder must not pass for one
        for left in final.parent.glob(".*.tmp"):
            shutil.rmtree(left)
    except OSError as error:
        raise RecastError(f"{final}: the checkpoint cannot be written: {error.strerror or error}") from error


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors by name, as safetensors."""
    try:
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise RecastError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What `save_tensors` wrote."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RecastError(
            f"{path}: not readable ({error}): remove {path.parent} to go on from the one before"
        ) from error


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimizer's state by parameter number and name."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{key}": whole(torch.as_tensor(value)) for number, of in state.items() for key, value in of.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put `optimizer_tensors` back; the groups' settings stay as they are."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        number, _, field = key.partition(".")
        state.setdefault(int(number), {})[field] = like(value, parameters[int(number)])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def random_tensors() -> dict[str, torch.Tensor]:
    """The state of every global random generator of this process: rewards may use them."""
    _, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - not ours, but a reward's
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
    """Put `random_tensors` back."""
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
