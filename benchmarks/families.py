"""Time of our sampling loop compared with the pipeline call of every model family, on tiny models.

    python benchmarks/families.py

The models have random weights in the real classes of diffusers (tests/tiny*.py). Four images of one prompt at T = 10,
with one thread, without and with guidance where the family has it; conditioning, decoding and 64 × 64 pixels included.
The calls alternate in one run, and only ratios are reported: the images must be the same to the last bit. The results
are written to results/families.json next to this file.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from policy import RESULTS, alternate
from recast import config
from recast.core import artifact
from recast.flow import families, sampling
from recast.flow.pipeline import PipelinePolicy
from recast.flow.policy import conditioned

IMAGES, STEPS, ROUNDS, SIDE, TOKENS = 4, 10, 21, 64, 128
PROMPT = "a red circle and a blue square"
SANA = {"complex_human_instruction": None, "use_resolution_binning": False, "clean_caption": False}
MODELS: dict[str, tuple[str, tuple[float, ...], Callable[[float], dict[str, Any]]]] = {
    "Stable Diffusion 3": ("tiny", (1.0, 4.0), lambda g: {"guidance_scale": g}),
    "FLUX.1": ("tiny_flux", (3.5,), lambda g: {"guidance_scale": g}),
    "FLUX.2 klein": ("tiny_flux2", (1.0, 4.0), lambda g: {"guidance_scale": g}),
    "Qwen-Image": (
        "tiny_qwen",
        (1.0, 4.0),
        lambda g: {"true_cfg_scale": g, "negative_prompt": "" if g > 1 else None},
    ),
    "SANA": ("tiny_sana", (1.0, 4.5), lambda g: {"guidance_scale": g} | SANA),
    "Z-Image": ("tiny_zimage", (1.0, 5.0), lambda g: {"guidance_scale": g - 1}),
}
"""Per family: the module of its tiny model, values of guidance, and how the pipeline's call takes one."""


def ratio(folder: Path, guidance: float, arguments: dict[str, Any]) -> float:
    """Time of our loop over that of the pipeline's call for the same images."""
    policy = families.load(
        config.policy(
            model=str(folder), guidance=guidance, resolution=SIDE, vae_batch=IMAGES, max_sequence_length=TOKENS
        )
    )
    assert isinstance(policy, PipelinePolicy)

    @torch.no_grad()
    def ours() -> torch.Tensor:
        policy._cache.clear()  # the pipeline encodes the prompt in every call
        x = torch.randn(IMAGES, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
        velocity = conditioned(policy, policy.condition([PROMPT]))
        return policy.decode(sampling.sample(velocity, x, policy.sigmas(STEPS), method="euler"))

    def theirs() -> torch.Tensor:
        images: torch.Tensor = policy.pipe(
            prompt=PROMPT,
            num_images_per_prompt=IMAGES,
            num_inference_steps=STEPS,
            height=SIDE,
            width=SIDE,
            max_sequence_length=policy.max_sequence_length,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
            **arguments,
        ).images
        return images

    if not torch.equal(ours(), theirs()):
        raise SystemExit(f"{folder}: the images differ: the times would not compare the same work")
    mine, pipeline = alternate(ours, theirs, rounds=ROUNDS)
    return mine / pipeline


def main() -> None:
    """Measure the ratios, print them and write them to a file."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    found: dict[str, float] = {}
    euler = {"scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)}  # the usual one of SANA is of second order
    for name, (module, guidances, arguments) in MODELS.items():
        tiny = importlib.import_module(module)
        with tempfile.TemporaryDirectory() as place:
            folder = tiny.folder(Path(place) / "model", **(euler if name == "SANA" else {}))
            for guidance in guidances:
                found[f"{name}, guidance {guidance:g}"] = value = ratio(folder, guidance, arguments(guidance))
                print(f"{name}, guidance {guidance:g}: our loop takes {value:.3f} times as long as the pipeline's call")
    artifact.write(RESULTS / "families.json", "recast.benchmark.families", {"ours_over_diffusers": found})


if __name__ == "__main__":
    main()
