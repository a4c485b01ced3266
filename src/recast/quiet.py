"""Keeping third-party libraries silent while models are read or written."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet"]

_TALKATIVE = (
    *("diffusers.pipelines.pipeline_utils", "diffusers.loaders.lora_base", "diffusers.models.modeling_utils"),
    *("huggingface_hub", "transformers"),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars, warnings and log messages of diffusers and transformers; errors still propagate."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
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
