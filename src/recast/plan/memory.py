"""Bytes on one GPU: what every stage holds at its peak, and the largest batches that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recast.config import Recipe
from recast.estimate import SCORED, rows_within
from recast.flow.generate import TILE
from recast.plan.network import Network, Pair
from recast.plan.scorers import Scorer, resident
from recast.train import Batches

__all__ = ["USABLE", "Held", "estimate", "evaluate", "propose", "train"]

USABLE = 0.9
"""Share of a GPU's memory that tensors can have; the rest is for its context, libraries and fragmentation."""
_GIB = 2**30
_EIGHT_BIT = 2 * (1 + 4 / 256)
"""Bytes per number of AdamW's two moments in 8 bits, with one float32 scale per 256 numbers."""


@dataclass(frozen=True)
class Held:
    """Bytes that a stage holds at its peak, by what they are, and the largest settings that fit.

    `phases` are the peaks of the parts of a stage, the largest of which `parts` adds up to.
    """

    parts: Mapping[str, int]
    phases: Mapping[str, int]
    largest: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())


def _held(fixed: Mapping[str, int], phases: Mapping[str, Mapping[str, int]], largest: Mapping[str, float]) -> Held:
    """The phase that holds most, on top of what all hold."""
    base = sum(fixed.values())
    totals = {name: base + sum(parts.values()) for name, parts in phases.items()}
    worst = max(totals, key=lambda name: totals[name])
    return Held({**fixed, **phases[worst]}, totals, largest)


def _models(network: Network, offload_text: bool) -> dict[str, int]:
    sizes = dict(network.parameters)
    text = sizes.pop("text encoders")
    return sizes | ({} if offload_text else {"text encoders": text})


def _text(network: Network, offload_text: bool) -> dict[str, int]:
    """What encoding a prompt brings to the GPU; the encoders' activations are those of one prompt, and left out."""
    return {"text encoders": network.parameters["text encoders"]} if offload_text else {}


def _visiting(scorers: Mapping[str, Scorer]) -> int:
    """Bytes of the largest network that comes to score, and of the activations of the largest batch."""
    sizes = [sum(each.models.values()) * each.offload + each.activations for each in scorers.values()]
    return max(sizes, default=0)


def propose(recipe: Recipe, network: Network) -> Held:
    """One image of the policy at a time."""
    fixed = _models(network, recipe.policy.offload_text)
    phases = {
        "prompts": _text(network, recipe.policy.offload_text),
        "sampling": {"velocity call": network.velocity.memory.at(1) + network.dequantized},
        "decoding": {"decoding": network.decoding.memory.at(1)},
    }
    return _held(fixed, phases, {})


