"""W in X-GenGroup/Flow-Factory, without an edit: DiffusionNFT, GRPO and GRPO-Guard, tried at commit a0b2bc5.

In place of `ff-train config.yaml`:

    RECAST_WEIGHTS=weights.json accelerate launch -m recast.integrations.flow_factory config.yaml

or, in a script of one's own, `attach(trainer, "weights.json")` between `load_trainer` and `start`. The trainer's
aggregation of rewards is replaced by a table (T,) per sample, and `batch["advantage"]` is the column of the timestep
that the model was called with last. In the layout with `trainers/rl/` (commit b30dc00, of which only the two trainers
were read, and nothing run) timesteps come from `forward_velocity_state` and `get_replay_step` instead.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recast.core.advantage import Mode
from recast.core.weights import WeightMatrix
from recast.errors import RecastError
from recast.integrations.mixer import Mixer, levels

__all__ = ["attach", "main"]

_TRAINERS = ("DiffusionNFTTrainer", "GRPOTrainer", "GRPOGuardTrainer")


def attach(
    trainer: Any, weights: WeightMatrix | str | Path | None = None, mode: Mode = "reward", strict: bool = True
) -> Mixer:
    """Make a trainer of Flow-Factory take its advantages from W; to be called before `trainer.start()`.

    Parameters
    ----------
    trainer : BaseTrainer
        What `load_trainer` returns for `trainer_type` nft, grpo or grpo-guard.
    weights : WeightMatrix or path, optional
        W; by default the file that RECAST_WEIGHTS names.
    mode : {"step", "shared", "reward"}, default "reward"
        How rewards are brought to one scale. `reward` is Flow-Factory's own `gdpo`.
    strict : bool, default True
        Refuse timesteps that are not steps of W. False is for `uniform` and `logit_normal` time sampling.

    Returns
    -------
    Mixer
        The mixer in use; standard deviations follow the trainer's `global_std`.

    Raises
    ------
    RecastError
        If the trainer is another one, or draws timesteps off W's grid while `strict`.
    """
    if not any(kind.__name__ in _TRAINERS for kind in type(trainer).__mro__):
        raise RecastError(f"{type(trainer).__name__} cannot take W: choose trainer_type nft, grpo or grpo-guard")
    strategy = str(getattr(trainer, "time_sampling_strategy", "discrete"))
    if strict and not strategy.startswith("discrete"):
        raise RecastError(
            f"time_sampling_strategy {strategy} draws noise levels between W's steps: choose discrete, or take the "
            "nearest step with attach(…, strict=False)"
        )
    processor = trainer.advantage_processor
    mixer = Mixer.from_environment(mode) if weights is None else Mixer(weights, mode)
    mixer.spread, mixer.strict = "batch" if processor.global_std else "group", strict
    _aggregate(trainer, mixer)
    module = sys.modules[type(trainer).__module__]
    if hasattr(module, "forward_velocity_state"):
        _follow_velocity(module, mixer)
    elif hasattr(trainer.adapter, "get_replay_step"):
        _follow_replay(trainer.adapter, mixer)
    else:
        _follow_forward(trainer, mixer)
    return mixer


def main() -> None:
    """Flow-Factory's own command, with W attached to the trainer that it loads."""
    train: Any = importlib.import_module("flow_factory.train")
    load = train.load_trainer

    def load_with_weights(config: Any) -> Any:
        trainer = load(config)
        attach(trainer)
        return trainer

    train.load_trainer = load_with_weights
    train.main()


