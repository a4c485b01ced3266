"""The overhead of training over its bare passes, what each pass costs, ReCAST against static, and memory over epochs.

    python benchmarks/train.py

On the shapes recipe with one thread. The update (noise, mixing, loss, metrics, optimizer) is timed alternately with a
bare loop of exactly its forward and backward passes, and with updates that leave out the pass of the base, of the old
policy, of both, and of the base for three pairs of four. Then whole epochs with a static W and with an uneven W, which
differ only in W, are timed alternately. Resident memory is read after every epoch. Writes results/train.json in this
folder; takes about four minutes.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from recast import WeightMatrix, config, prompts
from recast.core import artifact
from recast.flow import families
from recast.train import advantage, passes, stage
from recast.train.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
RECIPE = Path(__file__).parents[1] / "recipes/shapes.yaml"
ROUNDS, EPOCHS = 7, 12


def weights_of(sigmas: list[float], even: bool) -> WeightMatrix:
    """A W over the recipe's four rewards: the same weights at every step, or alternating ones."""
    steps = len(sigmas) - 1
    table = np.full((4, steps), 0.25 / steps)
    if not even:
        table += 0.2 / steps * np.array([[1], [-1], [1], [-1]]) * np.where(np.arange(steps) % 2, 1, -1)
    names = ("composition", "alignment", "detail", "background")
    return WeightMatrix(names, sigmas, table, table.sum(1), "static" if even else "sinkhorn")


def make(folder: Path, even: bool, *more: str) -> Trainer:
    """A trainer of the shapes recipe."""
    recipe = config.load(RECIPE, more)
    sigmas = families.load(recipe.policy).sigmas(recipe.estimate.steps)
    accelerator = stage.accelerator_of(recipe, folder)
    # The prompts of one epoch, so that all embeddings are cached after it.
    rows = prompts.load(recipe.train.prompts, recipe.train.prompts_per_epoch)
    return stage.build(recipe, weights_of(sigmas, even), rows, accelerator)


def bare(trainer: Trainer, calls: int) -> float:
    """Seconds of the passes of one update: old policy, base if needed, and the trained policy forward and backward."""
    size, policy = trainer.batches.micro, trainer.policy
    x = torch.randn(size, *policy.latent_shape)
    sigma = torch.rand(size) * 0.8 + 0.1
    condition = policy.condition([trainer.rows[k % len(trainer.rows)]["prompt"] for k in range(size)])
    begun = time.perf_counter()
    for _ in range(calls):
        with torch.no_grad():
            for _ in range(2 if trainer.settings.kl_weight > 0 else 1):
                policy.velocity(x, sigma, condition)
        policy.velocity(x, sigma, condition).square().mean().backward()
    return time.perf_counter() - begun


def overhead(trainer: Trainer) -> float:
    """Seconds of an update divided by those of its bare passes."""
    data, rewards = trainer._rollout(0, lambda *_: None)
    members = torch.arange(trainer.batches.total) // trainer.batches.images
    good = advantage.optimality(advantage.advantages(rewards, members, trainer.weights)).float()
    ratios = []
    for turn in range(ROUNDS + 1):
        loop = bare(trainer, trainer.batches.accumulation)
        trainer.optimizer.optimizer.zero_grad()
        begun = time.perf_counter()
        trainer._update(data, good, turn % trainer.batches.updates)
        ratios.append((time.perf_counter() - begun) / loop)
    print("update over bare passes:", [round(ratio, 3) for ratio in ratios[1:]], flush=True)
    return statistics.median(ratios[1:])


def passes_of(folder: Path) -> dict[str, float]:
    """Seconds of an update that leaves out passes, divided by those of one with all three; medians over rounds."""
    kinds = {
        "all": (make(folder, False), passes.Needed()),
        "no base": (make(folder, False), passes.Needed(base=False)),
        "no old": (make(folder, False), passes.Needed(old=False)),
        "neither": (make(folder, False), passes.Needed(old=False, base=False)),
        "kl_every=4": (make(folder, False, "train.kl_every=4"), passes.Needed()),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(ROUNDS + 1):
        for name, (trainer, needed) in kinds.items() if turn % 2 else reversed(kinds.items()):
            if not turn:
                trainer._needed = lambda _, needed=needed: needed  # type: ignore[method-assign,misc]
                data, _ = trainer._rollout(0, lambda *_: None)
                trainer._data = data  # type: ignore[attr-defined]
            good = torch.full((trainer.batches.total, len(trainer.sigmas) - 1), 0.5)
            begun = time.perf_counter()
            trainer._update(trainer._data, good, turn % trainer.batches.updates)  # type: ignore[attr-defined]
            times[name].append(time.perf_counter() - begun)
    found = {
        name: statistics.median(a / b for a, b in zip(each[1:], times["all"][1:], strict=True))
        for name, each in times.items()
    }
    print("update over one with all passes:", {name: round(value, 3) for name, value in found.items()}, flush=True)
    return found


def epochs(folder: Path) -> tuple[float, list[float]]:
    """Seconds of a ReCAST epoch divided by those of a static one, and peak memory in MiB after every epoch."""
    trainers = {even: make(folder, even) for even in (True, False)}
    times: dict[bool, list[float]] = {True: [], False: []}
    memory = []
    for turn in range(EPOCHS):
        for even in (True, False) if turn % 2 else (False, True):
            begun = time.perf_counter()
            trainers[even].epoch()
            times[even].append(time.perf_counter() - begun)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        print(f"epoch {turn + 1}: {memory[-1]:.0f} MiB", flush=True)
    ratios = [recast / static for recast, static in zip(times[False][1:], times[True][1:], strict=True)]
    return statistics.median(ratios), memory


def main() -> None:
    """Measure, print and write the results."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        trainer = make(Path(name), False)
        update = overhead(trainer)
        method, memory = epochs(Path(name))
        shares = passes_of(Path(name))
    growth = memory[-1] - memory[2]
    print(f"a pair takes {update:.3f} of its bare passes; a ReCAST epoch {method:.3f} of a static one")
    print(f"memory after epoch 3: {memory[2]:.0f} MiB, after epoch {EPOCHS}: {memory[-1]:.0f} MiB")
    fields = {
        "pair_over_bare": update,
        "passes": shares,
        "recast_over_static": method,
        "mebibytes": memory,
        "growth": growth,
    }
    artifact.write(RESULTS / "train.json", "recast.benchmark.train", fields)


if __name__ == "__main__":
    main()
