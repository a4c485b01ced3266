"""Which prompts this process samples, while any number of processes share one folder of shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from recast import processes
from recast.estimate.shards import Shards
from recast.lock import Claim

__all__ = ["Scheduler"]

_POLL = 0.5  # seconds between two checks for results of other processes


class Scheduler:
    """Yields the prompts that this process has claimed, one by one, until some process has done every prompt.

    Processes of one launcher begin at different prompts, so that they seldom compete for the same one. With `in_order`
    all begin with the first prompt, as an early stop needs. `enough()` ends the iteration early. `on_wait()` is called
    after every pass over the open prompts, before waiting for other processes.
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
        # A prompt that this process holds is being scored in the background, or its scoring has failed.
        return name not in self._claims and not self._shards.has(name)

    def _claim(self, name: str) -> bool:
        if self._shards.has(name) or self._enough():
            return False
        claim = self._shards.claim(name)
        if claim is None:
            return False
        if self._shards.has(name):  # another process finished it just before the claim
            claim.release()
            return False
        self._claims[name] = claim
        return True

    def release(self, name: str) -> None:
        """Release the claim of a prompt, once its shard is written."""
        self._claims.pop(name).release()

    def release_all(self) -> None:
        """Release every claim that is left, after a failure."""
        for claim in list(self._claims.values()):
            claim.release()