def _aggregate(trainer: Any, mixer: Mixer) -> None:
    """Give the trainer's processor our aggregation, whatever the settings say."""
    processor = trainer.advantage_processor
    compute = processor.compute_advantages

    def aggregate(processor: Any, samples: Any, rewards: Any, store_to_samples: bool) -> Any:
        found, groups, *_ = processor.collect_group_rewards(samples, rewards)
        scores = np.stack([np.asarray(found[name], dtype=np.float64) for name in _known(mixer, found)], 1)
        ranks, rank = processor.accelerator.num_processes, processor.accelerator.process_index
        if processor.group_on_same_rank and ranks > 1:  # these are this process's own: bring all together
            import torch

            own = np.column_stack([scores, np.asarray(groups) + float(rank * len(samples))])
            everyone = processor.accelerator.gather(torch.as_tensor(own, device=processor.accelerator.device))
            scores, groups = everyone[:, :-1].cpu().numpy(), everyone[:, -1].cpu().numpy()
            table = mixer.table(scores, groups).reshape(ranks, len(samples), -1)[rank]
        else:
            table = mixer.table(scores, groups)
        local = processor._to_local(table)
        for sample, row in zip(samples, local, strict=True) if store_to_samples else ():
            sample.extra_kwargs["advantage"] = row
        return local

    def compute_advantages(samples: Any, rewards: Any, store_to_samples: bool = True, **_: Any) -> Any:
        timesteps = getattr(trainer.adapter.scheduler, "timesteps", None)
        if mixer.strict and timesteps is not None:  # the whole grid, before the first step takes one of its levels
            mixer.weights.check(levels(timesteps))
        return compute(samples=samples, rewards=rewards, store_to_samples=store_to_samples, aggregation_func=aggregate)

    processor.compute_advantages = compute_advantages


def _known(mixer: Mixer, found: Any) -> tuple[str, ...]:
    missing = [name for name in mixer.weights.rewards if name not in found]
    if missing:
        raise RecastError(f"no scores for {', '.join(missing)}, which W needs; the trainer has {', '.join(found)}")
    return mixer.weights.rewards


def _pick(mixer: Mixer, table: Any, sigmas: Any) -> Any:
    """One advantage per sample (B,) at its own level; sigmas (B,), or one for all."""
    return mixer.slots(table, sigmas.reshape(-1, 1).expand(table.shape[0], 1))[:, 0].float()


class _Batch(dict[str, Any]):
    """A batch whose advantage is that of the timestep which the model was called with last."""

    last: Callable[[], Any]
    mixer: Mixer

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return _pick(self.mixer, value, levels(self.last())) if key == "advantage" and value.ndim == 2 else value


def _follow_forward(trainer: Any, mixer: Mixer) -> None:
    """Take timesteps from the calls of the model: adapter.forward(t=…), before which samples were stacked."""
    module: Any = sys.modules[type(trainer).__module__]
    sample, forward, seen = module.BaseSample, trainer.adapter.forward, [None]

    @functools.wraps(forward)  # its signature is read, to choose what is passed
    def remember(*args: Any, **named: Any) -> Any:
        seen[0] = named["t"]
        return forward(*args, **named)

    def stack(samples: Any) -> _Batch:
        batch = _Batch(sample.stack(samples))
        batch.mixer, batch.last = mixer, lambda: seen[0]
        return batch

    trainer.adapter.forward = remember
    module.BaseSample = type(sample.__name__, (sample,), {"stack": staticmethod(stack)})


def _follow_velocity(module: Any, mixer: Mixer) -> None:
    velocity, tables = module.forward_velocity_state, _Tables(mixer)

    @functools.wraps(velocity)
    def forward_velocity_state(trainer: Any, batch: Any, state: Any, times: Any, *args: Any, **named: Any) -> Any:
        tables.put(batch, next(iter(times.sigma.values())))
        return velocity(trainer, batch, state, times, *args, **named)

    module.forward_velocity_state = forward_velocity_state


def _follow_replay(adapter: Any, mixer: Mixer) -> None:
    step, tables = adapter.get_replay_step, _Tables(mixer)

    @functools.wraps(step)
    def get_replay_step(batch: Any, step_index: int, *args: Any, **named: Any) -> Any:
        tables.put(batch, levels(batch["timesteps"])[:, step_index])
        return step(batch, step_index, *args, **named)

    adapter.get_replay_step = get_replay_step


class _Tables:
    """Puts the advantage of a level into a batch, and remembers the table that was there."""

    def __init__(self, mixer: Mixer) -> None:
        self.mixer, self.batch, self.table = mixer, None, None

    def put(self, batch: Any, sigmas: Any) -> None:
        if batch is not self.batch:
            self.batch, self.table = batch, batch["advantage"]
        try:
            batch["advantage"] = _pick(self.mixer, self.table, sigmas)
        except TypeError as error:
            raise RecastError(
                f"batches of this Flow-Factory cannot be changed: {error}; use main of May 2026"
            ) from error


if __name__ == "__main__":
    main()
