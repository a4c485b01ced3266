"""Trackers: a missing one is named, a run that goes on is the same one to them, and each gets images in its form."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recast.cli import app
from recast.errors import RecastError
from recast.train import metrics, trackers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    (tmp_path / name).mkdir()  # wandb leaves such a folder where it ran, and Python would import it
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["train", str(ROOT / "recipes/shapes.yaml"), f"train.trackers=[{name}]", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.output == f"error: train.trackers names {name}, which is not installed: pip install {name}\n"


def test_what_keeps_a_tracker_from_starting_is_said(tmp_path: Path) -> None:
    class UsageError(Exception):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise UsageError("No API key configured.\n  Use `wandb login` to log in.")

    accelerator = SimpleNamespace(is_main_process=True, init_trackers=fail)
    with pytest.raises(RecastError, match=r"\[wandb\] cannot be started: No API key configured. Use `wandb login` to"):
        trackers.start(accelerator, ["wandb"], tmp_path, {"train.beta": 0.1}, 0)
    trackers.start(accelerator, [], tmp_path, {}, 0)


def test_a_run_that_goes_on_is_the_same_run(tmp_path: Path) -> None:
    out, every = tmp_path / "ocr", ["tensorboard", "wandb", "trackio"]
    first, later, again = (trackers.options(every, out, step) for step in (0, 6, 0))
    assert later == first | {"tensorboard": {"purge_step": 7}}
    known = first["wandb"]["id"]
    assert first["wandb"] == {"id": known, "name": "ocr", "dir": str(out / "logs"), "resume": "allow"}
    assert first["trackio"] == {"name": f"ocr-{known}", "resume": "allow"}
    assert again["wandb"]["id"] != known
    assert trackers.options(["wandb"], out, 6).keys() == {"wandb"}
    known = trackers.options(["wandb"], out, 6)["wandb"]["id"]
    assert trackers.options(["wandb"], out, 6, fresh=True)["wandb"]["id"] != known  # begins at another run's step


def test_each_tracker_gets_images_in_its_own_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Image=lambda path: ("image", path)))

    def tracker(name: str) -> Any:
        def keep(values: Any, step: int, **more: str) -> None:
            seen[name] = (values["samples"], step, more)

        return SimpleNamespace(name=name, **{"log" if name == "trackio" else "log_images": keep})

    images = torch.rand(2, 3, 4, 5)
    accelerator = SimpleNamespace(trackers=[tracker(name) for name in ("tensorboard", "wandb", "trackio")])
    trackers.show(accelerator, images, tmp_path / "sheet.png", 8)
    assert seen["trackio"] == (("image", tmp_path / "sheet.png"), 8, {})
    for name, more in (("tensorboard", {"dataformats": "NHWC"}), ("wandb", {})):
        np.testing.assert_array_equal(seen[name][0], images.permute(0, 2, 3, 1).numpy())
        assert seen[name][1:] == (8, more)


def test_scalars_have_a_name_a_step_and_leave_the_axis_out() -> None:
    values = {"epoch": 1, "step": 2, "loss": 0.5, "share_by_step/detail": [0.25, 0.75]}
    flat = {"epoch": 1.0, "loss": 0.5, "share_by_step/detail/t01": 0.25, "share_by_step/detail/t02": 0.75}
    assert metrics.scalars(values) == flat
