"""`recast plan`: what a recipe takes, stage by stage, before anything is loaded.

Counts follow from the settings. FLOPs and bytes are counted on the configurations of the models, on the meta device.
Hours are FLOPs over a stated share of a card's peak. Nothing here is measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from recast import config
from recast.config import Recipe
from recast.core import schedule
from recast.errors import RecastError
from recast.estimate import paper_evaluations, rows_per_prompt
from recast.plan import counts, disk, memory
from recast.plan.counts import Counts
from recast.plan.network import Network, Pair
from recast.plan.result import Machine, Plan, Stage, Total
from recast.plan.scorers import Scorer, scorer
from recast.train import Batches

__all__ = ["plan"]


def plan(recipe: Recipe, machine: Machine) -> Plan:
    """What a recipe takes on a machine; only the sections that the recipe has are planned.

    Raises
    ------
    RecastError
        If the model's configuration or a number of prompts is not known, or the batches do not fit the processes.
    """
    return _Planner(recipe, machine).plan()


class _Planner:
    """The stages of a recipe, each made once."""

    def __init__(self, recipe: Recipe, machine: Machine) -> None:
        self.recipe, self.machine = recipe, machine
        self.has = recipe.model_fields_set
        self.notes: list[str] = []

    def plan(self) -> Plan:
        recipe = self.recipe
        if recipe.world.kind == "mixture":
            grid = schedule.from_shift(recipe.estimate.steps, recipe.estimate.shift).tolist()
            made = [Stage("estimate", counts.estimate(recipe, grid))]
            return Plan(self.machine, tuple(made), (), {}, {}, {}, "none: the exact world", self._paper())
        made = [*self._curves(), *self._training(), *self._evaluation()]
        if not made:
            raise RecastError(self._nothing())
        self._remark(made)
        curves = any(each.name == "estimate" for each in made)
        totals = self._totals({each.name: each for each in made})
        return Plan(
            self.machine,
            tuple(made),
            tuple(totals),
            self._per_row(),
            self._batches(),
            self._micro_batches(),
            self.network.origin,
            self._paper() if curves else None,
            tuple(self.notes),
        )

    def _nothing(self) -> str:
        return next(iter(self.notes), "the recipe has none of the sections estimate, train and evaluate to plan")

    def _paper(self) -> int:
        prompts = self.recipe.world.prompts if self.recipe.world.kind == "mixture" else counts.prompts_of(self.recipe)
        return paper_evaluations(self.recipe, prompts)

    @cached_property
    def network(self) -> Network:
        return Network(self.recipe.policy)

    @cached_property
    def steps(self) -> list[float]:
        """The grid of training."""
        return list(self.network.policy.sigmas(self.recipe.train.steps or self.recipe.estimate.steps))

    @cached_property
    def trained(self) -> tuple[Counts, Batches]:
        return counts.train(self.recipe, self.machine.gpus, self.steps)

    @cached_property
    def pair(self) -> tuple[Pair, int]:
        return Network(self.recipe.policy).training(self.recipe.train)  # adapters stay out of the other counts

    @cached_property
    def scorers(self) -> dict[str, Scorer]:
        every = {**self.recipe.evaluate.held_out, **self.recipe.rewards}
        return {name: scorer(name, options) for name, options in every.items()}

    def _of(self, names: Iterable[str], offload: bool = False) -> dict[str, Scorer]:
        if not offload:
            return {name: self.scorers[name] for name in names}
        return {name: scorer(name, self.recipe.rewards.get(name), offload) for name in names}

    def _scoring(self, found: Counts) -> dict[str, float]:
        """FLOPs of all scores that are computed on a GPU."""
        total: dict[str, float] = {}
        for name, images in found.scored.items():
            for kind, each in self.scorers[name].flops.items():
                total[kind] = total.get(kind, 0.0) + images * each
        return total

    def _flops(self, found: Counts, network: Network) -> dict[str, dict[str, float]]:
        parts = {"sampling": _times(network.velocity.flops, found.rows), "scoring": self._scoring(found)}
        parts["decoding"] = _times(network.decoding.flops, found.decoded)
        if found.encoded:
            parts["encoding"] = _times(network.encoding.flops, found.encoded)
        return parts

    def _curves(self) -> list[Stage]:
        if "estimate" not in self.has:
            return []
        recipe, network = self.recipe, self.network
        grid = list(network.policy.sigmas(recipe.estimate.steps))
        images = counts.propose(recipe, grid)
        by_policy = recipe.propose.source == "policy"
        held = memory.propose(recipe, network) if by_policy else None
        flops = self._flops(images, network) if by_policy else {}
        made = [Stage("propose", images, flops, held, disk.propose(recipe, network, counts.prompts_of(recipe)))]
        found = counts.estimate(recipe, grid)
        held = memory.estimate(
            recipe, network, self._of(recipe.rewards), rows_per_prompt(recipe, grid), self.machine.room
        )
        written = disk.estimate(recipe, counts.prompts_of(recipe))
        return [*made, Stage("estimate", found, self._flops(found, network), held, written)]

    def _training(self) -> list[Stage]:
        recipe = self.recipe
        if "train" not in self.has:
            return []
        found, sizes = self.trained
        pair, adapter = self.pair
        settings = recipe.train
        flops = self._flops(found, self.network)
        flops["pairs"] = _times(pair.flops(settings), found.pairs)
        scorers = self._of(recipe.budget, settings.offload_rewards)
        held = memory.train(recipe, self.network, scorers, pair, adapter, sizes, self.machine.room)
        return [Stage("train", found, flops, held, disk.train(recipe, adapter))]

    def _evaluation(self) -> list[Stage]:
        recipe = self.recipe
        if "evaluate" not in self.has:
            return []
        try:
            found = counts.evaluate(recipe, self.machine.gpus)
        except RecastError as error:
            self.notes.append(f"evaluate is not planned: {error}")
            return []
        network = self.network.guided(recipe.evaluate.guidance)
        held = memory.evaluate(recipe, network, self._of(found.scored), self.machine.room)
        return [Stage("evaluate", found, self._flops(found, network), held, disk.evaluate(network, found))]

    def _totals(self, made: Mapping[str, Stage]) -> list[Total]:
        """The recipe once, what `recast run` does with its methods, and what `recast sweep` does."""
        once = list(made.values())
        found = [self._total("once", 1 if "train" in made else 0, [(each, 1) for each in once])]
        if not {"train", "evaluate"} <= set(made):
            return found
        run, sweep = self.recipe.run, self.recipe.sweep
        budgets = len(sweep.budgets) or 1 + len(self.recipe.rewards)
        kinds: list[tuple[str, int, int, int, list[Stage]]] = [("run", len(run.methods), len(run.seeds), 1, [])]
        kinds += [("sweep", len(sweep.methods), len(sweep.seeds), budgets, self._warmups())]
        for name, methods, seeds, cells, warmups in kinds:
            trainings = methods * seeds * cells
            if not trainings:
                continue
            parts = [(made[each], 1) for each in ("propose", "estimate") if each in made]
            parts += [(made["train"], trainings), (made["evaluate"], trainings + 1)]  # and the base
            parts += [(each, seeds) for each in warmups]
            compared = (methods - 1) * seeds * cells
            judged = made["evaluate"].counts.scored
            calls = 2 * compared * max(judged.values(), default=0)  # both orders of every pair
            extra = Stage("judge", Counts(calls={"judge": calls} if calls else {}))
            found.append(self._total(name, trainings, [*parts, (extra, 1)]))
        return found

    def _total(self, name: str, trainings: int, parts: Sequence[tuple[Stage, int]]) -> Total:
        together = Counts()
        for each, times in parts:
            together = together.plus(each.counts, times)
        hours = sum(times * each.gpu_hours(self.machine) for each, times in parts)
        flops = sum(times * each.total_flops for each, times in parts)
        written = sum(times * sum(each.disk.values()) for each, times in parts)
        return Total(name, trainings, together, flops, hours, written)

    def _warmups(self) -> list[Stage]:
        """The training of every recipe in `sweep.warmup`."""
        made = []
        for source in self.recipe.sweep.warmup:
            settings = config.load(Path(source).expanduser())
            made += [replace(each, name="warmup") for each in _Planner(settings, self.machine)._training()]
        return made

    def _per_row(self) -> dict[str, float]:
        found = {"velocity": self.network.velocity.total, "decode": self.network.decoding.total}
        if "estimate" in self.has:
            found["encode"] = self.network.encoding.total
        if "evaluate" in self.has:
            found["velocity with evaluate.guidance"] = self.network.guided(self.recipe.evaluate.guidance).velocity.total
        if "train" in self.has:
            pair, settings = self.pair[0], self.recipe.train
            found |= {
                "pair, forward of old": sum(pair.forward.values()),
                "pair, forward of base": sum(pair.base.values()) / settings.kl_every if settings.kl_weight > 0 else 0.0,
                "pair, forward of new": sum(pair.forward.values()),
                "pair, backward": sum(pair.backward.values()),
                "pair, recomputation": sum(pair.recomputed.values()) if settings.checkpointing else 0.0,
            }
        return found

    def _batches(self) -> dict[str, int]:
        if "train" not in self.has:
            return {}
        sizes = self.trained[1]
        return {
            "images per epoch": sizes.total,
            "optimizer steps per epoch": sizes.updates,
            "pairs per image": sizes.pairs,
            "micro_batch": sizes.micro,
            "micro-batches per step": sizes.accumulation,
        }

    def _micro_batches(self) -> dict[str, dict[str, int]]:
        """Bytes of training by micro-batch, without and with checkpointing."""
        if "train" not in self.has:
            return {}
        (pair, adapter), sizes = self.pair, self.trained[1]
        scorers = self._of(self.recipe.budget, self.recipe.train.offload_rewards)
        held = memory.train(self.recipe, self.network, scorers, pair, adapter, sizes, self.machine.room)
        how = "checkpointed" if self.recipe.train.checkpointing else "plain"
        fixed = held.phases["pairs"] - pair.memory[how].at(sizes.micro)
        rows = sorted({1, 2, 4, 8, 16, 24, 32, 64, sizes.micro})
        return {name: {str(k): fixed + line.at(k) for k in rows} for name, line in pair.memory.items()}

    def _remark(self, made: Sequence[Stage]) -> None:
        """What the numbers leave open."""
        for name, each in self.scorers.items():
            if each.where == "unknown":
                self.notes.append(f"{name} is your own reward: its calls are counted, its time and memory are not")
            elif each.where in ("cpu", "endpoint"):
                place = "on the CPU" if each.where == "cpu" else "on a server"
                self.notes.append(f"{name} runs {place}: its calls are counted, its time is not")
        for stage in made:
            if stage.held is not None and stage.held.peak > self.machine.room:
                over = (stage.held.peak - self.machine.room) / 2**30
                self.notes.append(f"{stage.name} does not fit: its peak is {over:.1f} GiB above what can be used")
        cap, calls = self.recipe.propose.cap, sum(each.counts.calls.get("propose", 0) for each in made)
        if cap is not None and calls > cap:
            self.notes.append(f"propose makes {calls} requests, more than propose.cap = {cap}")


def _times(flops: Mapping[str, float], number: int) -> dict[str, float]:
    return {kind: number * each for kind, each in flops.items()}
