"""What measured gradients predict for training, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recast.core.ceiling import ceiling
from recast.core.effects import Effects
from recast.core.weights import WeightMatrix

__all__ = ["SIZES", "advice"]

SIZES = (0.25, 1, 4, 16)
"""Multiples of the recipe's batch for which a prediction is made."""
_CLEAR, _NOISY, _ALIKE = 0.95, 0.5, 0.02
"""Cosines from which an update counts as noiseless and below which mostly as noise, and a difference that is none."""


def advice(found: Effects, weights: WeightMatrix) -> tuple[str, ...]:
    """Sentences on the images per update, and on W against static.

    Parameters
    ----------
    found : Effects
        The measured gradients.
    weights : WeightMatrix
        W of the same rewards and grid.

    Returns
    -------
    tuple of str

    Examples
    --------
    >>> g = np.random.default_rng(0).normal([3.0, 1.0], 1.0, (8, 100, 2)).transpose(0, 2, 1)
    >>> found = Effects.measured(("ocr",), [0, 0.5, 1], np.einsum("qap,rbp->qrab", g, g), 4, batch=32, levels=2)
    >>> advice(found, WeightMatrix(("ocr",), [0, 0.5, 1], [[0.5, 0.5]], [1.0], "static"))[0]
    'With 32 images per update the gradient of ocr is clear at every level (signal-to-noise above 1).'
    """
    return (*_levels(found), *_static(found, weights), *_timing(found, weights))


def _levels(found: Effects) -> Iterator[str]:
    """Where the gradient of each reward is clear."""
    start = f"With {found.batch:,} images per update"
    clear = found.snr() > 1
    names = np.array(found.rewards)
    everywhere, nowhere = clear.all(axis=1), ~clear.any(axis=1)
    if everywhere.any():
        yield f"{start} the gradient of {_listed(names[everywhere])} is clear at every level (signal-to-noise above 1)."
    for name, row in zip(names[~everywhere & ~nowhere], clear[~everywhere & ~nowhere], strict=True):
        levels = ", ".join(str(t) for t in np.flatnonzero(row) + 1)
        yield f"{start} the gradient of {name} is clear at t = {levels} only (signal-to-noise above 1)."
    if nowhere.any():
        yield f"{start} the gradient of {_listed(names[nowhere])} is below its noise at every level."


def _static(found: Effects, weights: WeightMatrix) -> Iterator[str]:
    """How noisy static's update is."""
    cosine = found.static(weights)
    if not found.clear(weights):
        yield (
            "The images measured are too few to tell static's gradient from noise, so the predictions are uncertain: "
            "measure more with --prompts."
        )
    if np.isnan(cosine):
        return
    said = f"Static's update on {found.batch:,} images has cosine {cosine:.2f} with the noiseless one"
    if cosine < _NOISY:
        yield (
            f"{said}: {1 - cosine**2:.0%} of its squared norm is noise. More images per update, or a smaller learning "
            "rate, help before any W does."
        )
    else:
        yield f"{said}."


def _timing(found: Effects, weights: WeightMatrix) -> Iterator[str]:
    """Whether W pays at the recipe's batch, and up to how many images, and what its other budget does."""
    if len(found.rewards) == 1:
        yield "With one reward there is nothing to time: W only scales the levels."
        return
    gain, error = found.timing(weights)
    if weights.method == "static" or np.isnan(gain):
        return
    name, even = weights.method, found.even(weights)
    limit = found.break_even(weights, even)
    start = f"With {found.batch:,} images per update"
    size = f"{abs(gain):.1%} (± {error:.1%})" if np.isfinite(error) else f"{abs(gain):.1%} (error unknown)"
    if found.static(weights) > _CLEAR and abs(gain) < _ALIKE:
        yield f"{start} static's update is nearly noiseless: expect no difference between {name} and static."
    elif gain > 2 * error:
        until = "at any number of images" if np.isinf(limit) else f"up to about {_rounded(limit)} images per update"
        yield f"{start} the timing of {name} raises the cosine of its update by {size}: it should pay, {until}."
    elif gain < -2 * error:
        where = "at any number of images" if limit < 1 else f"above about {_rounded(limit)} images per update"
        yield f"{start} the timing of {name} lowers the cosine of its update by {size}: static should win, {where}."
    else:
        side = "raises" if gain > 0 else "lowers"
        yield (
            f"{start} the timing of {name} {side} the cosine of its update by {size}, which is within its error: "
            f"expect no clear difference{_break_even(limit)}."
        )
    if found.static(weights) < _CLEAR:
        limit = ceiling(found, weights.budget)
        yield f"{start} no W with this budget gains more than about {max(limit, 0):.1%} over static by its timing."
    yield from _shift(found, weights)


def _shift(found: Effects, weights: WeightMatrix) -> Iterator[str]:
    """What the budget realized does, if it is not the one asked for."""
    realized = found.realized(weights)[0]
    if np.abs(realized - weights.budget).max() < _ALIKE:
        return
    shares = ", ".join(f"{name} {share:.0%}" for name, share in zip(found.rewards, realized, strict=True))
    even = found.even(weights)
    matrix = np.repeat(even[:, None] / found.steps, found.steps, axis=1)
    alike = WeightMatrix(found.rewards, found.sigmas, matrix, even, "static")
    yield (
        f"The budget that {weights.method} realizes is {shares}. With it, static's cosine would change by "
        f"{found.gain(alike, budget=weights.budget)[0]:+.1%} as well; weigh.columns=effect realizes the budget asked "
        "for (except with matched)."
    )


def _break_even(limit: float) -> str:
    return f"; the estimated break-even is at {_rounded(limit)} images per update" if 1 <= limit < np.inf else ""


def _rounded(number: float) -> str:
    """A number with two digits.

    >>> _rounded(1234.5), _rounded(87.6)
    ('1,200', '88')
    """
    return f"{float(f'{number:.2g}'):,.0f}"


def _listed(names: object) -> str:
    """Names in a sentence.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    each = [str(name) for name in np.asarray(names)]
    return " and ".join([", ".join(each[:-1]), each[-1]] if len(each) > 1 else each)
