"""What the tests of several families share: tolerances, noise, guidance, and a run through all stages."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recast import config
from recast.core.curves import GainCurves
from recast.estimate import stage as estimate
from recast.flow.pipeline import PipelinePolicy
from recast.progress import no_progress
from recast.propose import stage as propose
from recast.train import stage as train

DEPTH = 64
"""Matrix products and convolutions one after another, at most, in one transformer call or in the VAE."""
ROUNDING = DEPTH * math.sqrt(1024) * torch.finfo(torch.float32).eps
"""How far float32 results of order 1 may differ if batches differ: sums of up to 1024 terms in another order have
errors that grow as the root of their length, and DEPTH of them add up."""
RECIPE = """
policy: {{model: {model}, max_sequence_length: {length}, resolution: [64, 96]}}
prompts: {{source: {prompts}}}
propose: {{source: policy}}
rewards: {{jpeg: , "recast.rewards.examples:brightness": }}
estimate: {{steps: 3, samples: 2, noisings: 1, rollouts: 4, spacing: 3}}
weigh: {{method: static}}
train: {{prompts: {prompts}, epochs: 1, prompts_per_epoch: 2, images_per_prompt: 2, batch: 4, rank: 4, alpha: 8,
  learning_rate: 0.01, preview_every: 0, trackers: []}}
"""


def frozen(pipe: Any) -> Any:
    """The pipeline with parameters that require no gradients, as ours do.

    Else products of three-dimensional tensors are folded in another way, even where no gradients are computed, so that
    an image of a pipeline as diffusers loads it may differ in the last bits.
    """
    for part in (pipe.vae, pipe.transformer, pipe.text_encoder):
        part.requires_grad_(False)
    return pipe


def noise(policy: PipelinePolicy, count: int) -> torch.Tensor:
    """Latents."""
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(0))


def given(network: torch.nn.Module) -> list[dict[str, Any]]:
    """The arguments of every later call of a network."""
    calls: list[dict[str, Any]] = []
    network.register_forward_pre_hook(lambda _module, _args, named: calls.append(named), with_kwargs=True)
    return calls


def check_plain_guidance(guided: PipelinePolicy, plain: PipelinePolicy, prompt: str) -> None:
    """Guidance 3 is empty + 3 (prompted − empty)."""
    assert guided.needs_empty
    assert not plain.needs_empty
    x = noise(plain, 2)
    with torch.no_grad():
        prompted, empty = (plain.velocity(x, 0.6, plain.condition([text])) for text in (prompt, ""))
        found = guided.velocity(x, 0.6, guided.condition([prompt]))
    tolerance = (3 + 2) * ROUNDING  # guidance g multiplies the errors of the two by g and g − 1
    assert (prompted - empty).abs().max() > 10 * tolerance
    torch.testing.assert_close(found, empty + 3 * (prompted - empty), atol=tolerance, rtol=0)


def run_through(model: Path, folder: Path, prompts: list[str], length: int, least: float) -> GainCurves:
    """Proposals, curves of two rewards that vary by `least`, and one epoch of training; the adapter is in RUN/lora."""
    path = folder / "prompts.txt"
    path.write_text("\n".join(prompts) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, prompts=path, length=length))
    recipe, run = config.load(folder / "recipe.yaml"), folder / "run"
    propose.propose(recipe, run, no_progress)
    estimate.estimate(recipe, run, no_progress)
    curves = GainCurves.load(run / "gains.json")
    assert curves.D.shape == (2, 4)
    assert np.isfinite(curves.D).all()
    assert (np.ptp(curves.D, axis=1) > least).all()
    assert train.train(recipe, run) == 1
    return curves
