"""A reward of your own beside one of the package: its scores, its gain curve, and W.

python examples/own_reward.py

A reward is a function or a class in any importable module, named as `module:Object`. This file is such a module, so
`recast rewards check own_reward:Clean` works in this folder too.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import recast
from recast import config, prompts, rewards
from recast.estimate.stage import estimate
from recast.flow import families
from recast.flow.generate import generate
from recast.progress import no_progress
from recast.propose.stage import propose


class Clean:
    """How free of noise an image is: minus the median difference of neighboring pixels, in 8-bit gray levels."""

    def __init__(self, scale: float = 0.5) -> None:
        self.scale = scale

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> np.ndarray:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]; NaN would mean that the reward does not apply to a prompt."""
        differences = (images[..., 1:] - images[..., :-1]).abs().flatten(1)
        return -255 * differences.median(1).values.double().cpu().numpy()

    def positive(self, scores: np.ndarray) -> np.ndarray:
        """Scores >= 0 in the same order, for gain curves. Without this method, negative scores would count as 0."""
        return np.exp(scores / self.scale)


def main(out: Path, prompt_count: int, steps: int, samples: int, noisings: int) -> recast.WeightMatrix:
    """Score some images, measure both gain curves, and return W."""
    # 1. The reward by itself, on images of the embedded policy.
    policy = families.load(config.policy(model="shapes"))
    models = {"composition": rewards.load("composition"), "own_reward:Clean": rewards.load("own_reward:Clean")}
    texts = [row["prompt"] for row in prompts.load("shapes:test", 4)]
    images = generate(policy, texts, seeds=range(len(texts)), steps=steps)
    for text, *scores in zip(texts, *rewards.score(models, images, texts), strict=True):
        print(f"{text:45}", "  ".join(f"{name} {score:.3f}" for name, score in zip(models, scores, strict=True)))

    # 2. Gain curves of both rewards. A YAML file with these settings does the same on the command line:
    #    recast propose recipe.yaml --out RUN && recast estimate recipe.yaml --out RUN
    recipe = config.Recipe.model_validate(
        {
            "policy": {"model": "shapes"},
            "prompts": {"source": "shapes:train", "count": prompt_count, "seed": 0},
            "propose": {"source": "renderer"},  # the images of a stronger generator, π⁺
            "rewards": {"composition": {}, "own_reward:Clean": {"scale": 0.5}},  # each with its options
            "estimate": {"steps": steps, "samples": samples, "noisings": noisings},
            "weigh": {"budget": {"composition": 1, "own_reward:Clean": 1}},
        }
    )
    propose(recipe, out, no_progress)
    estimate(recipe, out, no_progress)  # one file per prompt: if it is stopped, call it again and it resumes
    curves = recast.GainCurves.load(out / "gains.json")

    # 3. W: composition is decided in the noisy steps, and noise in the image in the cleanest ones.
    W = recast.weigh(curves, recipe.budget)
    W.save(out / "weights.json")
    print("\nstep t (1 is the cleanest)", "".join(f"{t:8}" for t in range(1, W.steps + 1)))
    for name, gains, row in zip(W.rewards, curves.gains, W.factors, strict=True):
        print(f"gain of {name:18}", "".join(f"{value:8.3f}" for value in gains))
        print(f"T·W  of {name:18}", "".join(f"{value:8.3f}" for value in row))
    print(f"wrote gains.json and weights.json in {out}")
    return W


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/own_reward"), help="folder of the run")
    parser.add_argument("--prompt-count", type=int, default=8, help="prompts that the curves are measured on")
    parser.add_argument("--steps", type=int, default=10, help="T, the number of denoising steps")
    parser.add_argument("--samples", type=int, default=4, help="proposals per prompt")
    parser.add_argument("--noisings", type=int, default=2, help="noisings per proposal")
    main(**vars(parser.parse_args()))
