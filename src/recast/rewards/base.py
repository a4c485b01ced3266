"""What a reward is, how one is found by name, and how several score the same images."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, get_type_hints

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    Images: TypeAlias = Tensor | Sequence[Image]
else:
    Images = Any

NAMES = {
    "clipscore": "recast.rewards.clipscore:ClipScore",
    "hpsv2": "recast.rewards.hpsv2:HPSv2",
    "pickscore": "recast.rewards.pickscore:PickScore",
    "imagereward": "recast.rewards.imagereward:ImageReward",
    "aesthetic": "recast.rewards.aesthetic:Aesthetic",
    "ocr": "recast.rewards.ocr:OCR",
    "geneval": "recast.rewards.geneval:GenEval",
    "hpsv3": "recast.rewards.hpsv3:HPSv3",
    "unifiedreward": "recast.rewards.unifiedreward:UnifiedReward",
    "jpeg": "recast.rewards.examples:JpegSize",
    "composition": "recast.shapes.rewards:Composition",
    "alignment": "recast.shapes.rewards:Alignment",
    "detail": "recast.shapes.rewards:Detail",
    "background": "recast.shapes.rewards:Background",
    "census": "recast.shapes.rewards:Census",
}
"""Short names: the paper's nine, an example, and the shapes world's five. Others are `package.module:Object`."""


_ROUNDING = 1e-3
HUGE = 1e30
"""No reward is larger; squares of such numbers would overflow in silence."""


class Reward(Protocol):
    """Scores (B,) of images for their prompts; NaN where it does not apply.

    Images are a float tensor (B, 3, H, W) in [0, 1]; the package's own rewards take PIL images of one size too. Gain
    curves need scores that are not negative: a reward may say by a method `positive` how it gets them (`positive`).
    """

    def __call__(
        self, images: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One score per image."""
        ...


def find(name: str) -> tuple[str, str]:
    """Module and object of a reward's name, without importing anything; an unknown name is an error."""
    module_name, _, attribute = NAMES.get(name, name).partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise RecastError(
            f"unknown reward {name!r}: choose one of {', '.join(NAMES)}, or name your own as package.module:Object"
        )
    return module_name, attribute


def load(name: str, **options: Any) -> Reward:
    """A reward by its short name or by `package.module:Object`.

    A class is called with the options; a function is the reward itself, with the options bound to it.
    """
    found = _imported(name)
    made = inspect.isclass(found)
    options = _checked(name, found.__init__ if made else found, options)
    try:
        signature = inspect.signature(found)
        signature.bind(**options) if made else signature.bind_partial(**options)
    except (TypeError, ValueError) as error:
        raise RecastError(f"the reward {name!r} does not take these options: {error}") from None
    if made:
        try:
            return cast(Reward, found(**options))
        except RecastError as error:
            raise RecastError(f"the reward {name!r} cannot be made: {error}") from error
        except Exception as error:
            raise RecastError(f"the reward {name!r} cannot be made: {_one_line(error)}") from error
    return cast(Reward, functools.partial(found, **options) if options else found)


def mapper(name: str, options: Mapping[str, Any]) -> Any:
    """What `positive` needs to map the scores of a reward that is not loaded: an object with the method, or None.

    The package's own rewards map their scores by a static method, so no model is loaded for them. A custom class is
    loaded with its options, since its map may depend on them.
    """
    found = _imported(name)
    if name in NAMES or not inspect.isclass(found):
        return found if hasattr(found, "positive") else None
    return load(name, **options)


def _imported(name: str) -> Any:
    """The class or function behind a reward's name."""
    module_name, attribute = find(name)
    try:
        with _working_folder():
            found: Any = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:  # of one's own module: anything
        hint = ": pip install 'recast-diffusion[rewards]'" if name in NAMES else "; is its folder in PYTHONPATH?"
        hint = hint if isinstance(error, ImportError) else ""
        raise RecastError(f"the reward {name!r} cannot be imported ({_one_line(error)}){hint}") from error
    if found is None:
        raise RecastError(f"the reward {name!r}: there is no {attribute!r} in {module_name}")
    if not callable(found):
        raise RecastError(f"the reward {name!r} is a {type(found).__name__}, which cannot be called")
    return found


