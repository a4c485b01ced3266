"""The fields of gains.json, weights.json, effects.json and metrics.jsonl.

What a type cannot see, such as the sums of W, the classes check that load these files.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from recast.core.strict import Count, Share, Strict

__all__ = ["Effects", "Epoch", "Gains", "Weights"]

_Row = list[float]
_Table = list[list[float]]


class Gains(Strict):
    """gains.json."""

    rewards: list[str]
    alpha: float
    aggregate: Literal["prompt-mean", "pooled"] = "prompt-mean"
    provenance: dict[str, Any] = {}
    sigmas: _Row
    D: _Table
    gains: _Table = []
    gains_interval_95: list[list[list[float | None]]] = []
    D_prompts: list[list[list[float | None]]] = []


class Weights(Strict):
    """weights.json."""

    rewards: list[str]
    method: str
    budget: list[Share]
    sigmas: _Row
    matrix: list[list[Share]]
    info: dict[str, Any] = {}
    nu: list[Share] = []


class Effects(Strict):
    """effects.json."""

    rewards: list[str]
    sigmas: _Row
    images: Count
    batch: Count
    levels: Count
    normalize: Literal["step", "shared", "reward"]
    scales: _Row
    covariance: _Table
    settings: dict[str, Any] = {}
    effect: list[float | None] = []
    snr: list[list[float | None]] = []
    own: _Table
    cross: _Table


class Epoch(Strict):
    """A row of metrics.jsonl: numbers by name, or one per denoising step; null where there is none."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | list[float | None] | None]

    epoch: Annotated[int, Field(ge=1, le=2**53)]
    step: Count = 0
