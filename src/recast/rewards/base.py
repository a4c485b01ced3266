"""The protocol of a reward, loading a reward by name, and scoring images with several rewards."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, get_type_hints

import numpy as np
from numpy.typing import NDArray

from recast import objects
from recast.errors import RecastError
from recast.progress import waiting
from recast.rewards.patience import limited
from recast.rewards.pixels import Images, as_tensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "NAMES",
    "Images",
    "Reward",
    "as_tensor",
    "find",
    "load",
    "loadable",
    "mapper",
    "positive",
    "score",
    "versions",
]

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
"""Short names: the nine rewards of the paper, an example, and the five of the shapes world."""

_WITH_CHECKPOINT = ("aesthetic", "hpsv2", "hpsv3", "imagereward")  # in version 0.1, their option was called weights
_HUGE = 1e30  # larger scores are an error: their squares would overflow silently


class Reward(Protocol):
    """A callable that scores images for their prompts.

    A custom reward is a class with this `__call__`, or a function with the same arguments; further arguments of the
    constructor or of the function are its options in a recipe. Gain curves need non-negative scores: a reward with
    negative ones should define an increasing map `positive(scores)` as a method (see `recast.rewards.base.positive`).
    A reward whose scores depend on more than its options, such as the version of a package, should name it with a
    static or class method `versions(**options)` that takes the same options (see `recast.rewards.base.versions`).

    Examples
    --------
    >>> class Redness:
    ...     def __init__(self, scale: float = 1.0) -> None:
    ...         self.scale = scale
    ...     def __call__(self, images, prompts, metadata=None):
    ...         return self.scale * images[:, 0].double().mean((1, 2)).numpy()
    >>> import torch
    >>> Redness(scale=2.0)(torch.full((2, 3, 8, 8), 0.25), ["a cat", "a dog"])
    array([0.5, 0.5])
    """

    def __call__(
        self, images: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One score per image.

        Parameters
        ----------
        images : torch.Tensor, (B, 3, H, W)
            Floats in [0, 1]; the rewards of the package also accept PIL images of one size.
        prompts : sequence of str, (B,)
            One prompt per image.
        metadata : sequence of mapping, (B,), optional
            The rows of the prompt file, as `geneval` needs them.

        Returns
        -------
        ndarray of float64, (B,)
            NaN where the reward does not apply to the prompt.
        """


def find(name: str) -> tuple[str, str]:
    """The module and the object behind the name of a reward; nothing is imported.

    Parameters
    ----------
    name : str
        A key of `NAMES`, or `package.module:Object`.

    Returns
    -------
    tuple of str
        Name of the module, and of the class or function in it.

    Raises
    ------
    RecastError
        If the name is neither a short name nor of the form `package.module:Object`.

    Examples
    --------
    >>> find("composition")
    ('recast.shapes.rewards', 'Composition')
    """
    module_name, _, attribute = NAMES.get(name, name).partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise RecastError(
            f"unknown reward {name!r}: choose one of {', '.join(NAMES)}, or name your own as package.module:Object"
        )
    return module_name, attribute


def load(name: str, **options: Any) -> Reward:
    """Load a reward by its short name or by `package.module:Object`.

    Parameters
    ----------
    name : str
        A key of `NAMES`, or the path of a class or function; modules in the working directory are found.
    **options
        Arguments of the class or function, checked against its type annotations; `~` is the home directory.

    Returns
    -------
    Reward
        The instance or the function.

    Raises
    ------
    RecastError
        If the name is unknown, the module cannot be imported, or the reward does not accept the options.

    Examples
    --------
    >>> from recast.shapes import prompts, render
    >>> rows = prompts.load("test")[:3]
    >>> load("composition")(render.render(rows, seed=0), [row["prompt"] for row in rows])
    array([1., 1., 1.])
    """
    found = loadable(name)
    options = _accepted(name, found, options)
    if not inspect.isclass(found):
        return cast(Reward, functools.partial(found, **options) if options else found)
    try:
        return cast(Reward, found(**options))
    except (Exception, SystemExit) as error:
        raise RecastError(f"the reward {name!r} cannot be loaded: {_reason(error)}") from error


