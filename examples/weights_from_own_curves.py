"""Weights from your own gain curves, for your own trainer. NumPy is enough; torch is not needed.

python examples/weights_from_own_curves.py --out weights.json
"""

import argparse
from pathlib import Path

import numpy as np

import recast

# The noise levels of your sampler, σ_0 = 0 (clean) to σ_T = 1 (noise): here T = 5 steps.
SIGMAS = [0.0, 0.3, 0.5, 0.7, 0.9, 1.0]

# D, one row per reward and one column per level: how well the reward can be told from x_t. It falls from clean to
# noise. A constant added to a row changes nothing, since only the differences of adjacent columns count.
CURVES = {
    "clipscore": [0.90, 0.88, 0.80, 0.45, 0.10, 0.0],  # decided in the noisy steps
    "ocr": [0.90, 0.40, 0.15, 0.05, 0.01, 0.0],  # decided in the clean steps
}


def main(budget: dict[str, float], out: Path) -> recast.WeightMatrix:
    """Print W and some mixed rewards, write W to `out`, and return it."""
    curves = recast.GainCurves(rewards=tuple(CURVES), sigmas=SIGMAS, D=list(CURVES.values()))
    W = recast.weigh(curves, budget)  # method="static", "row", "hard", ... for the baselines

    print("W: one row per reward, one column per step, the cleanest step first")
    for name, row in zip(W.rewards, W.matrix, strict=True):
        print(f"  {name:10} {row}  sum {row.sum():.3f}")
    print(f"  columns    {W.matrix.sum(axis=0)}  1/T = {1 / W.steps:.3f}")

    # In the trainer: rewards (B, m) of a batch, in the order of W.rewards. NaN marks a reward that does not apply to a
    # prompt (here: no text was asked for); the weights of the other rewards are scaled up in its place.
    rewards = np.array([[0.31, 0.80], [0.29, 0.10], [0.33, np.nan]])
    print("\nrewards per step, (B, T)")
    print(W.mix(rewards))

    # Most trainers shuffle the timesteps of each sample. Pass the noise level of each slot, and the right column of W
    # is looked up for it.
    slots = np.array([[0.9, 0.3], [0.3, 1.0], [0.5, 0.7]])
    print(f"\nrewards of {slots.shape[1]} slots per sample, by their noise levels, (B, k)")
    print(W.mix(rewards, sigmas=slots))

    print(f"\nwrote {W.save(out)}")  # read it back with recast.WeightMatrix.load(out)
    return W


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clipscore", type=float, default=1.0, help="budget of clipscore")
    parser.add_argument("--ocr", type=float, default=2.0, help="budget of ocr")
    parser.add_argument("--out", type=Path, default=Path("weights.json"), help="where to write W")
    given = parser.parse_args()
    with np.printoptions(precision=3, suppress=True):
        main({"clipscore": given.clipscore, "ocr": given.ocr}, given.out)
