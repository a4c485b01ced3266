"""The FLUX.1 policy against diffusers' own pipeline, on tiny checkpoints in the real format."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FluxPipeline, FluxTransformer2DModel
from family import ROUNDING, given, noise
from safetensors.torch import load_file
from test_memory import Peak

import tiny_flux
from recast import config
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.estimate import stage as estimate
from recast.flow import configurations, families, lora
from recast.flow.flux import DOUBLE, SINGLE, FluxPolicy
from recast.flow.generate import generate
from recast.progress import no_progress
from recast.propose import stage as propose
from recast.train import stage as train

ROOT = Path(__file__).parents[2]
PROMPTS = ["a red circle and a blue square", "a red circle", "a blue square and a red circle and a red square"]
TOKENS = 16
SCHNELL, DEV = (configurations.transformer(f"black-forest-labs/FLUX.1-{name}") for name in ("schnell", "dev"))
"""Their transformer/config.json."""


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux.folder(tmp_path_factory.mktemp("dev"))


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux.folder(tmp_path_factory.mktemp("schnell"), guidance_embeds=False)


def load(folder: Path, **more: Any) -> FluxPolicy:
    settings = {"resolution": 64, "max_sequence_length": TOKENS} | more
    found = families.load(config.policy(model=str(folder), **settings))
    assert isinstance(found, FluxPolicy)
    return found


@cache
def plain(folder: Path, dtype: torch.dtype = torch.float32) -> FluxPipeline:
    pipe = FluxPipeline.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pipe_images(pipe: Any, prompts: list[str], steps: int, guidance: float = 1.0, **more: Any) -> torch.Tensor:
    settings = {"height": 64, "width": 64, "max_sequence_length": TOKENS, "output_type": "pt"} | more
    generators = [torch.Generator().manual_seed(7 + k) for k in range(len(prompts))]
    found = pipe(prompts, num_inference_steps=steps, guidance_scale=guidance, generator=generators, **settings)
    return found.images


def test_the_tiny_folder_has_the_published_layout(dev: Path, schnell: Path) -> None:
    for folder, embedded in ((dev, True), (schnell, False)):
        index = json.loads((folder / "model_index.json").read_text())
        assert index["_class_name"] == "FluxPipeline"
        assert index["text_encoder"] == ["transformers", "CLIPTextModel"]
        assert index["text_encoder_2"] == ["transformers", "T5EncoderModel"]
        assert index["transformer"] == ["diffusers", "FluxTransformer2DModel"]
        assert index["vae"] == ["diffusers", "AutoencoderKL"]
        for part in ("transformer", "vae"):
            assert (folder / part / "diffusion_pytorch_model.safetensors").is_file()
        for part in ("text_encoder", "text_encoder_2"):
            assert (folder / part / "model.safetensors").is_file()
        assert load(folder).embedded is embedded


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_dev_gives_the_images_of_the_pipeline_to_the_last_bit(
    dev: Path, guidance: float, size: tuple[int, int]
) -> None:
    policy = load(dev, guidance=guidance, resolution=size)
    for count in (1, 3):
        ours = generate(policy, PROMPTS[:count], [7, 8, 9][:count], steps=4, method="euler")
        theirs = pipe_images(plain(dev), PROMPTS[:count], 4, guidance, height=size[0], width=size[1])
        assert theirs.shape == (count, 3, *size)
        assert theirs.std() > 0.01
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [(64, 64), (96, 64)])
def test_schnell_gives_the_images_of_the_pipeline_to_the_last_bit(schnell: Path, size: tuple[int, int]) -> None:
    ours = generate(load(schnell, resolution=size), PROMPTS, [7, 8, 9], steps=4, method="euler")
    # diffusers' example passes guidance 0: the network does not take it
    assert torch.equal(ours, pipe_images(plain(schnell), PROMPTS, 4, 0.0, height=size[0], width=size[1]))


def test_prompts_have_the_pipelines_512_tokens_by_default(dev: Path) -> None:
    policy = load(dev, max_sequence_length=None)
    condition = policy.condition(PROMPTS[:1])
    assert condition.tensors["embeds"].shape == (1, 512, 32)
    assert condition.tensors["pooled"].shape == (1, 16)
    ours = generate(policy, PROMPTS[:1], [7], steps=2, method="euler")
    assert torch.equal(ours, pipe_images(plain(dev), PROMPTS[:1], 2, max_sequence_length=512))


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_the_grid_is_the_pipelines(dev: Path, schnell: Path, size: tuple[int, int]) -> None:
    for folder in (dev, schnell):
        pipe, policy = plain(folder), load(folder, resolution=size)
        for steps in (1, 4, 7):
            pipe_images(pipe, PROMPTS[:1], steps, height=size[0], width=size[1], output_type="latent")
            assert policy.sigmas(steps) == pipe.scheduler.sigmas.flip(0).tolist()


def test_the_grid_of_dev_is_shifted_by_the_size_of_the_image(dev: Path, schnell: Path) -> None:
    # 1024²: 4096 tokens, where mu is max_shift; 256²: 256 tokens, where it is base_shift. s → e^μ s / (1 + (e^μ − 1) s)
    level = np.linspace(0, 1, 5)
    for side, mu in ((256, 0.5), (None, 1.15)):
        policy = load(dev, resolution=side)
        assert policy.image_size == (side or 1024, side or 1024)
        expected = math.exp(mu) * level / (1 + (math.exp(mu) - 1) * level)
        np.testing.assert_allclose(policy.sigmas(4), expected, atol=1e-6)
    np.testing.assert_allclose(load(schnell, resolution=1024).sigmas(4), level, atol=1e-6)


def test_a_scheduler_with_flow_sigmas_of_its_own(dev: Path) -> None:
    policy = load(dev)
    policy.pipe.scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )
    sigmas = policy.sigmas(5)
    pipe_images(policy.pipe, PROMPTS[:1], 5, output_type="latent")
    assert sigmas == policy.pipe.scheduler.sigmas.flip(0).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_network_is_given_what_the_pipeline_gives_it(dev: Path, dtype: str) -> None:
    """In bfloat16 the pipeline also rounds latents after every step, so that its images are not those of the policy."""
    policy = load(dev, guidance=3.5, dtype=dtype)
    pipe = FluxPipeline.from_pretrained(dev, dtype=getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    ours, theirs = given(policy.network), given(pipe.transformer)
    generate(policy, PROMPTS[:1], [7], steps=4, method="euler")
    pipe_images(pipe, PROMPTS[:1], 4, 3.5, output_type="latent")
    assert len(ours) == len(theirs) == 4
    for mine, their in zip(ours, theirs, strict=True):
        for name in ("timestep", "guidance", "encoder_hidden_states", "pooled_projections"):
            assert torch.equal(mine[name], their[name])
            assert mine[name].dtype == their[name].dtype
        for name in ("txt_ids", "img_ids"):
            assert torch.equal(mine[name].float(), their[name].float())
        assert mine["hidden_states"].shape == their["hidden_states"].shape == (1, 16, 64)
    assert all(mine["img_ids"] is ours[0]["img_ids"] for mine in ours)  # built once


def test_a_batch_with_one_prompt_each_and_one_sigma_each(dev: Path) -> None:
    policy = load(dev, guidance=2.0, resolution=(64, 96))
    condition = policy.condition(PROMPTS)
    x, sigma = noise(policy, 3), torch.tensor([0.9, 0.5, 0.1])
    with torch.no_grad():
        together = policy.velocity(x, sigma, condition)
        for k, level in enumerate(sigma.tolist()):
            alone = policy.velocity(x[k : k + 1], level, condition.rows([k]))
            torch.testing.assert_close(together[k : k + 1], alone, atol=ROUNDING, rtol=0)
        assert (together[:1] - policy.velocity(x[:1], 0.5, condition.rows([0]))).abs().max() > 10 * ROUNDING
    assert together.shape == x.shape == (3, 16, 8, 12)


def test_packing_by_hand(dev: Path) -> None:
    """A token is a square of 2 × 2 cells, channel by channel, and the velocity is unpacked likewise."""
    policy = load(dev, resolution=(64, 96))
    calls = given(policy.network)
    x = noise(policy, 2)
    policy.model = lambda **named: (policy.network(**named), (named["hidden_states"],))[1]
    with torch.no_grad():
        same = policy.velocity(x, 0.5, policy.condition(PROMPTS[:1]))
    packed = calls[0]["hidden_states"]
    assert packed.shape == (2, 4 * 6, 64)
    assert torch.equal(packed[1, 6 * 2 + 3], x[1, :, 4:6, 6:8].flatten())
    assert calls[0]["img_ids"][6 * 2 + 3].tolist() == [0, 2, 3]
    assert torch.equal(same, x)


def test_velocity_is_differentiable(dev: Path) -> None:
    policy = load(dev)
    x = noise(policy, 1).requires_grad_()
    policy.velocity(x, 0.5, policy.condition(PROMPTS[:1])).square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0


def test_guidance_is_an_input_of_dev_and_takes_one_evaluation(dev: Path) -> None:
    guided, one = load(dev, guidance=3.5), load(dev)
    x, condition = noise(one, 2), guided.condition(PROMPTS[:2])
    assert not guided.needs_empty
    assert not condition.empty
    assert guided.row_bytes == one.row_bytes
    calls = given(guided.network)
    with torch.no_grad():
        found = guided.velocity(x, 0.6, condition)
        plain_one = one.velocity(x, 0.6, one.condition(PROMPTS[:2]))
        again = guided.velocity(x, 0.6, replace(condition, guidance=1.0))
    assert [call["guidance"].tolist() for call in calls] == [[3.5, 3.5], [1.0, 1.0]]
    assert [len(call["hidden_states"]) for call in calls] == [2, 2]
    assert (found - plain_one).abs().max() > 1e-5
    assert torch.equal(again, plain_one)


def test_schnell_takes_no_guidance(schnell: Path) -> None:
    policy = load(schnell)
    calls = given(policy.network)
    with torch.no_grad():
        policy.velocity(noise(policy, 1), 0.6, policy.condition(PROMPTS[:1]))
    assert calls[0]["guidance"] is None
    words = "guidance 3.5 cannot be used with this FLUX model, .*: set policy.guidance and evaluate.guidance to 1"
    with pytest.raises(RecastError, match=words):
        load(schnell, guidance=3.5)


def test_wrong_sizes_and_lengths_are_refused(dev: Path) -> None:
    with pytest.raises(RecastError, match="max_sequence_length 600 is above 512, the limit of FLUX"):
        load(dev, max_sequence_length=600)
    with pytest.raises(RecastError, match="resolution 72 is not a multiple of 16"):
        load(dev, resolution=(64, 72))
    policy = load(dev, resolution=(64, 96))
    with pytest.raises(RecastError, match=r"images have the shape \(B, 3, 64, 96\), not \(1, 3, 96, 64\)"):
        policy.encode(torch.zeros(1, 3, 96, 64))


def test_encode_inverts_decode_as_far_as_the_vae_does(dev: Path) -> None:
    policy = load(dev, resolution=(64, 96), vae_batch=2)
    images = torch.rand(3, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    latents = policy.encode(images)
    vae = policy.pipe.vae
    with torch.no_grad():
        mean = vae.encode(images * 2 - 1).latent_dist.mean
        back = (vae.decode(mean).sample / 2 + 0.5).clamp(0, 1)
        x = noise(policy, 1)
        drawn = (vae.decode(x / 0.3611 + 0.1159).sample / 2 + 0.5).clamp(0, 1)
    assert latents.shape == (3, *policy.latent_shape) == (3, 16, 8, 12)
    torch.testing.assert_close(latents, (mean - 0.1159) * 0.3611, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.decode(latents), back, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.decode(x), drawn, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.encode(policy.decode(latents)), policy.encode(back), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(("dtype", "side"), [(torch.float32, 16), (torch.bfloat16, 8)])
def test_a_row_takes_what_the_memory_budget_reckons_with(dtype: torch.dtype, side: int) -> None:
    # A quarter of the width, and the proportion of text to image of 512² with 512 tokens; depth does not matter.
    image, text = side**2, side**2 // 2
    with torch.device("meta"):
        model = FluxTransformer2DModel(
            num_layers=1, num_single_layers=2, num_attention_heads=6, joint_attention_dim=1024, guidance_embeds=True
        )
    model = model.to_empty(device="cpu").to(dtype)
    for parameter in model.parameters():
        parameter.data.zero_()

    class Quarter:
        vectors, needs_empty, joint = FluxPolicy.vectors, False, True
        _dtype, image_tokens, text_tokens, width = dtype, image, text, 6 * 128

    inputs = {
        "hidden_states": torch.zeros(1, image, 64, dtype=dtype),
        "encoder_hidden_states": torch.zeros(1, text, 1024, dtype=dtype),
        "pooled_projections": torch.zeros(1, 768, dtype=dtype),
        "timestep": torch.zeros(1),
        "guidance": torch.zeros(1),
        "txt_ids": torch.zeros(text, 3),
        "img_ids": torch.zeros(image, 3),
    }
    with torch.no_grad(), Peak(model) as memory:
        model(**inputs)
    reckoned = FluxPolicy.row_bytes.fget(Quarter)  # type: ignore[attr-defined]
    assert 0.8 * reckoned < memory.peak + sum(tensor.nbytes for tensor in inputs.values()) < reckoned


def test_flux_on_the_meta_device() -> None:
    with torch.device("meta"):
        schnell = FluxTransformer2DModel(**SCHNELL)
        transformer = FluxTransformer2DModel(**DEV)
        assert sum(parameter.numel() for parameter in schnell.parameters()) == 11_891_178_560
        assert sum(parameter.numel() for parameter in transformer.parameters()) == 11_901_408_320
        adapters = lora.Adapters(transformer, FluxPolicy.targets)
    names = {name for name, module in transformer.named_modules() if hasattr(module, "lora_A")}
    expected = {f"transformer_blocks.{k}.attn.{part}" for k in range(19) for part in DOUBLE}
    assert names == expected | {f"single_transformer_blocks.{k}.attn.{part}" for k in range(38) for part in SINGLE}
    assert len(names) == 266
    trainable = sum(parameter.numel() for parameter in adapters.parameters)
    assert trainable == 266 * 32 * (3072 + 3072) == 52_297_728


def mini(folder: Path, tmp_path: Path, *more: str) -> config.Recipe:
    """The recipe of dev, for the tiny model."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[:2]))
    return config.load(
        ROOT / "recipes/flux/dev.yaml",
        [
            *(f"policy.model={folder}", "policy.dtype=float32", "policy.quantize=none", "policy.resolution=[64, 96]"),
            *(f"policy.max_sequence_length={TOKENS}", "policy.device=cpu", "rewards={jpeg: {}}"),
            *(f"prompts.source={tmp_path / 'prompts.txt'}", "prompts.count=2", "propose={source: policy}"),
            *(
                "estimate.samples=2",
                "estimate.noisings=1",
                "estimate.rollouts=4",
                "estimate.steps=3",
                "estimate.spacing=3",
            ),
            *(f"train.prompts={tmp_path / 'prompts.txt'}", "train.epochs=1", "train.prompts_per_epoch=2"),
            *("train.images_per_prompt=2", "train.batch=4", "train.steps=3", "train.precision=float32"),
            *("train.rank=4", "train.alpha=8", "train.trackers=[]", "train.preview_every=0", "train.micro_batch=4"),
            *("train.learning_rate=0.01", "weigh={method: static, budget: {jpeg: 1}}"),
            *more,
        ],
    )


