"""When does timing pay? One update of a policy from N images, with every way to weigh the steps, in exact worlds.

    python benchmarks/credit.py            # about ten minutes on one core
    python benchmarks/credit.py --quick    # the first grid, 8 worlds, N = 64 and 256: a minute, no files

A world is a Gaussian mixture with a mode-level, a mixed and a fine reward. N images of the policy are scored
exactly, and the rewards are standardized to a_i. At each level t, the target of DiffusionNFT,
a_i·(ε − x_0 − v_old(x_t)), is regressed on the responsibilities and their products with x_t (ridge). There is no
network and no optimizer. The update is v_old + η Σ_i P[i,t]·(field of reward i), where P are the factors of W, and W
comes from the mean curve of all worlds. Images of the updated policy (Euler on the grid) are scored exactly; the
result is the sum of the three rewards. `shuffled` takes another order of the steps in every world.

η is chosen for each method on one half of the worlds and used on the other half, and the reverse. The ridge is chosen
in each cell for `static` alone. Differences from `static` are paired, with 95 % t-intervals over worlds. N = ∞ takes
the exact field in place of the regression. Two methods know more than W can: `filter` is the Wiener filter
λ_i·S²/(S² + noise) of the exact squared signal S² and the measured noise (over repeats) of each reward and level,
averaged over worlds; `filter-columns` has the column sums of `filter` and divides each by λ.
The results are written to results/credit.json next to this file, and the figure to docs/images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from scipy import stats
from torch import Tensor

from recast import GainCurves, weigh
from recast.core import artifact, schedule
from recast.core.weights import Method
from recast.flow import sampling
from recast.flow.mixture import GaussianMixture
from recast.flow.mixture_prompts import REWARDS, MixturePrompt, exact_mu, mixture_prompt

RESULTS = Path(__file__).parent / "results"
Array = NDArray[np.float64]
Update = Callable[[Tensor, int], Tensor]
METHODS: Final[tuple[Method, ...]] = (
    "static",
    "sinkhorn",
    "reversed",
    "shuffled",
    "row",
    "matched",
    "matched-reversed",
    "matched-shuffled",
)
ORACLES = ("filter", "filter-columns")
ETAS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 11.0)
RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MODES, REPEATS, SAMPLES = 6, 4, 128


@dataclass(frozen=True)
class Grid:
    """A dimension, T, the shift of the scheduler, and the number of worlds and the batch sizes that are measured."""

    dimension: int
    steps: int
    shift: float
    worlds: int = 16
    images: tuple[int, ...] = (64, 256, 1024, 4096)

    @property
    def name(self) -> str:
        """The grid in a few words."""
        return f"d {self.dimension}, T {self.steps}, shift {self.shift:g}"

    @property
    def sigmas(self) -> list[float]:
        """Levels σ_0..σ_T."""
        return [float(sigma) for sigma in schedule.from_shift(self.steps, self.shift)]


GRIDS = (Grid(8, 10, 1.0, 32, (64, 256, 1024, 4096, 16384)), Grid(16, 10, 3.0), Grid(8, 25, 3.0))


@dataclass(frozen=True)
class World:
    """A mixture with its rewards, their positive policies, and their standard deviations (m,) under the policy."""

    prompt: MixturePrompt
    positive: tuple[GaussianMixture, ...]
    scale: Tensor

    @property
    def policy(self) -> GaussianMixture:
        """π_old."""
        return self.prompt.policy

    def rewards(self, x0: Tensor) -> Tensor:
        """Rewards (..., m) of clean samples (..., d)."""
        return torch.stack([reward(x0) for reward in self.prompt.rewards], dim=-1)

    def signal(self, x: Tensor, sigma: float) -> Tensor:
        """Δ_i(x) = E[a_i·(ε − x_0 − v_old) | x_σ = x] = μ_i(x)·(v_i⁺(x) − v_old(x)) / scale_i, exact, (..., m, d)."""
        old = self.policy(x, sigma)
        pairs = zip(self.prompt.rewards, self.positive, strict=True)
        fields = [reward.conditional(x, sigma)[..., None] * (plus(x, sigma) - old) for reward, plus in pairs]
        return torch.stack(fields, dim=-2) / self.scale[:, None]


def world(dimension: int, seed: int) -> World:
    """A seeded world."""
    prompt = mixture_prompt(dimension, MODES, seed)
    clean = prompt.policy.sample(16384, torch.Generator().manual_seed(seed))
    scale = torch.stack([reward(clean).std() for reward in prompt.rewards])
    return World(prompt, tuple(reward.positive() for reward in prompt.rewards), scale)


def curves(worlds: list[World], sigmas: list[float]) -> GainCurves:
    """Mean gain curves of the worlds, from exact conditional rewards at 2,048 noised samples of each proposal."""
    mu = []
    for seed, each in enumerate(worlds):
        clean = each.prompt.proposal.sample(512, torch.Generator().manual_seed(seed))
        mu.append(exact_mu(each.prompt, clean, sigmas, 4, seed=seed))
    return GainCurves.from_mu(REWARDS, sigmas, np.stack(mu))


def features(policy: GaussianMixture, x: Tensor, sigma: float) -> Tensor:
    """Responsibilities, and their products with x: (..., d) to (..., k + k·d)."""
    modes = policy.responsibilities(x, sigma)
    return torch.cat([modes, (modes[..., :, None] * x[..., None, :]).flatten(-2)], dim=-1)


def normal_equations(given: World, sigmas: list[float], images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Gram matrices (T, R, F, F) and right-hand sides (T, R, F, m·d) of the regressions, for R repeats of N images."""
    generator = torch.Generator().manual_seed(seed)
    x0 = given.policy.sample(REPEATS * images, generator).unflatten(0, (REPEATS, images))
    scores = given.rewards(x0)
    advantages = (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True)
    gram, right = [], []
    for sigma in sigmas[1:]:
        noise = torch.randn(x0.shape, generator=generator, dtype=x0.dtype)
        x = (1 - sigma) * x0 + sigma * noise
        rows = features(given.policy, x, sigma)
        residual = noise - x0 - given.policy(x, sigma)
        gram.append(rows.mT @ rows)
        right.append(rows.mT @ (advantages[..., :, None] * residual[..., None, :]).flatten(-2))
    return torch.stack(gram), torch.stack(right)


