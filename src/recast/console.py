"""What commands share: the terminal, a progress bar, and the word on a missing extra."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console

from recast.errors import RecastError

Item = TypeVar("Item")
console = Console(markup=False, highlight=False)  # names and paths are text, whatever brackets they have


def progress(items: Iterable[Item], title: str, total: int) -> Iterable[Item]:
    """The items, with a bar on the error stream while they last."""
    from rich.progress import track

    if int(os.environ.get("RANK", 0)) > 0:  # one bar is enough where a launcher starts several processes
        return items
    return track(items, description=title, total=total, console=Console(stderr=True))


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import inside the block into the command that installs what is missing."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else every import speaks of torchvision
    try:
        yield
    except ImportError as error:
        raise RecastError(f"{what} needs more packages ({error}): pip install 'recast-diffusion[{extra}]'") from error


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no side remarks of the libraries while models are read or written; errors still come through."""
    loggers = [logging.getLogger(name) for name in ("diffusers.pipelines.pipeline_utils", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    loaded = [name for name in ("diffusers", "transformers") if name in sys.modules]
    libraries = [importlib.import_module(f"{name}.utils.logging") for name in loaded]
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        for library in shown:
            library.disable_progress_bar()
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            for library in shown:
                library.enable_progress_bar()