def _checked(name: str, call: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the types that the reward states for them, where it does; ~ in a text is the home folder."""
    from pydantic import TypeAdapter, ValidationError

    try:
        hints = get_type_hints(call)
    except Exception:  # of one's own reward: they may name anything
        hints = {}
    checked = {}
    for key, value in options.items():
        value = os.path.expanduser(value) if isinstance(value, str) else value
        try:
            checked[key] = TypeAdapter(hints[key]).validate_python(value) if key in hints else value
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise RecastError(f"the reward {name!r} has {key} = {value!r}: {reason[0].lower()}{reason[1:]}") from None
    return checked


@contextmanager
def _working_folder() -> Iterator[None]:
    """Modules in the working folder can be imported, as for `python -m`; the `recast` command alone would not."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def as_tensor(images: Images, prompts: Sequence[str]) -> Tensor:
    """Images (B, 3, H, W) in [0, 1], from such a tensor or from PIL images of one size, one for each prompt.

    Anything else is refused: a wrong range would be scored in silence.
    """
    import torch

    if not isinstance(images, torch.Tensor):
        images = _from_pil(images)
    _check(images, prompts)
    return images


def _from_pil(images: Sequence[Any]) -> Tensor:
    import torch
    from PIL.Image import Image

    for image in images:
        if not isinstance(image, Image):
            raise RecastError(f"images are a float tensor (B, 3, H, W) or PIL images, not a {type(image).__name__}")
    sizes = sorted({image.size for image in images})
    if len(sizes) > 1:
        raise RecastError(f"PIL images that are scored together have one size, not {sizes[0]} and {sizes[1]}")
    pixels = [np.asarray(image.convert("RGB")) for image in images]
    return torch.from_numpy(np.stack(pixels) if pixels else np.empty((0, 1, 1, 3), np.uint8)).permute(0, 3, 1, 2) / 255


def _check(images: Tensor, prompts: Sequence[str]) -> None:
    """Refuse what is not a batch of images in [0, 1] with one prompt each."""
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise RecastError(f"images are float tensors (B, 3, H, W), not {images.dtype} {tuple(images.shape)}")
    if len(images) != len(prompts):
        raise RecastError(f"{len(images)} images need as many prompts, not {len(prompts)}")
    if not images.numel():
        return
    low, high = images.flatten(1).amin(1), images.flatten(1).amax(1)
    wrong = (~((low >= -_ROUNDING) & (high <= 1 + _ROUNDING))).nonzero().flatten().tolist()
    if wrong:
        k = wrong[0]
        raise RecastError(
            f"images must lie in [0, 1] and be finite, but {len(wrong)} of {len(images)} do not: number {k}, for the "
            f"prompt {prompts[k]!r}, goes from {low[k]:g} to {high[k]:g}"
        )


def score(
    rewards: Mapping[str, Reward],
    images: Images,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]] | None = None,
) -> NDArray[np.float64]:
    """Scores (m, B) of the same images by every reward, in the mapping's order.

    A reward that raises, or returns anything but one finite or NaN score an image, is an error that names it.
    """
    images = as_tensor(images, prompts)  # one tensor for all: rewards that share a model embed it once
    if metadata is not None and len(metadata) != len(prompts):
        raise RecastError(f"{len(prompts)} prompts need as many rows of metadata, not {len(metadata)}")
    table = []
    for name, reward in rewards.items():
        try:
            values = np.asarray(reward(images, prompts, metadata), dtype=np.float64)
        except Exception as error:
            reason = str(error) if isinstance(error, RecastError) else _one_line(error)
            first = prompts[0] if prompts else ""
            raise RecastError(
                f"the reward {name!r} failed on {len(prompts)} images, the first for the prompt {first!r}: {reason}"
            ) from error
        if values.shape != (len(images),):
            raise RecastError(f"the reward {name!r} returned the shape {values.shape} for {len(images)} images")
        huge = np.abs(values) > HUGE
        if huge.any():
            worst = int(huge.argmax())
            size = "infinite" if np.isinf(values[worst]) else f"{values[worst]:.3g}"
            raise RecastError(f"the reward {name!r} is {size} for the prompt {prompts[worst]!r}")
        table.append(values)
    return np.stack(table) if table else np.empty((0, len(images)))


def positive(
    name: str, reward: Reward | None, scores: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Scores as gain curves need them, not negative; how many had to be clamped at 0, and how many there are.

    A reward with a method `positive` maps its own (ImageReward: a sigmoid); what is negative then becomes 0 (App. E.1).
    """
    mapped = getattr(reward, "positive", None)
    try:
        values = scores if mapped is None else np.asarray(mapped(scores), dtype=np.float64)
    except Exception as error:
        raise RecastError(f"the reward {name!r} failed to make its scores positive: {_one_line(error)}") from error
    if values.shape != scores.shape:
        raise RecastError(f"the reward {name!r} made the shape {values.shape} of scores {scores.shape} not negative")
    return np.maximum(values, 0.0), np.array([(values < 0).sum(), np.isfinite(values).sum()])
