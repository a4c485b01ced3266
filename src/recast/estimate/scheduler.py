"""Which prompts this process samples, where any number of processes share one folder of shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from recast import processes
from recast.estimate.shards import Claim, Shards

__all__ = ["Scheduler"]

_POLL = 0.5  # seconds between two checks of what other processes are still doing


class Scheduler:
    """Yields the prompts that this process has claimed, one by one, until every prompt is done by some process.

    Processes of one launcher begin at different prompts, so that they seldom compete for the same one; with
    `in_order` they all begin with the first, as an early stop needs. `enough()` ends the iteration early, and
    `on_wait()` is called whenever all remaining prompts have been looked at.
    """

    def __init__(
        self,
        shards: Shards,
        names: Sequence[str],
        *,
        in_order: bool = False,
        enough: Callable[[], object] = lambda: None,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        first = 0 if in_order else processes.RANK * len(names) // processes.COUNT
        self._order = [*names[first:], *names[:first]]
        self._shards, self._enough, self._on_wait = shards, enough, on_wait
        self._claims: dict[str, Claim] = {}

    def __iter__(self) -> Iterator[str]:
        # A prompt that this process has claimed is being scored in the background or has failed: never waited for.
        while (left := [name for name in self._order if self._is_open(name)]) and not self._enough():
            claimed = False
            for name in left:
                if self._claim(name):
                    claimed = True
                    yield name
            self._on_wait()
            if not claimed:
                time.sleep(_POLL)

    def _is_open(self, name: str) -> bool:
        return name not in self._claims and not self._shards.has(name)

    def _claim(self, name: str) -> bool:
        claim = None if self._shards.has(name) or self._enough() else self._shards.claim(name)
        if claim is None:
            return False
        if self._shards.has(name):  # another process finished it while it was claimed
            claim.release()
            return False
        self._claims[name] = claim
        return True

    def release(self, name: str) -> None:
        """Give a claim back, once the prompt is done."""
        self._claims[name].release()

    def release_all(self) -> None:
        """Give back every claim: at the end, or after a failure."""
        for claim in self._claims.values():
            claim.release()
