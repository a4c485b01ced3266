"""What a reward is, how one is found by name, and how several score the same images."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {
    "clipscore": "recast.rewards.clipscore:ClipScore",
    "composition": "recast.shapes.rewards:Composition",
    "alignment": "recast.shapes.rewards:Alignment",
    "detail": "recast.shapes.rewards:Detail",
    "background": "recast.shapes.rewards:Background",
    "census": "recast.shapes.rewards:Census",
}
"""Short names; any other reward is named `package.module:Object`. The last five are the shapes world's."""


class Reward(Protocol):
    """Scores (B,) of images (B, 3, H, W) in [0, 1] for their prompts; NaN where it does not apply."""

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One score per image."""
        ...


def load(name: str, **options: Any) -> Reward:
    """A reward by its short name or by `package.module:Object`.

    A class is called with the options; a function is the reward itself, with the options bound to it.
    """
    target = NAMES.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        raise RecastError(
            f"unknown reward {name!r}: choose one of {', '.join(NAMES)}, or name your own as package.module:Object"
        )
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        extra = "" if name not in NAMES else ": pip install 'recast-diffusion[train,rewards]'"
        raise RecastError(f"the reward {name!r} cannot be imported ({error}){extra}") from error
    except AttributeError:
        raise RecastError(f"the reward {name!r}: there is no {attribute!r} in {module_name}") from None
    if not callable(found):
        raise RecastError(f"the reward {name!r} is a {type(found).__name__}, which cannot be called")
    try:
        inspect.signature(found).bind_partial(**options)
    except TypeError as error:
        raise RecastError(f"the reward {name!r} takes no such option: {error}") from None
    if inspect.isclass(found):
        return cast(Reward, found(**options))
    return cast(Reward, functools.partial(found, **options) if options else found)


def score(
    rewards: Mapping[str, Reward],
    images: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]] | None = None,
) -> NDArray[np.float64]:
    """Scores (m, B) of the same images by every reward, in the mapping's order.

    A reward that raises, or returns anything but one finite or NaN score an image, is an error that names it.
    """
    table = []
    for name, reward in rewards.items():
        try:
            values = np.asarray(reward(images, prompts, metadata), dtype=np.float64)
        except RecastError as error:
            raise RecastError(f"the reward {name!r} failed on {len(prompts)} images: {error}") from error
        except Exception as error:
            first = prompts[0] if prompts else ""
            raise RecastError(
                f"the reward {name!r} failed on {len(prompts)} images, the first for the prompt {first!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if values.shape != (len(images),):
            raise RecastError(f"the reward {name!r} returned the shape {values.shape} for {len(images)} images")
        if np.isinf(values).any():
            raise RecastError(
                f"the reward {name!r} is infinite for the prompt {prompts[int(np.isinf(values).argmax())]!r}"
            )
        table.append(values)
    return np.stack(table) if table else np.empty((0, len(images)))