def versions(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """What decides the scores of a reward besides its options: models and packages by name; nothing is loaded.

    Artifacts that hold scores record it, and scores of two versions are not mixed.

    Parameters
    ----------
    name : str
        A key of `NAMES`, or the path of a class or function.
    options : mapping of str to any
        Its options, which its method `versions` is called with.

    Returns
    -------
    dict of str to str
        Empty for a reward without such a method.

    Raises
    ------
    RecastError
        If the reward cannot be imported, does not accept the options, or its method fails.

    Examples
    --------
    >>> versions("composition", {})
    {}
    >>> versions("ocr", {})["models"]
    'PP-OCRv6_det_small, PP-OCRv6_rec_small'
    """
    found = loadable(name)
    method = inspect.getattr_static(found, "versions", None)
    if method is None:
        return {}
    if inspect.isclass(found) and not isinstance(method, (staticmethod, classmethod)):
        raise RecastError(f"the reward {name!r} has a method versions that needs an instance: make it a static method")
    accepted = _accepted(name, found, options)
    try:
        return {str(key): str(value) for key, value in found.versions(**accepted).items()}
    except (Exception, SystemExit) as error:
        raise RecastError(f"the versions of the reward {name!r} cannot be told: {_reason(error)}") from error


def mapper(name: str, options: Mapping[str, Any]) -> Any:
    """The object whose `positive`, if it has one, maps the scores of a reward that is not loaded.

    A class is instantiated with the options only if its `positive` is a plain method, which may depend on them; the
    rewards of the package have a static method or none, so their models are not loaded.
    """
    found = loadable(name)
    if not inspect.isclass(found):
        return load(name, **options)
    method = inspect.getattr_static(found, "positive", None)
    if method is None or isinstance(method, (staticmethod, classmethod)):
        return None if method is None else found
    return load(name, **options)


def loadable(name: str) -> Any:
    """The class or function behind the name of a reward."""
    module_name, attribute = find(name)
    try:
        with objects.working_directory():
            found: Any = getattr(importlib.import_module(module_name), attribute, None)
    except (Exception, SystemExit) as error:  # a custom module may raise anything
        hint = ": pip install 'recast-diffusion[rewards]'" if name in NAMES else "; is its folder in PYTHONPATH?"
        hint = hint if isinstance(error, ImportError) else ""
        raise RecastError(f"the reward {name!r} cannot be imported ({_reason(error)}){hint}") from error
    if found is None:
        raise RecastError(f"the reward {name!r}: the module {module_name} has no {attribute!r}")
    if not callable(found):
        raise RecastError(f"the reward {name!r} is a {type(found).__name__}, which cannot be called")
    return found


def _accepted(name: str, found: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as a reward takes them; raises if it does not."""
    if name in _WITH_CHECKPOINT and "weights" in options:
        raise RecastError(f"the reward {name!r}: the option weights is called checkpoint now")
    is_class = inspect.isclass(found)
    checked = _checked(name, found.__init__ if is_class else found, options)
    try:
        signature = inspect.signature(found)
        signature.bind(**checked) if is_class else signature.bind_partial(**checked)
    except (TypeError, ValueError) as error:
        raise RecastError(f"the reward {name!r} does not take these options: {error}") from None
    return checked


def _checked(name: str, call: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, converted to the annotated types where there are any; a leading ~ is expanded in strings."""
    from pydantic import TypeAdapter, ValidationError

    try:
        hints = get_type_hints(call)
    except Exception:  # the annotations of a custom reward may be anything
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


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, RecastError) else f"{type(error).__name__}: {' '.join(str(error).split())}"


def score(
    rewards: Mapping[str, Reward],
    images: Images,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]] | None = None,
) -> NDArray[np.float64]:
    """Scores of the same images by several rewards.

    Parameters
    ----------
    rewards : mapping of str to Reward, (m,)
        Loaded rewards by name.
    images : torch.Tensor, (B, 3, H, W), or sequence of PIL images of one size
        A tensor must have floats in [0, 1].
    prompts : sequence of str, (B,)
        One prompt per image.
    metadata : sequence of mapping, (B,), optional
        The rows of the prompt file.

    Returns
    -------
    ndarray of float64, (m, B)
        One row per reward, in the order of the mapping; NaN where a reward does not apply.

    Raises
    ------
    RecastError
        If a reward fails or returns anything but one finite or NaN score per image; the message names the reward.

    Examples
    --------
    >>> import torch
    >>> name = "recast.rewards.examples:brightness"
    >>> rewards = {"plain": load(name), "double": load(name, scale=2.0)}
    >>> score(rewards, torch.full((2, 3, 8, 8), 0.25), ["a cat", "a dog"])
    array([[0.25, 0.25],
           [0.5 , 0.5 ]])
    """
    images = as_tensor(images, prompts)  # converted once: rewards that share a model embed this tensor once
    if metadata is not None and len(metadata) != len(prompts):
        raise RecastError(f"{len(prompts)} prompts need as many rows of metadata, not {len(metadata)}")
    table = [_scores(name, reward, images, prompts, metadata) for name, reward in rewards.items()]
    return np.stack(table) if table else np.empty((0, len(images)))