def estimate(recipe: Recipe, network: Network, scorers: Mapping[str, Scorer], calls: list[int], room: float) -> Held:
    """Rollouts of one prompt while the ends of the one before are decoded and scored."""
    settings, text = recipe.estimate, recipe.policy.offload_text
    coupled = settings.estimator == "coupled"
    paths = settings.samples * settings.rollouts * (settings.noisings if coupled else 1)
    ends, levels = settings.steps * paths, len(calls) + 1
    # Ends as they are made, stacked, and those of the prompt before. Coupled rollouts also have x̂0 of every end, and
    # noise at all their levels, as it is drawn and as paths.
    latents = network.latent_bytes * (4 * ends + 2 * levels * paths if coupled else 3 * ends)
    images = min(SCORED, ends) * network.image_bytes * 2  # in parts, then as one
    most = -(-max(calls) // TILE) * TILE
    rows = min(rows_within(settings.memory, network.policy.row_bytes), most)
    fixed = _models(network, text) | {
        "rewards": resident(scorers.values()),
        "latents": latents,
        "decoding": network.decoding.memory.at(network.vae_batch) + images,
        "scoring": _visiting(scorers),
    }
    phases = {
        "prompts": _text(network, text),
        "sampling": {"velocity call": network.velocity.memory.at(rows) + network.dequantized},
    }
    fit = network.velocity.memory.most(room - sum(fixed.values()) - network.dequantized) // TILE * TILE
    fit = min(fit, most)
    largest = {"estimate.memory": _ceil(fit * network.policy.row_bytes / _GIB), "rows": fit}
    return _held(fixed, phases, largest)


def _ceil(gib: float) -> float:
    """GiB with one digit, rounded up, so that the rows they were computed from are not one tile fewer."""
    return -(-round(gib * 1000) // 100) / 10


def train(
    recipe: Recipe,
    network: Network,
    scorers: Mapping[str, Scorer],
    pair: Pair,
    adapter: int,
    sizes: Batches,
    room: float,
) -> Held:
    """Images of an epoch, scored meanwhile, then pairs with gradients."""
    settings, text = recipe.train, recipe.policy.offload_text
    images = sizes.share * sizes.updates
    moments = 2.0 if settings.optimizer == "adamw" else _EIGHT_BIT / 4
    fixed = _models(network, text) | {
        "rewards": resident(scorers.values()),
        "adapters, new and old": 2 * adapter,
        "gradients": adapter * (2 if sizes.processes > 1 else 1),  # and the buckets of DDP
        "optimizer": round(moments * adapter),
        "averaged adapter": adapter,
        "latents": images * network.latent_bytes,
        "prompts": min(images, sizes.groups) * network.prompt_bytes,
    }
    batch = min(settings.sample_batch, images)
    # A batch of images waits for its scores, one is scored, and one is made.
    sampling = {"images": 3 * batch * network.image_bytes, "scoring": _visiting(scorers)}
    velocity = network.velocity.memory
    how = "checkpointed" if settings.checkpointing else "plain"
    phases = {
        "prompts": _text(network, text),
        "sampling": sampling | {"velocity call": velocity.at(batch) + network.dequantized},
        "decoding": sampling | {"decoding": network.decoding.memory.at(min(network.vae_batch, batch))},
        "pairs": {"pairs": pair.memory[how].at(sizes.micro)},
    }
    left = room - sum(fixed.values())
    each = velocity.each + 3 * network.image_bytes
    drawn = int((left - velocity.fixed - network.dequantized - _visiting(scorers)) // each)
    largest = {
        "train.micro_batch": min(pair.memory["plain"].most(left), sizes.share * sizes.pairs),
        "train.micro_batch, checkpointing": min(pair.memory["checkpointed"].most(left), sizes.share * sizes.pairs),
        "train.sample_batch": max(0, min(drawn, images)),
    }
    return _held(fixed, phases, largest)


def evaluate(recipe: Recipe, network: Network, scorers: Mapping[str, Scorer], room: float) -> Held:
    """Images first, then one reward after the other."""
    settings, text = recipe.evaluate, recipe.policy.offload_text
    fixed = _models(network, text)
    batch = max(1, settings.batch // TILE) * TILE
    velocity = network.velocity.memory
    phases = {
        "prompts": _text(network, text),
        "sampling": {"velocity call": velocity.at(batch) + network.dequantized},
        "decoding": {
            "decoding": network.decoding.memory.at(min(network.vae_batch, batch)) + batch * network.image_bytes
        },
    }
    fit = velocity.most(room - sum(fixed.values()) - network.dequantized) // TILE * TILE
    drawn = _held(fixed, phases, {"evaluate.batch": fit})
    scored = {name: sum(each.models.values()) + each.activations for name, each in scorers.items()}
    if not scored:
        return drawn
    name = max(scored, key=lambda each: scored[each])
    if scored[name] <= drawn.peak:
        return Held(drawn.parts, {**drawn.phases, "scoring": scored[name]}, drawn.largest)
    parts = {"rewards": sum(scorers[name].models.values()), "scoring": scorers[name].activations}
    return Held(parts, {**drawn.phases, "scoring": scored[name]}, drawn.largest)
