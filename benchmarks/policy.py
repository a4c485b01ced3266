"""Time of our sampling loop compared with diffusers' pipeline call, and the time that cached conditioning saves.

    python benchmarks/policy.py

On the embedded model, with one thread: 24 images of one prompt at T = 10 and 25, without and with guidance. The calls
alternate in one run, and only ratios are reported. The results are written to results/policy.json next to this file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from recast import config
from recast.core import artifact
from recast.flow import families, sampling
from recast.flow.pipeline import PipelinePolicy
from recast.flow.policy import conditioned
from recast.rewards import base
from recast.shapes import prompts

RESULTS = Path(__file__).parent / "results"
IMAGES, ROUNDS = 24, 21
PROMPT = "two red circles and a blue square"


def alternate(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Median time of each call in seconds; the calls alternate, after one warm-up call each."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def sampling_ratio(steps: int, guidance: float) -> float:
    """Time of our loop, including conditioning and decoding, over that of `pipe(...)` for the same images."""
    policy = families.load(config.policy(model="shapes", guidance=guidance))
    assert isinstance(policy, PipelinePolicy)

    @torch.no_grad()
    def ours() -> torch.Tensor:
        x = torch.randn(IMAGES, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
        velocity = conditioned(policy, policy.condition([PROMPT]))
        return policy.decode(sampling.sample(velocity, x, policy.sigmas(steps), method="euler"))

    def theirs() -> torch.Tensor:
        images: torch.Tensor = policy.pipe(
            PROMPT,
            num_images_per_prompt=IMAGES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=1,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        return images

    if not torch.equal(ours(), theirs()):
        raise SystemExit("the images differ: the times would not compare the same work")
    mine, pipeline = alternate(ours, theirs)
    return mine / pipeline


def conditioning() -> dict[str, float]:
    """Time of conditioning on cached prompts over encoding them, and of encoding over sampling."""
    policy = families.load(config.policy(model="shapes"))
    assert isinstance(policy, PipelinePolicy)
    texts = [row["prompt"] for row in prompts.load("test")[:IMAGES]]
    policy.condition(texts)

    def uncached() -> object:
        policy._cache.clear()
        return policy.condition(texts)

    @torch.no_grad()
    def sample() -> torch.Tensor:
        x = torch.randn(IMAGES, *policy.latent_shape)
        return sampling.sample(conditioned(policy, policy.condition(texts)), x, policy.sigmas(10), method="euler")

    fresh, cached, sampled = alternate(uncached, lambda: policy.condition(texts), sample)
    return {"cached_over_anew": cached / fresh, "anew_over_sampling": fresh / sampled}


def scoring() -> dict[str, float]:
    """Time of scoring a batch with each reward over that of sampling it at T = 10."""
    policy = families.load(config.policy(model="shapes"))
    texts = [row["prompt"] for row in prompts.load("test")[:IMAGES]]
    x = torch.randn(IMAGES, *policy.latent_shape, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def sample() -> torch.Tensor:
        velocity = conditioned(policy, policy.condition(texts))
        return policy.decode(sampling.sample(velocity, x, policy.sigmas(10), method="euler"))

    images = sample()  # scored as copies: rewards keep the embedding of the last tensor
    names = ("composition", "alignment", "detail", "background", "census")
    models = [base.load(name) for name in names]
    calls = [lambda model=model: model(images.clone(), texts) for model in models]
    sampled, *scored = alternate(sample, *calls)
    return {name: seconds / sampled for name, seconds in zip(names, scored, strict=True)}


def main() -> None:
    """Measure the ratios, print them and write them to a file."""
    torch.set_num_threads(1)
    ratios = {f"T={steps} guidance={g:g}": sampling_ratio(steps, g) for steps in (10, 25) for g in (1.0, 4.0)}
    for name, ratio in ratios.items():
        print(f"{name}: our loop takes {ratio:.3f} times as long as diffusers' call")
    saved = conditioning()
    print(f"conditioning on cached prompts takes {saved['cached_over_anew']:.4f} of the time of encoding them")
    print(f"encoding {IMAGES} prompts takes {saved['anew_over_sampling']:.2f} of the time of sampling images at T = 10")
    costs = scoring()
    for name, ratio in costs.items():
        print(f"{name}: {ratio:.3f} of the time of sampling")
    artifact.write(
        RESULTS / "policy.json",
        "recast.benchmark.policy",
        {"ours_over_diffusers": ratios, "conditioning": saved, "rewards_over_sampling": costs},
    )


if __name__ == "__main__":
    main()
