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
    TrainConfig,
    WeighConfig,
    WorldConfig,
)
from recast.core import artifact
from recast.errors import RecastError

RENAMED = {
    "train.groups": "train.prompts_per_epoch",
    "train.images": "train.images_per_prompt",
    "train.penalty": "train.kl_weight",
    "train.normalise": "train.normalize",
    "evaluate.judges": "evaluate.held_out",
}
"""Settings of version 0.1 that have another name now."""


class Recipe(Section):
    """Settings of all stages."""

    world: WorldConfig = WorldConfig()
    policy: PolicyConfig = PolicyConfig()
    prompts: PromptsConfig = PromptsConfig()
    propose: ProposeConfig = ProposeConfig()
    rewards: dict[str, dict[str, Any] | None] = Field(default_factory=dict, description="names, each with its options")
    estimate: EstimateConfig = EstimateConfig()
    weigh: WeighConfig = WeighConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    run: RunConfig = RunConfig()
    sweep: SweepConfig = SweepConfig()

    @model_validator(mode="after")
    def _nothing_idle(self) -> Recipe:
        if self.world.kind == "mixture":
            for name in self.model_fields_set & {
                "policy",
                "prompts",
                "propose",
                "rewards",
                "train",
                "evaluate",
                "run",
                "sweep",
            }:
                raise ValueError(f"the section {name} belongs to world.kind = images, not to mixture")
        elif idle := self.world.model_fields_set - {"kind"}:
            raise ValueError(f"world.{min(idle)} belongs to world.kind = mixture, not to images")
        return self

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The rewards that curves are measured for, in order."""
        return MIXTURE_REWARDS if self.world.kind == "mixture" else tuple(self.rewards)

    @property
    def budget(self) -> dict[str, float]:
        """λ of every reward: `weigh.budget`, or 1 for each reward where that is empty."""
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
            return {key: content[key] for key in ("world", "estimate", "weigh")}
        return content | {"world": {"kind": "images"}}

    def save(self, path: str | Path) -> Path:
        """Write the resolved recipe as YAML, atomically."""
        return artifact.write_text(path, yaml.safe_dump(self.resolved(), sort_keys=False))


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file, with `section.key=value` overrides on top."""
    content = _read(path)
    for override in overrides:
        _apply(content, override)
    return _validated(path, content)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecastError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RecastError(f"{path}: not a valid YAML file: {reason}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise RecastError(f"{path}: a recipe is a mapping of sections, not a {type(content).__name__}")
    return content


def _validated(path: str | Path, content: dict[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecastError(f"{path}: {_sentence(error)}") from error


def load_run(path: str | Path) -> Recipe:
    """The recipe that a stage has written into its folder; settings under an earlier name are read under theirs."""
    content = _read(path)
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        if key in (content.get(section) or {}):
            content[section][new.partition(".")[2]] = content[section].pop(key)
    return _validated(path, content)


def options(texts: Sequence[str]) -> dict[str, Any]:
    """A mapping from `key=value` texts, values read as YAML."""
    found: dict[str, Any] = {}
    for text in texts:
        _apply(found, text)
    return found


def policy(**options: Any) -> PolicyConfig:
    """A policy's settings from keyword options, checked as a recipe's are."""
    try:
        return PolicyConfig(**options)
    except ValidationError as error:
        raise RecastError(f"policy: {_sentence(error, PolicyConfig)}") from error


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecastError(f"a setting has the form key=value, a recipe's section.key=value, not {override!r}")
    *parents, last = key.split(".")
    target = content
    for name in parents:
        below = target[name] = {} if target.get(name) is None else target[name]
        if not isinstance(below, dict):
            raise RecastError(f"the override {override!r} goes below {name!r}, which is a value and not a section")
        target = below
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecastError(f"the value of the override {override!r} is not valid YAML") from error


def _sentence(error: ValidationError, section: Any = Recipe) -> str:
    """The first problem pydantic found, in one sentence; for an unknown key, the nearest known one."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        reason = problem["msg"].removeprefix("Value error, ")
        return f"{where} = {problem['input']!r}: {reason[0].lower()}{reason[1:]}" if where else reason
    if where in RENAMED:
        return f"{where} is called {RENAMED[where]} now"
    for part in problem["loc"][:-1]:
        section = section.model_fields[str(part)].annotation
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}"
    return f"unknown key {where!r}; {hint}"