def solve(equations: tuple[Tensor, Tensor], ridge: float) -> Tensor:
    """Coefficients (T, R, F, m, d) of the fields of all rewards."""
    gram, right = equations
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype)
    found: Tensor = torch.linalg.solve(gram + ridge * identity, right)
    return found.reshape(*right.shape[:-1], len(REWARDS), -1)


def fitted(given: World, sigmas: list[float], fields: Tensor, shares: Array) -> Update:
    """The update field of shares (m, T), from the fitted fields of the rewards."""
    mixed = torch.einsum("trfid,it->trfd", fields, torch.from_numpy(shares))
    return lambda x, t: features(given.policy, x, sigmas[t]) @ mixed[t - 1]


def exact(given: World, sigmas: list[float], shares: Array) -> Update:
    """The update field of shares (m, T) without sampling noise."""
    weights = torch.from_numpy(shares)
    return lambda x, t: torch.einsum("...id,i->...d", given.signal(x, sigmas[t]), weights[:, t - 1])


def score(given: World, sigmas: list[float], update: Update, seed: int, repeats: int = REPEATS) -> Array:
    """Sum of the mean rewards (E, R) of the policies v_old + η·update, for all η; the noise is the same for all."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(repeats, SAMPLES, given.policy.means.shape[1], generator=generator, dtype=torch.float64)
    eta = torch.tensor(ETAS, dtype=torch.float64)[:, None, None, None]
    level = {sigma: t for t, sigma in enumerate(sigmas)}

    def velocity(x: Tensor, sigma: float) -> Tensor:
        return given.policy(x, sigma) + eta * update(x, level[sigma])

    clean = sampling.sample(velocity, noise.expand(len(ETAS), *noise.shape), sigmas, method="euler")
    return given.rewards(clean).sum(-1).mean(-1).numpy()


def energies(given: World, sigmas: list[float], fields: Tensor, seed: int) -> Array:
    """Mean squares (2, m, T) of the exact signal of each reward, and of the noise of its fitted field over repeats."""
    generator = torch.Generator().manual_seed(seed)
    x0 = given.policy.sample(1024, generator)
    found = []
    for sigma, field in zip(sigmas[1:], fields, strict=True):
        x = (1 - sigma) * x0 + sigma * torch.randn(x0.shape, generator=generator, dtype=x0.dtype)
        fit = torch.einsum("nf,rfid->rnid", features(given.policy, x, sigma), field)
        exactly = given.signal(x, sigma).square().sum(-1).mean(0)
        found.append(torch.stack([exactly, fit.var(0).sum(-1).mean(0)]))
    return torch.stack(found, dim=-1).numpy()


def shares(given: GainCurves, seed: int) -> dict[str, Array]:
    """P (m, T) of each method for equal budgets; `seed` is that of shuffled steps."""
    budget = dict.fromkeys(REWARDS, 1.0)
    return {method: scaled(weigh(given, budget, method, seed=seed).factors) for method in METHODS}


def scaled(factors: Array) -> Array:
    """Factors with the root mean square of the static ones, so that η has one unit."""
    return np.ascontiguousarray(factors / np.sqrt((factors**2).mean()) / len(factors))


def filters(energy: Array) -> dict[str, Array]:
    """Wiener shares (m, T) of signal and noise (2, m, T), and their column sums shared out equally."""
    kept = energy[0] / energy.sum(0)
    return {"filter": scaled(kept), "filter-columns": scaled(np.repeat(kept.mean(0, keepdims=True), len(kept), 0))}


def cell(worlds: list[World], sigmas: list[float], images: int, known: list[dict[str, Array]]) -> dict[str, Any]:
    """Results of all methods for batches of N images."""
    equations, by_ridge = [], []
    for k, each in enumerate(track(worlds, description=f"N = {images}")):
        equations.append(normal_equations(each, sigmas, images, seed=images + k))
        fields = [solve(equations[k], ridge)[:, :1] for ridge in RIDGES]
        updates = [fitted(each, sigmas, field, known[k]["static"]) for field in fields]
        by_ridge.append([score(each, sigmas, update, seed=k, repeats=1) for update in updates])
    static = np.stack(by_ridge).mean((0, 3)).max(-1)  # over worlds, at the best η, for the first repeat
    ridge = RIDGES[int(static.argmax())]
    fields = [solve(each, ridge) for each in equations]
    energy = np.mean([energies(w, sigmas, f, k) for k, (w, f) in enumerate(zip(worlds, fields, strict=True))], axis=0)
    oracles = filters(energy)
    values = {}
    for method in track((*METHODS, *ORACLES), description="methods"):
        results = []
        for k, (each, field) in enumerate(zip(worlds, fields, strict=True)):
            update = fitted(each, sigmas, field, (known[k] | oracles)[method])
            results.append(score(each, sigmas, update, seed=k))
        values[method] = np.stack(results)
    extra = {"ridge": ridge, "ridges": dict(zip(map(str, RIDGES), static.tolist(), strict=True))}
    return {"images": images, **extra, "signal": energy[0], "noise": energy[1], "methods": summary(values)}


def limit(worlds: list[World], sigmas: list[float], known: list[dict[str, Array]]) -> dict[str, Any]:
    """Results of all methods with the exact field, N = ∞."""
    values: dict[str, Array] = {}
    for method in track(METHODS, description="N = ∞"):
        updates = [exact(each, sigmas, known[k][method]) for k, each in enumerate(worlds)]
        pairs = enumerate(zip(worlds, updates, strict=True))
        values[method] = np.stack([score(each, sigmas, update, seed=k, repeats=1) for k, (each, update) in pairs])
    return {"images": None, "methods": summary(values)}


def summary(values: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """Mean, and paired difference from static, of results (worlds, η, repeats) at a cross-fitted η."""
    found: dict[str, Array] = {}
    chosen: dict[str, list[float]] = {}
    for method, table in values.items():
        each = table.mean(-1)
        result, chosen[method] = np.empty(len(each)), []
        for half in (0, 1):
            best = int(each[1 - half :: 2].mean(0).argmax())
            result[half::2] = each[half::2, best]
            chosen[method].append(ETAS[best])
        found[method] = result
    summaries: dict[str, dict[str, Any]] = {}
    for method, result in found.items():
        means = {"mean": float(result.mean()), "eta": chosen[method]}
        summaries[method] = means | paired(result, found["static"])
    if "filter" in found:
        summaries["filter"]["over columns"] = paired(found["filter"], found["filter-columns"])
    return summaries


def paired(first: Array, second: Array) -> dict[str, Any]:
    """Mean difference of two results (worlds,), and its 95 % t-interval."""
    difference = first - second
    middle = float(difference.mean())
    quantile = float(stats.t.ppf(0.975, len(difference) - 1))
    half_width = quantile * float(difference.std(ddof=1)) / len(difference) ** 0.5
    return {"difference": middle, "interval": [middle - half_width, middle + half_width]}


def crossing(cells: list[dict[str, Any]], method: str) -> float | None:
    """Images at which a method's difference from static falls to 0, interpolated in log N; None if it does not."""
    points = [(each["images"], each["methods"][method]["difference"]) for each in cells if each["images"]]
    for (few, above), (many, below) in zip(points[:-1], points[1:], strict=True):
        if above > 0 >= below:
            return float(few * (many / few) ** (above / (above - below)))
    return None


