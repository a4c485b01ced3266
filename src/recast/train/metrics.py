"""Metrics of an epoch: means of the rewards, their spread within groups, and their shares of the advantage."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast.core import artifact, strict
from recast.core.records import Epoch
from recast.errors import RecastError
from recast.train import advantage

__all__ = ["Log", "reward_metrics", "scalars"]

_REMEDY = "move the log away to train on"


def reward_metrics(names: Sequence[str], rewards: Tensor, groups: Tensor, parts: Tensor) -> dict[str, Any]:
    """Per reward: mean, standard deviation within groups, share of groups where it is 0, and shares of variance.

    `rewards` (B, m), `groups` (B,) numbered from 0, `parts` (B, m, T) from `advantage.contributions`.
    """
    first = torch.stack([(groups == g).nonzero()[0, 0] for g in groups.unique()])
    spread = advantage.group_std(rewards.double(), groups)[first]
    overall, steps = advantage.shares(parts)
    found: dict[str, Any] = {}
    for k, name in enumerate(names):
        known = spread[:, k][~spread[:, k].isnan()]
        found[f"reward/{name}"] = _number(rewards[:, k].double().nanmean())
        found[f"group_std/{name}"] = _number(known.mean())
        found[f"zero_std/{name}"] = _number((known <= 1e-12).double().mean())
        found[f"applies/{name}"] = _number((~rewards[:, k].isnan()).double().mean())
        found[f"share/{name}"] = _number(overall[k])
        found[f"share_by_step/{name}"] = [_number(value) for value in steps[k]]
    return found


def _number(value: Tensor) -> float:
    return float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """A JSONL file with exactly one line per epoch, also after a run was killed and resumed."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.path, self._last = path, ""
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise RecastError(f"{path}: cannot be read ({error}): {_REMEDY}") from error
        kept: dict[int, str] = {}
        later = False
        for number, line in enumerate(text.split("\n")[:-1], start=1):  # a kill may have cut off the last one
            where = f"{path}, line {number}"
            row, checksum = artifact.read_row(line, where, self._last)
            strict.require(Epoch, row, where, _REMEDY)
            if row["epoch"] > epoch:
                later = not kept  # the log begins after this epoch: an earlier one was moved away
                break
            if kept and row["epoch"] != max(kept) + 1:
                raise RecastError(f"{where}: epoch {row['epoch']} does not follow {max(kept)}: {_REMEDY}")
            kept[row["epoch"]], self._last = line, checksum
        if epoch and epoch not in kept and path.exists() and not later:
            raise RecastError(f"{path}: the epochs after {max(kept, default=0)} are missing up to {epoch}: {_REMEDY}")
        if path.exists():  # a log that was moved away is begun by the next epoch: one that is empty was damaged
            artifact.write_text(path, "".join(f"{line}\n" for line in kept.values()))

    def write(self, values: Mapping[str, Any]) -> None:
        """Append an epoch and flush it to disk; a value that is not finite becomes null."""
        row = {key: _plain(value) for key, value in values.items()}
        strict.require(Epoch, row, self.path, "it is not written")
        line = artifact.line(row, self._last)
        self._last = json.loads(line)[artifact.CHECKSUM]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecastError(f"{self.path}: cannot be written: {error.strerror or error}") from error


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Values for trackers: a list becomes one scalar per step t; the optimizer step is their axis, not a value."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if key == "step":
            continue
        if isinstance(value, list):
            flat |= {f"{key}/t{t:02d}": float(each) for t, each in enumerate(value, start=1)}
        else:
            flat[key] = float(value)
    return flat