def test_the_recipe_says_what_its_users_start_from() -> None:
    recipe = config.load(ROOT / "recipes/flux/dev.yaml")
    assert recipe.policy.model == "black-forest-labs/FLUX.1-dev"
    assert recipe.policy.guidance == recipe.evaluate.guidance == 3.5
    assert "Never run at size" in (ROOT / "recipes/flux/dev.yaml").read_text()


def test_gain_curves(dev: Path, tmp_path: Path) -> None:
    recipe = mini(dev, tmp_path)
    propose.propose(recipe, tmp_path / "run", no_progress)
    estimate.estimate(recipe, tmp_path / "run", no_progress)
    curves = GainCurves.load(tmp_path / "run/gains.json")
    assert curves.rewards == ("jpeg",)
    assert list(curves.sigmas) == pytest.approx(load(dev, resolution=(64, 96)).sigmas(3), abs=1e-6)
    assert curves.D.shape == (1, 4)
    assert np.isfinite(curves.D).all()
    assert np.ptp(curves.D) > 1e-4


def test_training_writes_an_adapter_that_plain_diffusers_loads(dev: Path, tmp_path: Path) -> None:
    train.train(mini(dev, tmp_path), tmp_path / "run")
    path = tmp_path / "run/lora"
    state = load_file(path / lora.FILE)
    assert len(state) == 2 * (2 * 8 + 2 * 3)
    assert all(tensor.abs().max() > 0 for tensor in state.values())  # B starts at 0, and all modules were trained
    policy = load(dev, guidance=3.5, lora=str(path), resolution=(64, 96))
    ours = generate(policy, PROMPTS, [7, 8, 9], steps=3, method="euler")
    before = pipe_images(plain(dev), PROMPTS, 3, 3.5, height=64, width=96)
    assert (ours - before).abs().max() > 1e-4
    pipe = FluxPipeline.from_pretrained(dev)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(path)
    assert torch.equal(ours, pipe_images(pipe, PROMPTS, 3, 3.5, height=64, width=96))
