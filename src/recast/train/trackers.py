"""Experiment trackers: tensorboard, wandb and trackio, started by accelerate."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import get_available_trackers
from torch import Tensor

from recast.core import artifact
from recast.errors import RecastError

__all__ = ["check", "finish", "options", "show", "start"]


def check(names: Sequence[str]) -> None:
    """Raise an error for a tracker that is not installed, which accelerate would skip silently."""
    installed = {tracker.value for tracker in get_available_trackers()}
    for name in names:
        if name not in installed:
            raise RecastError(f"train.trackers names {name}, which is not installed: pip install {name}")


def start(
    accelerator: Any, names: Sequence[str], out: Path, settings: Mapping[str, Any], step: int, fresh: bool = False
) -> None:
    """Start the trackers of a run at an optimizer step; a run that is not fresh is resumed in them too."""
    if not names:
        return
    plain = {key: value if isinstance(value, (int, float, str)) else str(value) for key, value in settings.items()}
    chosen = options(names, out, step, fresh) if accelerator.is_main_process else {}
    try:
        accelerator.init_trackers("recast", plain, init_kwargs=chosen)
    except Exception as error:  # no account, no network, a broken package: each has its own errors
        reason = " ".join(str(error).split()).rstrip(".")
        raise RecastError(
            f"train.trackers = [{', '.join(names)}] cannot be started: {reason}; train.trackers=[] uses no tracker"
        ) from error


def options(names: Sequence[str], out: Path, step: int, fresh: bool = False) -> dict[str, dict[str, Any]]:
    """Options of each tracker with which a resumed run is the same run in it.

    RUN/logs/id identifies the run in wandb and trackio; a fresh run, or one at step 0, gets a new one.
    """
    path = out / "logs" / "id"
    if fresh or step == 0 or not path.is_file():
        artifact.write_text(path, secrets.token_hex(4))
    known, name = path.read_text(encoding="utf-8"), out.resolve().name
    every: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"id": known, "name": name, "dir": str(path.parent), "resume": "allow"},
        "trackio": {"name": f"{name}-{known}", "resume": "allow"},
    }
    return {name: every[name] for name in names}


def finish(accelerator: Any) -> None:
    """Close all trackers; `end_training` would also end the process group, which later stages may use."""
    for tracker in accelerator.trackers:
        tracker.finish()


def show(accelerator: Any, images: Tensor, sheet: Path, step: int) -> None:
    """Log sample images (B, 3, H, W) to every tracker; trackio takes one image, the file `sheet`."""
    for tracker in accelerator.trackers:
        if tracker.name == "trackio":
            tracker.log({"samples": importlib.import_module("trackio").Image(sheet)}, step=step)
        else:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"samples": images.permute(0, 2, 3, 1).numpy()}, step=step, **layout)
