"""The stages of SD3.5-Medium on a GPU that is not there: estimation, and training as the paper's recipe sets it up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor

import real_size
from fake_gpu import DEVICE, FakeGpu
from recast.config import TrainConfig
from recast.estimate import rollout as estimate
from recast.flow import lora, sd3
from recast.flow.generate import TILE, batched
from recast.flow.policy import conditioned
from recast.rewards import base
from recast.train import gradients
from recast.train.sketch import Sketch
from recast.train.trainer import Trainer
from recast.weigh import static

PROMPTS = ["a red circle", "a blue square"]
STEPS = 2


def a_policy() -> sd3.SD3Policy:
    """Of the paper's training: 512 pixels, no guidance, 128 tokens of T5."""
    pipe = real_size.sd35_medium(DEVICE, layers=2)
    return sd3.SD3Policy(pipe, device=DEVICE, resolution=512, max_sequence_length=128)


@pytest.mark.parametrize("estimator", estimate.ESTIMATORS)
def test_an_estimator_reads_nothing_but_scores(gpu: FakeGpu, estimator: Any) -> None:
    policy = a_policy()
    clean = policy.encode(torch.rand(2, 3, 512, 512))
    velocity = batched(conditioned(policy, policy.condition(PROMPTS[:1])), TILE)
    options = {"levels": [0.3, 0.6], "noisings": 2} if estimator == "coupled" else {"repeats": 2}
    drawn, wide = gpu.draws, gpu.wide
    gpu.reads.clear()
    made = estimate.sample(velocity, clean, policy.sigmas(STEPS), estimator=estimator, **options)
    assert made.ends.shape == (STEPS, 4, *policy.latent_shape)
    assert made.ends.device == policy.device
    assert not gpu.reads
    scored = made.score(lambda x: policy.decode(x[:1]).mean().expand(1, len(x)))
    assert scored.scores.shape == (1, STEPS + 1, *((4, 1) if estimator == "coupled" else (2, 2)))
    assert gpu.reads == {"copy": 2}  # of the ends and of the proposals
    assert (gpu.draws, gpu.wide) == (drawn, wide)


@pytest.fixture
def accelerator(gpu: FakeGpu) -> Iterator[Any]:
    """Accelerate with autocast in bfloat16; it does not look for this device by itself."""
    AcceleratorState._reset_state(True)
    made = Accelerator(cpu=True, mixed_precision="bf16")
    PartialState().device = made.state.device = torch.device(DEVICE)
    yield made
    AcceleratorState._reset_state(True)


def mean(images: Tensor, prompts: list[str], metadata: object = None) -> Any:
    """A reward of one read per batch."""
    return images.float().mean((1, 2, 3)).cpu().double().numpy()


def a_trainer(accelerator: Any, **settings: Any) -> Trainer:
    policy = a_policy()
    adapters = lora.Adapters(policy.network, policy.targets)
    train = TrainConfig(**{"epochs": 4, "precision": "bfloat16", "images_per_prompt": 2, "trackers": []} | settings)
    rewards: dict[str, base.Reward] = {"one": mean, "two": mean}
    weights = static(dict.fromkeys(rewards, 1.0), policy.sigmas(STEPS))
    return Trainer(train, policy, adapters, weights, rewards, [{"prompt": each} for each in PROMPTS], accelerator)


def reads_of(batches: int, updates: int) -> dict[str, int]:
    """What an epoch may read: per sampled batch, the range of its pixels and two rewards; per optimizer step, whether
    losses and gradients are finite, in this process and in any, the losses and the norm; per epoch, whether sampling
    failed, the rewards of all images with their numbers, and which passes the first optimizer step needs.
    """
    return {"tolist": batches + 1, "copy": 2 * batches + 3 * updates + 2, "item": 3 * updates + 1}


@pytest.mark.parametrize(
    ("settings", "batches", "updates"),
    [
        ({"prompts_per_epoch": 2, "batch": 2, "micro_batch": 4, "sample_batch": 4}, 1, 2),
        # Two micro-batches in an optimizer step read as much as one.
        ({"prompts_per_epoch": 1, "batch": 2, "micro_batch": 2, "sample_batch": 1, "checkpointing": True}, 2, 1),
    ],
)
def test_an_epoch(gpu: FakeGpu, accelerator: Any, settings: dict[str, Any], batches: int, updates: int) -> None:
    trainer = a_trainer(accelerator, **settings)
    trainer.policy.condition(PROMPTS)  # cached
    drawn = gpu.draws
    gpu.reads.clear()
    found = trainer.epoch()
    assert gpu.reads == reads_of(batches, updates)
    assert gpu.draws == drawn  # all noise is drawn on the CPU
    assert (found["epoch"], found["step"]) == (1, updates)
    state = trainer.optimizer.state_dict()["state"]
    kept = [*trainer.adapters.parameters, *trainer.adapters.old_parameters, *trainer.ema.shadow_params]
    kept += [each[name] for each in state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {(each.device, each.dtype) for each in kept} == {(torch.device(DEVICE), torch.float32)}


def test_a_checkpoint_is_written_and_read_and_gradients_are_measured(
    gpu: FakeGpu, accelerator: Any, tmp_path: Path
) -> None:
    trainer = a_trainer(accelerator, prompts_per_epoch=2, batch=4, micro_batch=8, sample_batch=4)
    trainer.epoch()
    path = trainer.save(tmp_path, {}, keep=1)
    assert {each.name for each in path.iterdir()} >= {"default", "old", "ema", "optimizer.safetensors", "state.json"}
    trainer.load(path, {})
    with trainer.averaged():
        assert {each.device for each in trainer.adapters.parameters} == {torch.device(DEVICE)}
    for state in trainer.optimizer.state_dict()["state"].values():
        assert state["exp_avg"].device == torch.device(DEVICE)
    data, _ = trainer._rollout(1, lambda *_: None)
    reduce = Sketch(sum(each.numel() for each in trainer.adapters.parameters), 64, DEVICE)
    gpu.reads.clear()
    found = gradients._gradients(trainer, data, range(4), [1, 2, 3, 4], torch.rand(4, 2), 1, reduce)
    assert (found.shape, found.device.type) == ((2, 64), "cpu")
    assert gpu.reads == {"copy": 1}
    assert np.isfinite(found.numpy()).all()
