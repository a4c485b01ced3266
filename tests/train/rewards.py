"""A reward for runs that are killed for real: brightness, and the end of the process at a chosen call."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Deadly:
    """The mean brightness, with the noise of global generators where NOISE is set; kills at call number FATAL, once.

    The file `calls` gets the prompts of every call, of all processes, a line each.
    """

    def __init__(self, calls: str) -> None:
        self.calls = Path(calls)

    def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any = None) -> np.ndarray:
        with self.calls.open("a") as file:
            file.write(json.dumps(list(prompts)) + "\n")
        if self.calls.read_text().count("\n") == int(os.environ.get("FATAL", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        found = images.mean(dim=(1, 2, 3)).numpy().astype(np.float64)
        if "NOISE" in os.environ:
            found += 0.01 * (torch.rand(len(images)).numpy() + np.random.random(len(images)))  # noqa: NPY002
        return found