def measure(grid: Grid) -> dict[str, Any]:
    """All batch sizes of one grid."""
    worlds = [world(grid.dimension, seed) for seed in range(grid.worlds)]
    found = curves(worlds, grid.sigmas)
    known = [shares(found, seed) for seed in range(grid.worlds)]
    cells = []
    for images in grid.images:
        cells.append(cell(worlds, grid.sigmas, images, known))
        report(grid.name, cells[-1])
    cells.append(limit(worlds, grid.sigmas, known))
    report(grid.name, cells[-1])
    crossings = {method: crossing(cells, method) for method in ("sinkhorn", "matched")}
    print("break-even images:", crossings)
    described = {"worlds": grid.worlds, "sigmas": grid.sigmas, "gains": found.normalized(), "shares": known[0]}
    return described | {"cells": cells, "crossing": crossings}


def report(name: str, found: dict[str, Any]) -> None:
    """Print one line per method."""
    print(f"{name}, N = {found['images'] or '∞'}, ridge {found.get('ridge')}")
    for method, row in found["methods"].items():
        low, high = row["interval"]
        print(f"  {method:17s} {row['mean']:.3f}  {row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]  η {row['eta']}")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Difference from static against N, one panel per grid and one line per method."""
    from matplotlib.figure import Figure

    from recast.report.figures import COLORS

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True)
    lines = ["sinkhorn", "reversed", "shuffled", "matched", "matched-reversed", "matched-shuffled"]
    for panel, (name, found) in zip(panels, results.items(), strict=True):
        cells = [each for each in found["cells"] if each["images"]]
        for k, method in enumerate(lines):
            rows = [each["methods"][method] for each in cells]
            middle = [row["difference"] for row in rows]
            spread = [row["interval"][1] - row["difference"] for row in rows]
            place = np.array([each["images"] for each in cells]) * 1.04 ** (k - 2.5)  # side by side
            color, style = COLORS[k // 3], ("-o", "--v", ":s")[k % 3]
            panel.errorbar(place, middle, spread, fmt=style, color=color, label=method, capsize=2, markersize=4)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(title=name, xscale="log", xlabel="images per update")
        panel.set_xticks([each["images"] for each in cells], [f"{each['images']:,}" for each in cells])
        panel.minorticks_off()
        panel.grid(alpha=0.3, linewidth=0.4)
    panels[0].set_ylabel("sum of three rewards, minus static")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    """Measure, print, and write the results and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first grid, 8 worlds, N = 64 and 256, no files")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # the batches are small
    if quick:
        measure(Grid(8, 10, 1.0, 8, (64, 256)))
        return
    results = {grid.name: measure(grid) for grid in GRIDS}
    settings = {"repeats": REPEATS, "samples": SAMPLES, "etas": ETAS, "modes": MODES}
    artifact.write(RESULTS / "credit.json", "recast.benchmark.credit", settings | {"grids": results})
    draw(results, Path(__file__).parents[1] / "docs/images/credit.png")


if __name__ == "__main__":
    main()
