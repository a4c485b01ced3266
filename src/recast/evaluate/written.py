"""The files of RUN/scores as strict models."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from recast.core.strict import Count, Share, Strict, Whole

__all__ = ["AGAIN", "Manifest", "Part", "Row"]

AGAIN = "run recast evaluate again"
_Number = Annotated[float, Field(gt=-1e300, lt=1e300)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Run(Strict):
    method: str
    budget: dict[str, Share]
    seed: Whole


class Manifest(Strict):
    """manifest.json: what decides the images, how the policy was trained, and the rewards that score them."""

    settings: dict[str, Any]
    run: _Run
    trained: list[str]
    held_out: list[str]
    versions: dict[str, dict[str, str]] = {}
    images: Count = 0


class Part(Strict):
    """A file of parts/: the scores of a part by one reward, and the hashes of the images that were scored."""

    reward: str
    options: dict[str, Any]
    scores: list[_Number | None]
    images: list[_Hash] = []
    versions: dict[str, str] = {}


class Row(Strict):
    """A row of scores.jsonl: an image and its scores, null where a reward does not apply."""

    index: Count
    prompt: str
    seed: Whole
    file: str
    sha256: _Hash = ""
    scores: dict[str, _Number | None]
