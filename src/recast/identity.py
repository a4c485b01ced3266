"""What identifies a result: the settings that decide it, hashes of its inputs, and seeds derived from names.

A folder of results records the identity they were made with; `require_same` refuses results of another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recast import shapes, versions
from recast.config import RENAMED, Recipe
from recast.core import artifact
from recast.core.weights import WeightMatrix
from recast.errors import StaleError
from recast.prompts import Row

__all__ = [
    "adapter_hash",
    "current_options",
    "evaluation",
    "flatten",
    "policy",
    "prompts_hash",
    "proposals",
    "require_same",
    "rollouts",
    "seed_of",
    "training",
    "weights_hash",
]

_ADAPTER_FILE = "pytorch_lora_weights.safetensors"  # the name under which diffusers stores an adapter


def policy(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide the images of a policy; an adapter is identified by its content."""
    keys = ("model", "dtype", "guidance", "resolution", "max_sequence_length")
    facts: dict[str, Any] = {key: getattr(recipe.policy, key) for key in keys}
    # Left out at their defaults, as earlier releases did not record them.
    if recipe.policy.family is not None:
        facts["family"] = recipe.policy.family
    if recipe.policy.quantize != "none":
        facts["quantize"] = recipe.policy.quantize
    if recipe.policy.model == "shapes":
        facts["world"] = shapes.VERSION
    if recipe.policy.lora is not None:
        facts["lora"] = adapter_hash(recipe.policy.lora)
    return facts


def proposals(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide the proposals."""
    settings = recipe.propose
    facts: dict[str, Any] = {"source": settings.source, "generator": recipe.generator}
    if settings.endpoint is not None:
        facts["base_url"] = settings.base_url or settings.endpoint.base_url
    if settings.source == "openai":
        facts |= {"size": settings.size, "quality": settings.quality}
    if settings.source in ("renderer", "policy"):
        facts["seed"] = settings.seed
    if settings.source == "policy":
        chain = recipe.estimate  # the images follow the chain of the rollouts
        how = {"sampler": chain.sampler or "ancestral"} if chain.estimator == "paper" else {"spacing": chain.spacing}
        facts |= {"policy": policy(recipe), "steps": chain.steps} | how
    return facts


def rollouts(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide the rollouts of a prompt; α, aggregation and the choice of prompts do not."""
    late = ("alpha", "aggregate")
    settings = {key: value for key, value in recipe.estimate.used().items() if key not in late}
    if recipe.world.kind == "mixture":
        world = {key: value for key, value in recipe.world.model_dump().items() if key != "prompts"}
        return {"world": world, "estimate": settings}
    settings.pop("shift", None)
    return {
        "policy": policy(recipe),
        "proposals": proposals(recipe),
        "rewards": {name: options or {} for name, options in recipe.rewards.items()},
        "order": list(recipe.rewards),  # the rows of a shard are not named
        "estimate": settings,
    }


def training(recipe: Recipe, weights: WeightMatrix, rows: Sequence[Row]) -> dict[str, Any]:
    """The settings that decide the trained adapters, by their dotted names."""
    rewards = {name: recipe.rewards.get(name) or {} for name in weights.rewards}
    facts: dict[str, Any] = {
        "policy": policy(recipe),
        "rewards": rewards,
        "weights": weights_hash(weights),
        "train": recipe.train.used() | {"prompts": prompts_hash(rows)},
    }
    if recipe.train.lora is not None:
        facts["train"]["lora"] = adapter_hash(recipe.train.lora)
    if recipe.train.reweigh_every:
        facts |= {"estimate": recipe.estimate.used(), "weigh": recipe.weigh.used()}
        facts |= {"prompts": recipe.prompts.model_dump(), "proposals": proposals(recipe)}
    known = {name: options for name, options in rewards.items() if name in recipe.rewards}  # W may have others
    return flatten(facts) | versions.flat(versions.of(known))


def evaluation(recipe: Recipe, lora: Path | None, rows: Sequence[Row]) -> dict[str, Any]:
    """The settings that decide the evaluated images, by their dotted names; `rows` are the prompts, one per line."""
    settings = recipe.evaluate
    facts = policy(recipe) | {"guidance": settings.guidance}
    facts["lora"] = None if lora is None else adapter_hash(lora)
    made = {"steps": settings.steps, "solver": settings.solver, "seed": settings.seed}
    return flatten({"policy": facts, "evaluate": made | {"prompts": prompts_hash(rows)}})


def require_same(
    known: Mapping[str, Any], wanted: Mapping[str, Any], made: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise `StaleError` naming the first key in which the recorded settings `known` differ from `wanted`.

    `made` begins the sentence; `names` describes keys of which only a hash is recorded. Settings recorded under an
    earlier name are compared under their present one. Versions of rewards are not compared.
    """
    known = {RENAMED.get(key, key): value for key, value in known.items()}
    plain = artifact.plain(wanted)
    known, plain = (versions.without(each) for each in (known, plain))
    # Settings that both have come first, since a difference in one may add or remove others.
    for key in sorted({*known, *plain}, key=lambda key: (not (key in known and key in plain), key)):
        if known.get(key) != plain.get(key):
            what = f"{key} = {known.get(key)!r}, not {plain.get(key)!r}"
            what = f"another {names[key]}" if names and key in names else what
            raise StaleError(
                f"{made} with {what}: choose another --out, remove it, or restore the former value of the setting"
            )


def current_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded options of a reward under their present names.

    >>> current_options("hpsv2", {"weights": "model.pt", "device": "cpu"})
    {'checkpoint': 'model.pt', 'device': 'cpu'}
    """
    prefix = f"rewards.{name}."
    return {RENAMED.get(prefix + key, key).removeprefix(prefix): value for key, value in options.items()}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, as overrides write them.

    >>> flatten({"train": {"rank": 32}, "rewards": {"ocr": {}}})
    {'train.rank': 32, 'rewards.ocr': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = dict(value) if isinstance(value, Mapping) else value
    return flat


def prompts_hash(rows: Sequence[Row]) -> str:
    """SHA-256 over prompts and metadata, in order."""
    text = "\n".join(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def adapter_hash(folder: str | Path) -> str:
    """SHA-256 of an adapter's file, or of nothing if there is none."""
    path = Path(folder).expanduser() / _ADAPTER_FILE
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


def weights_hash(weights: WeightMatrix) -> str:
    """SHA-256 of W, its rewards, its grid and, if it is not uniform, ν."""
    content = [weights.rewards, weights.sigmas.tolist(), weights.matrix.tolist()]
    content += [] if weights.uniform else [weights.nu.tolist()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def seed_of(seed: int, prompt: str, number: int, purpose: str = "proposal") -> int:
    """A seed for one purpose and number of a prompt, independent of other prompts, numbers and purposes."""
    words = np.frombuffer(hashlib.sha256(f"{purpose}:{prompt}".encode()).digest(), np.uint32)[:4]
    return int(np.random.SeedSequence([seed, number, *words.tolist()]).generate_state(1, np.uint32)[0])
