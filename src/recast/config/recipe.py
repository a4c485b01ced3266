"""Recipes: the settings of all stages, from YAML and `key=value` overrides."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from recast.config.sections import (
    MIXTURE_REWARDS,
    EstimateConfig,
    EvaluateConfig,
    PolicyConfig,
    PromptsConfig,
    ProposeConfig,
    RunConfig,
    Section,
    SweepConfig,
    WeighConfig,
    WorldConfig,
)
from recast.config.training import TrainConfig
from recast.core import artifact
from recast.errors import RecastError

__all__ = ["RENAMED", "Recipe", "load", "load_run", "options", "parse", "policy"]

RENAMED = {
    "train.groups": "train.prompts_per_epoch",
    "train.images": "train.images_per_prompt",
    "train.penalty": "train.kl_weight",
    "train.normalise": "train.normalize",
    "evaluate.judges": "evaluate.held_out",
} | {
    f"{section}.{name}.weights": f"{section}.{name}.checkpoint"
    for section in ("rewards", "evaluate.held_out")
    for name in ("hpsv2", "imagereward", "aesthetic", "hpsv3")
}
"""Settings of version 0.1 by their dotted names, and what they are called now."""
_LARGEST = 100_000
"""Values in the largest YAML that is read."""
_EXACT_WORLD = ("world", "estimate", "weigh")  # the sections that a world of mixtures reads


class Recipe(Section):
    """Settings of all stages, validated and frozen.

    A recipe is usually read from YAML with `load`. Every section and every setting has a default; an unknown key is an
    error that names the nearest known one.

    Parameters
    ----------
    world : WorldConfig
        Images of a policy, or the exact world of Gaussian mixtures.
    policy : PolicyConfig
        The policy.
    prompts : PromptsConfig
        The prompts that curves are measured on.
    propose : ProposeConfig
        Where the proposals come from.
    rewards : dict of str to dict
        Rewards by name, each with its options or None.
    estimate, weigh, train, evaluate, run, sweep
        Settings of the stages.

    Examples
    --------
    >>> recipe = Recipe.model_validate({"rewards": {"clipscore": None, "ocr": None}, "weigh": {"budget": {"ocr": 2}}})
    >>> recipe.reward_names, recipe.budget, recipe.estimate.steps
    (('clipscore', 'ocr'), {'ocr': 2.0}, 25)
    """

    world: WorldConfig = WorldConfig()
    policy: PolicyConfig = PolicyConfig()
    prompts: PromptsConfig = PromptsConfig()
    propose: ProposeConfig = ProposeConfig()
    rewards: dict[str, dict[str, Any] | None] = Field(
        default_factory=dict, description="Rewards by name, each with its options."
    )
    estimate: EstimateConfig = EstimateConfig()
    weigh: WeighConfig = WeighConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    run: RunConfig = RunConfig()
    sweep: SweepConfig = SweepConfig()

    @model_validator(mode="after")
    def _nothing_idle(self) -> Recipe:
        if self.world.kind == "mixture":
            if idle := self.model_fields_set - set(_EXACT_WORLD):
                raise ValueError(f"the section {min(idle)} belongs to world.kind = images, not to mixture")
            if self.weigh.columns == "effect":
                raise ValueError("weigh.columns = effect belongs to world.kind = images: a mixture has no trainer")
        elif idle := self.world.model_fields_set - {"kind"}:
            raise ValueError(f"world.{min(idle)} belongs to world.kind = mixture, not to images")
        return self

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The rewards that curves are measured for, in order."""
        return MIXTURE_REWARDS if self.world.kind == "mixture" else tuple(self.rewards)

    @property
    def budget(self) -> dict[str, float]:
        """λ of every reward: `weigh.budget`, or 1 for each reward if that is empty."""
        return self.weigh.budget or dict.fromkeys(self.reward_names, 1.0)

    @property
    def self_rollouts(self) -> bool:
        """Whether the proposals are the policy's own images (App. B.3)."""
        return self.world.kind == "images" and self.propose.source == "policy"

    @property
    def generator(self) -> str:
        """The name of the generator that stands for π⁺."""
        settings = self.propose
        if settings.endpoint is not None:
            return settings.model or settings.endpoint.model
        return self.policy.model if settings.source == "policy" else settings.folder or settings.source

    def resolved(self) -> dict[str, Any]:
        """Every setting that this kind of world reads."""
        content = self.model_dump(mode="json")
        if self.world.kind == "mixture":
            return {key: content[key] for key in _EXACT_WORLD}
        return content | {"world": {"kind": "images"}}

    def save(self, path: str | Path) -> Path:
        """Write the resolved recipe as YAML, atomically."""
        artifact.sweep(Path(path).parent)  # every stage writes it, so nothing that a killed one has left stays
        return artifact.write_text(path, yaml.safe_dump(self.resolved(), sort_keys=False))


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file and overrides.

    Parameters
    ----------
    path : str or Path
        YAML file with one mapping per section.
    overrides : sequence of str, optional
        Settings of the form `section.key=value`, with values in YAML; they replace those of the file.

    Returns
    -------
    Recipe

    Raises
    ------
    RecastError
        If the file cannot be read, or a setting is unknown, has another name now, or has a wrong value.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "recipe.yaml"
    >>> _ = path.write_text("{world: {kind: mixture}, estimate: {steps: 10}}")
    >>> recipe = load(path, ["estimate.alpha=4", "weigh.budget.fine=2"])
    >>> recipe.estimate.steps, recipe.estimate.alpha, recipe.weigh.budget
    (10, 4.0, {'fine': 2.0})
    """
    content = _read(path)
    for override in overrides:
        _apply(content, override)
    for old, new in RENAMED.items():
        if _holder(content, old) is not None:
            raise RecastError(f"{path}: {old} is called {new} now")
    return _validated(path, content)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        content = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecastError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise RecastError(f"{path}: not a valid YAML file: {reason}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise RecastError(f"{path}: a recipe is a mapping of sections, not a {type(content).__name__}")
    return content


class _Loader(yaml.SafeLoader):
    """Refuses a key that appears twice in one mapping: which one counts is not to be guessed."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """A mapping with distinct keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} appears twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """The content of YAML; ValueError for anything that is none, repeats a key, or unfolds to an absurd size."""
    try:
        content = yaml.load(text, _Loader)  # a safe loader
        if _size(content, {}) > _LARGEST:
            raise ValueError(f"its anchors unfold to more than {_LARGEST:,} values")
    except (yaml.YAMLError, RecursionError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return content


def _size(content: Any, known: dict[int, int]) -> int:
    """Number of values, those behind an anchor counted wherever it is used; an endless number for one inside itself."""
    if not isinstance(content, (dict, list)):
        return 1
    if id(content) not in known:
        known[id(content)] = _LARGEST + 1  # until it is known
        below = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_size(each, known) for each in below)
    return known[id(content)]


