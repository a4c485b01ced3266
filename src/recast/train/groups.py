"""How an epoch is divided: groups of images of one prompt, assigned to any number of processes.

The images of an epoch, their noise and their order depend on the seed and the epoch alone. Every optimizer step trains
on the same images for any number of processes. A process samples the images that it trains on, so latents are never
communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError

__all__ = ["Batches", "batches", "members", "mine", "order", "prompts", "seeds"]


@dataclass(frozen=True)
class Batches:
    """Sizes of one epoch: `groups` prompts with `images` images each, `batch` images per optimizer step.

    Every image is trained at `pairs` noise levels; a forward pass takes `micro` (image, level) pairs.
    """

    processes: int
    groups: int
    images: int
    batch: int
    pairs: int
    micro: int

    @property
    def total(self) -> int:
        """Images per epoch, over all processes."""
        return self.groups * self.images

    @property
    def updates(self) -> int:
        """Optimizer steps per epoch."""
        return self.total // self.batch

    @property
    def share(self) -> int:
        """Images per process and optimizer step."""
        return self.batch // self.processes

    @property
    def accumulation(self) -> int:
        """Micro-batches per process and optimizer step."""
        return self.share * self.pairs // self.micro

    def describe(self) -> str:
        """All sizes in one sentence."""
        return (
            f"{_count(self.groups, 'prompt')} with {self.images} images each per epoch on "
            f"{_count(self.processes, 'process', 'es')}; {_count(self.updates, 'optimizer step')} per epoch, of "
            f"{self.batch} images at {_count(self.pairs, 'noise level')} each; "
            f"{_count(self.accumulation, 'micro-batch', 'es')} of {_count(self.micro, 'pair')} per process and "
            "optimizer step"
        )


def batches(processes: int, groups: int, images: int, batch: int, pairs: int, micro: int) -> Batches:
    """The sizes that keep the given groups, images and effective batch; an error suggests values that fit.

    `pairs` is the number of noise levels per image, `micro` the largest allowed micro-batch. The largest divisor up to
    it is used, so that all micro-batches have the same size and their mean losses the same weight.
    """
    total = groups * images
    if images < 2:
        raise RecastError(
            f"train.images_per_prompt = {images}: advantages compare images of one prompt, use at least 2"
        )
    fitting = [size for size in range(1, total + 1) if total % size == 0 and size % processes == 0]
    if batch > total or total % batch:
        remedy = (
            f"use {_nearest(fitting, batch)}"
            if fitting
            else "change train.prompts_per_epoch or train.images_per_prompt"
        )
        raise RecastError(
            f"train.batch = {batch} does not divide the {total} images of an epoch "
            f"(train.prompts_per_epoch = {groups} times train.images_per_prompt = {images}): {remedy}"
        )
    if batch % processes:
        counts = _nearest([count for count in range(1, batch + 1) if batch % count == 0], processes)
        raise RecastError(
            f"train.batch = {batch} cannot be divided among {processes} processes: use {counts} processes"
            + (f", or train.batch = {_nearest(fitting, batch)}" if fitting else "")
        )
    work = batch // processes * pairs
    micro = max(size for size in range(1, min(micro, work) + 1) if work % size == 0)
    return Batches(processes, groups, images, batch, pairs, micro)


def _nearest(values: Sequence[int], wanted: int) -> str:
    """The three values nearest to the one wanted.

    >>> _nearest([1, 2, 3, 4, 6, 8], 5)
    '3, 4 or 6'
    """
    near = [str(value) for value in sorted(sorted(values, key=lambda value: abs(value - wanted))[:3])]
    return " or ".join([", ".join(near[:-1]), near[-1]] if len(near) > 1 else near)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def prompts(seed: int, epoch: int, groups: int, available: int) -> list[int]:
    """The prompts of an epoch's groups: the next ones of an endless stream that shuffles all prompts on every pass.

    >>> sorted(prompts(0, 0, 4, 8) + prompts(0, 1, 4, 8))
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    places = range(epoch * groups, (epoch + 1) * groups)
    passes = {number: _random(seed, 0, number).permutation(available) for number in {p // available for p in places}}
    return [int(passes[place // available][place % available]) for place in places]


def members(texts: Sequence[str], images: int) -> NDArray[np.int64]:
    """The group of every image of an epoch, given the prompts of its groups; groups of one prompt are one group.

    Prompt files may repeat a prompt, and advantages are relative to all images of it, as in DiffusionNFT.

    >>> members(["a cat", "a dog", "a cat"], 2).tolist()
    [0, 0, 1, 1, 0, 0]
    """
    first: dict[str, int] = {}
    return np.repeat([first.setdefault(text, k) for k, text in enumerate(texts)], images)


def order(seed: int, epoch: int, total: int) -> NDArray[np.int64]:
    """The images of an epoch in the order of training; image k belongs to group k // images."""
    return _random(seed, 1, epoch).permutation(total)


def mine(batches: Batches, order: NDArray[np.int64], update: int, rank: int) -> NDArray[np.int64]:
    """The images that process `rank` trains on in one optimizer step."""
    start = update * batches.batch + rank * batches.share
    return order[start : start + batches.share]


def seeds(seed: int, epoch: int, total: int, each: int) -> NDArray[np.int64]:
    """Seeds (total, each) of an epoch's images: an image's noise does not depend on its process or batch."""
    words = np.random.SeedSequence([seed, 2, epoch]).generate_state(total * each, np.uint64)
    return (words >> np.uint64(1)).astype(np.int64).reshape(total, each)


def _random(seed: int, purpose: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, purpose, number])
