"""What commands share: the terminal, a progress bar, and the word on a missing extra."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console

from recast.errors import RecastError

console = Console(markup=False, highlight=False)  # names and paths are text, whatever brackets they have


def progress(items: Iterable[int], title: str, total: int) -> Iterable[int]:
    """The items, with a bar on the error stream while they last."""
    from rich.progress import track

    return track(items, description=title, total=total, console=Console(stderr=True))


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import inside the block into the command that installs what is missing."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else every import speaks of torchvision
    try:
        yield
    except ImportError as error:
        raise RecastError(f"{what} needs more packages ({error}): pip install 'recast-diffusion[{extra}]'") from error