def _scores(
    name: str, reward: Reward, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None
) -> NDArray[np.float64]:
    """Scores (B,) of one reward, checked."""
    try:
        with waiting(f"the reward {name!r}"):
            values = limited(lambda: np.asarray(reward(images, prompts, metadata), dtype=np.float64))
    except (Exception, SystemExit) as error:
        first = prompts[0] if prompts else ""
        raise RecastError(
            f"the reward {name!r} failed on {len(prompts)} images, the first for the prompt {first!r}: {_reason(error)}"
        ) from error
    if values.shape != (len(images),):
        raise RecastError(f"the reward {name!r} returned the shape {values.shape} for {len(images)} images")
    huge = np.abs(values) > _HUGE
    if huge.any():
        worst = int(huge.argmax())
        size = "infinite" if np.isinf(values[worst]) else f"{values[worst]:.3g}"
        raise RecastError(f"the reward {name!r} is {size} for the prompt {prompts[worst]!r}")
    return values


def positive(
    name: str, reward: Reward | None, scores: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Non-negative scores, as gain curves need them (App. E.1).

    Parameters
    ----------
    name : str
        Name of the reward, for error messages.
    reward : Reward or None
        If it has a method `positive`, this maps the scores (ImageReward: a sigmoid). Negative ones then become 0.
    scores : ndarray of float64
        Scores of any shape; NaN remains NaN.

    Returns
    -------
    scores : ndarray of float64
        Scores ≥ 0 of the same shape.
    counts : ndarray of int64, (2,)
        How many scores were clamped at 0, and how many are finite.

    Raises
    ------
    RecastError
        If the reward's own map fails or changes the shape.

    Examples
    --------
    >>> positive("mine", None, np.array([-0.5, 0.5, np.nan]))
    (array([0. , 0.5, nan]), array([1, 2]))
    >>> positive("jpeg", load("jpeg"), np.array([-9.0, -1.0]))[0]
    array([0.1, 0.5])
    """
    kind = reward if inspect.isclass(reward) else type(reward)
    is_function = inspect.isfunction(reward)  # the map of a class is a method; one set in a constructor is not seen
    own_map = getattr(reward, "positive", None) if is_function or hasattr(kind, "positive") else None
    try:
        values = scores if own_map is None else np.asarray(own_map(scores), dtype=np.float64)
    except (Exception, SystemExit) as error:
        raise RecastError(f"the reward {name!r} failed to make its scores positive: {_reason(error)}") from error
    if values.shape != scores.shape:
        raise RecastError(f"the reward {name!r} mapped scores of the shape {scores.shape} to the shape {values.shape}")
    return np.maximum(values, 0.0), np.array([(values < 0).sum(), np.isfinite(values).sum()])