def _validated(path: str | Path, content: dict[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecastError(f"{path}: {_sentence(error)}") from error


def load_run(path: str | Path) -> Recipe:
    """The recipe that a stage has written into its folder, by this version or by version 0.1."""
    content = _read(path)
    for old, new in RENAMED.items():
        holder = _holder(content, old)
        if holder is not None:
            holder[new.rpartition(".")[2]] = holder.pop(old.rpartition(".")[2])
    return _validated(path, content)


def _holder(content: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The mapping in which a dotted key is set, or None if it is not set."""
    *parents, last = key.split(".")
    below: Any = content
    for name in parents:
        below = below.get(name) if isinstance(below, dict) else None
    return below if isinstance(below, dict) and last in below else None


def options(texts: Sequence[str]) -> dict[str, Any]:
    """A mapping from texts of the form `key=value`, with values in YAML."""
    found: dict[str, Any] = {}
    for text in texts:
        _apply(found, text)
    return found


def policy(**options: Any) -> PolicyConfig:
    """The settings of a policy from keyword options, validated as in a recipe."""
    try:
        return PolicyConfig(**options)
    except ValidationError as error:
        raise RecastError(f"policy: {_sentence(error, PolicyConfig)}") from error


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecastError(f"a setting has the form key=value, in a recipe section.key=value, not {override!r}")
    *parents, last = key.split(".")
    target = content
    for name in parents:
        below = target[name] = {} if target.get(name) is None else target[name]
        if not isinstance(below, dict):
            raise RecastError(f"the override {override!r} needs a section {name!r}, but {name!r} is a single value")
        target = below
    try:
        target[last] = parse(text)
    except ValueError as error:
        raise RecastError(f"the value of the override {override!r} is not valid YAML") from error


def _sentence(error: ValidationError, section: Any = Recipe) -> str:
    """The first error of pydantic in one sentence; for an unknown key, with the nearest known one."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        reason = problem["msg"].removeprefix("Value error, ")
        return f"{where} = {problem['input']!r}: {reason[0].lower()}{reason[1:]}" if where else reason
    for part in problem["loc"][:-1]:
        section = section.model_fields[str(part)].annotation
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}"
    return f"unknown key {where!r}; {hint}"
