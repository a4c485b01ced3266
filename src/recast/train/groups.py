"""Who samples and trains what: groups of images of one prompt, dealt to any number of processes.

An epoch's images, their noise and their order depend on the seed and the epoch alone. Every optimizer step trains the
same images whatever the number of processes; a process samples the very images it will train on, so no latents travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError


@dataclass(frozen=True)
class Plan:
    """Counts of one epoch: `groups` × `images`, trained `batch` images at a time, `micro` pairs a call."""

    processes: int
    groups: int
    images: int
    batch: int
    pairs: int
    micro: int

    @property
    def total(self) -> int:
        """Images of an epoch, over all processes."""
        return self.groups * self.images

    @property
    def updates(self) -> int:
        """Optimizer steps of an epoch."""
        return self.total // self.batch

    @property
    def share(self) -> int:
        """Images that one process trains in one optimizer step."""
        return self.batch // self.processes

    @property
    def accumulation(self) -> int:
        """Calls of one process behind one optimizer step."""
        return self.share * self.pairs // self.micro

    def describe(self) -> str:
        """The plan in one sentence."""
        return (
            f"{self.groups} groups of {self.images} images an epoch on {_count(self.processes, 'process', 'es')}; "
            f"{_count(self.updates, 'optimizer step')} of {self.batch} images at {_count(self.pairs, 'level')} each, "
            f"{_count(self.accumulation, 'call')} of {_count(self.micro, 'pair')} a process and step"
        )


def plan(processes: int, groups: int, images: int, batch: int, pairs: int, micro: int) -> Plan:
    """A plan that keeps the groups, images and effective batch asked for, or an error with numbers that would fit.

    `pairs` is the number of noise levels an image is trained at, `micro` the most (image, level) pairs a call may
    take; the largest divisor up to it is used, so that every call weighs the same.
    """
    total = groups * images
    if images < 2:
        raise RecastError(f"train.images = {images}: a group needs at least 2 images to compare")
    if batch > total or total % batch:
        fits = _nearest([size for size in range(1, total + 1) if total % size == 0 and size % processes == 0], batch)
        raise RecastError(
            f"train.batch = {batch} does not divide the {total} images of an epoch ({groups} groups of {images}): "
            f"{fits or 'change train.groups or train.images'}"
        )
    if batch % processes:
        batches = _nearest([size for size in range(1, total + 1) if total % size == 0 and size % processes == 0], batch)
        counts = _nearest([count for count in range(1, batch + 1) if batch % count == 0], processes)
        raise RecastError(
            f"{processes} processes cannot share train.batch = {batch} evenly: as processes, {counts}"
            + (f"; as train.batch, {batches}" if batches else "")
        )
    work = batch // processes * pairs
    micro = max(size for size in range(1, min(micro, work) + 1) if work % size == 0)
    return Plan(processes, groups, images, batch, pairs, micro)


def _nearest(values: Sequence[int], wanted: int) -> str:
    near = sorted(sorted(values, key=lambda value: abs(value - wanted))[:3])
    return f"{' or '.join(map(str, near))} would fit" if near else ""


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def prompts(seed: int, epoch: int, groups: int, available: int) -> list[int]:
    """Which prompts an epoch's groups have: the next ones of an endless stream that shuffles all prompts, pass by pass.

    >>> sorted(prompts(0, 0, 4, 8) + prompts(0, 1, 4, 8))
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    places = range(epoch * groups, (epoch + 1) * groups)
    passes = {number: _random(seed, 0, number).permutation(available) for number in {p // available for p in places}}
    return [int(passes[place // available][place % available]) for place in places]


def order(seed: int, epoch: int, total: int) -> NDArray[np.int64]:
    """The images of an epoch in the order of training; image k belongs to group k // images."""
    return _random(seed, 1, epoch).permutation(total)


def mine(plan: Plan, order: NDArray[np.int64], update: int, rank: int) -> NDArray[np.int64]:
    """The images that one process trains in one optimizer step."""
    start = update * plan.batch + rank * plan.share
    return order[start : start + plan.share]


def seeds(seed: int, epoch: int, total: int, each: int) -> NDArray[np.int64]:
    """Seeds (total, each) of an epoch's images: an image's own noise, whoever samples it and in which batch."""
    words = np.random.SeedSequence([seed, 2, epoch]).generate_state(total * each, np.uint64)
    return (words >> np.uint64(1)).astype(np.int64).reshape(total, each)


def _random(seed: int, purpose: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, purpose, number])
