"""What `recast plan` finds: a machine, the stages of a recipe on it, totals, and all of it as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recast._version import __version__
from recast.core import artifact
from recast.errors import RecastError
from recast.plan import memory
from recast.plan.cards import Card
from recast.plan.counts import Counts
from recast.plan.memory import Held

__all__ = ["FORMAT", "UTILIZATION", "Machine", "Plan", "Stage", "Total"]

FORMAT = "recast.plan"
UTILIZATION = 0.2
"""Default share of a card's peak, about that of the paper's training (docs/guides/plan.md)."""
_PRICED = ("gpu", "propose", "judge", "unifiedreward")


@dataclass(frozen=True)
class Machine:
    """Number and kind of GPUs, memory in GiB, the share of the peak that is reached, and prices in dollars.

    `prices` are per GPU-hour (`gpu`) and per request (`propose`, `judge`, `unifiedreward`).
    """

    card: Card
    gpus: int = 1
    memory: float | None = None
    utilization: float = UTILIZATION
    prices: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise RecastError(f"--gpus must be at least 1, not {self.gpus}")
        if not 0 < self.utilization <= 1:
            raise RecastError(f"--utilization is a share of the peak in (0, 1], not {self.utilization:g}")
        for name, price in self.prices.items():
            if name not in _PRICED or not 0 <= price < float("inf"):
                raise RecastError(
                    f"--price {name}={price:g}: the name must be one of {', '.join(_PRICED)}, and the price at least 0"
                )

    @property
    def room(self) -> float:
        """Bytes that tensors can have on one GPU."""
        return memory.USABLE * (self.memory or self.card.memory) * 2**30


@dataclass(frozen=True)
class Stage:
    """What one stage takes: counts over all processes, FLOPs by purpose and kind, bytes on one GPU and on disk."""

    name: str
    counts: Counts
    flops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    held: Held | None = None
    disk: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_flops(self) -> float:
        """FLOPs of all purposes and kinds."""
        return sum(sum(each.values()) for each in self.flops.values())

    def gpu_hours(self, machine: Machine) -> float:
        """Hours of one GPU."""
        return sum(machine.card.seconds(each, machine.utilization) for each in self.flops.values()) / 3600

    def dollars(self, machine: Machine) -> float | None:
        """The price of GPU-hours and requests; None if no price is given for what the stage uses."""
        amounts = {"gpu": self.gpu_hours(machine), **self.counts.calls}
        used = [name for name, amount in amounts.items() if amount and name in machine.prices]
        return sum(amounts[name] * machine.prices[name] for name in used) if used else None


@dataclass(frozen=True)
class Total:
    """Several stages together, such as a sweep: how many trainings, counts, GPU-hours, bytes on disk."""

    name: str
    trainings: int
    counts: Counts
    flops: float
    gpu_hours: float
    disk: int


@dataclass(frozen=True)
class Plan:
    """Stages and totals of a recipe on a machine.

    `per_row` has FLOPs per velocity evaluation, per pair by pass and per decoded image, `adapter` the bytes of one
    adapter, `origin` where the model's configuration is from, and `notes` what a reader should know.
    """

    machine: Machine
    stages: tuple[Stage, ...]
    totals: tuple[Total, ...]
    per_row: Mapping[str, float]
    batches: Mapping[str, int]
    micro_batches: Mapping[str, Mapping[str, int]]
    origin: str
    paper_evaluations: int | None
    notes: tuple[str, ...] = ()

    def stage(self, name: str) -> Stage:
        """The stage of a name."""
        return next(each for each in self.stages if each.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, under `format` and `version`."""
        machine = self.machine
        head = {
            "card": machine.card.name,
            "gpus": machine.gpus,
            "memory_gib": machine.memory or machine.card.memory,
            "usable_bytes": round(machine.room),
            "utilization": machine.utilization,
            "prices": dict(machine.prices),
        }
        content = {
            "recast": __version__,
            "machine": head,
            "configuration": self.origin,
            "flops": dict(self.per_row),
            "batches": dict(self.batches),
            "micro_batches": {name: dict(each) for name, each in self.micro_batches.items()},
            "paper_evaluations": self.paper_evaluations,
            "stages": {each.name: _stage_dict(each, machine) for each in self.stages},
            "totals": {each.name: _total_dict(each, machine) for each in self.totals},
            "notes": list(self.notes),
        }
        return {"format": FORMAT, "version": 1, **artifact.plain(content)}


def _counts_dict(found: Counts) -> dict[str, Any]:
    return {
        "velocity_evaluations": found.evaluations,
        "rows_with_padding": found.rows,
        "pairs": found.pairs,
        "encoded": found.encoded,
        "decoded": found.decoded,
        "reward_calls": dict(found.scored),
        "api_calls": dict(found.calls),
    }


def _stage_dict(stage: Stage, machine: Machine) -> dict[str, Any]:
    hours = stage.gpu_hours(machine)
    held = stage.held
    return _counts_dict(stage.counts) | {
        "flops": {name: dict(each) for name, each in stage.flops.items()},
        "gpu_hours": hours,
        "hours": hours / machine.gpus,
        "dollars": stage.dollars(machine),
        "memory": None
        if held is None
        else {
            "peak": held.peak,
            "fits": held.peak <= machine.room,
            "parts": dict(held.parts),
            "phases": dict(held.phases),
            "largest": dict(held.largest),
        },
        "disk": dict(stage.disk),
    }


def _total_dict(total: Total, machine: Machine) -> dict[str, Any]:
    return _counts_dict(total.counts) | {
        "trainings": total.trainings,
        "flops": total.flops,
        "gpu_hours": total.gpu_hours,
        "hours": total.gpu_hours / machine.gpus,
        "disk": total.disk,
    }
