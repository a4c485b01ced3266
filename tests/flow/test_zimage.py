"""The Z-Image policy against diffusers' own pipeline, on tiny checkpoints in the real format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from family import ROUNDING, check_plain_guidance, frozen, run_through

import tiny_zimage
from recast import config
from recast.errors import RecastError
from recast.flow import configurations, families, lora, zimage
from recast.flow.generate import generate

ROOT = Path(__file__).parents[2]
PROMPT = "a red circle and a blue square"
LONG = " and ".join([PROMPT] * 4)
SEVERAL = [PROMPT, "a red circle", LONG]
LENGTH = 96


def pipe_images(
    pipe: Any, prompts: list[str], steps: int, guidance_scale: float = 0.0, size: tuple[int, int] = (64, 64)
) -> torch.Tensor:
    """One image per prompt with seeds 7, 8, …"""
    return pipe(
        list(prompts),  # which the pipeline replaces by its chat template
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        height=size[0],
        width=size[1],
        max_sequence_length=LENGTH,
        generator=[torch.Generator().manual_seed(7 + k) for k in range(len(prompts))],
        output_type="pt",
    ).images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_zimage.folder(tmp_path_factory.mktemp("zimage"))


def load(folder: Path, **settings: Any) -> zimage.ZImagePolicy:
    asked = {"resolution": 64, "max_sequence_length": LENGTH} | settings
    found = families.load(config.policy(model=str(folder), **asked))
    assert isinstance(found, zimage.ZImagePolicy)
    return found


def test_the_tiny_folder_has_the_published_layout(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "ZImagePipeline"
    assert index["scheduler"] == ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    assert index["text_encoder"] == ["transformers", "Qwen3Model"]
    assert index["transformer"] == ["diffusers", "ZImageTransformer2DModel"]
    assert index["vae"] == ["diffusers", "AutoencoderKL"]
    policy = load(folder, resolution=(64, 96))
    assert policy.latent_shape == (16, 8, 12)
    assert policy.image_tokens == 4 * 6
    assert policy.width == 32


@pytest.mark.parametrize(
    ("guidance", "prompts", "size"),
    [
        (1.0, [PROMPT], (64, 64)),
        (5.0, [PROMPT], (64, 96)),
        (1.0, SEVERAL, (64, 96)),
        (5.0, SEVERAL, (64, 64)),
    ],
)
def test_images_are_those_of_the_pipeline_to_the_last_bit(
    folder: Path, guidance: float, prompts: list[str], size: tuple[int, int]
) -> None:
    """Whose guidance_scale is ours less 1."""
    policy = load(folder, guidance=guidance, resolution=size)
    ours = generate(policy, prompts, [7, 8, 9][: len(prompts)], steps=4, method="euler")
    theirs = pipe_images(frozen(ZImagePipeline.from_pretrained(folder)), prompts, 4, guidance - 1, size)
    assert theirs.std() > 0.01
    assert torch.equal(ours, theirs)


def test_a_batch_of_prompts_of_different_length_is_what_each_gives_alone(folder: Path) -> None:
    policy = load(folder, guidance=2.0)
    condition = policy.condition(SEVERAL)
    assert condition.tensors["length"].tolist() == [8 + 7, 8 + 3, 8 + 4 * 7 + 3]  # the template's tokens, and the words
    assert condition.tensors["embeds"].shape == (3, 39, 16)
    x = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.5, 0.1])
    with torch.no_grad():
        together = policy.velocity(x, sigma, condition)
        others = policy.velocity(x, sigma, policy.condition([SEVERAL[1], SEVERAL[2], SEVERAL[0]]))
        for k, level in enumerate(sigma.tolist()):
            alone = policy.velocity(x[k : k + 1], level, policy.condition([SEVERAL[k]]))
            torch.testing.assert_close(together[k : k + 1], alone, atol=(2 + 1) * ROUNDING, rtol=0)
            assert (others[k] - together[k]).abs().max() > 10 * ROUNDING


@pytest.mark.parametrize("steps", [1, 5, 10])  # at 10, even levels in float32 and float64 differ
def test_the_grid_is_the_schedulers_own(folder: Path, steps: int) -> None:
    policy = load(folder, resolution=(64, 96))
    dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for scheduler in (policy.pipe.scheduler, dynamic):
        policy.pipe.scheduler = scheduler
        sigmas = policy.sigmas(steps)
        pipe_images(policy.pipe, [PROMPT], steps, size=(64, 96))
        assert sigmas == scheduler.sigmas.flip(0).tolist()
    assert policy.timesteps(4)["mu"] == pytest.approx(0.5 + (24 - 256) * 0.65 / 3840)


def test_guidance_is_the_pipelines_scale_plus_one(folder: Path) -> None:
    check_plain_guidance(load(folder, guidance=3.0), load(folder), PROMPT)


def test_the_network_sees_one_minus_sigma_and_gives_the_negative_velocity(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load(folder)
    asked: list[torch.Tensor] = []

    def network(x: list[torch.Tensor], t: torch.Tensor, texts: list[torch.Tensor], **_: Any) -> tuple[Any]:
        asked.append(t)
        return (x,)

    monkeypatch.setattr(policy, "model", network)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(policy.velocity(x, torch.tensor([0.25, 1.0]), policy.condition([PROMPT])), -x)
    assert asked.pop().tolist() == [0.75, 0.0]


def test_velocity_is_differentiable_with_checkpointing(folder: Path) -> None:
    policy = load(folder)
    policy.network.enable_gradient_checkpointing()
    policy.network.train()
    x = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    policy.velocity(x, 0.5, policy.condition(SEVERAL)).square().sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().amax((1, 2, 3)) > 0).all()


def test_encode_inverts_decode_as_far_as_the_vae_does(folder: Path) -> None:
    policy = load(folder, vae_batch=2, resolution=(64, 96))
    images = torch.rand(3, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    latents, vae = policy.encode(images), policy.pipe.vae
    with torch.no_grad():
        mean = vae.encoder(images * 2 - 1)[:, :16]
        back = (vae.decoder(mean) / 2 + 0.5).clamp(0, 1)
        again = (vae.encoder(back * 2 - 1)[:, :16] - 0.1159) * 0.3611
    torch.testing.assert_close(latents, (mean - 0.1159) * 0.3611, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.decode(latents), back, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.encode(policy.decode(latents)), again, atol=ROUNDING, rtol=0)
    with pytest.raises(RecastError, match=r"images have the shape \(B, 3, 64, 96\), not \(1, 3, 96, 64\)"):
        policy.encode(torch.zeros(1, 3, 96, 64))


def test_what_the_model_has_no_positions_for_is_refused(folder: Path) -> None:
    with pytest.raises(RecastError, match="the resolution 72 is not a multiple of 16"):
        load(folder, resolution=(64, 72))
    with pytest.raises(RecastError, match="the resolution 144 is above 128, the largest for which"):
        load(folder, resolution=(64, 144))
    with pytest.raises(RecastError, match="max_sequence_length = 225 is above 224, the most text tokens"):
        load(folder, max_sequence_length=225)
    longest = load(folder, max_sequence_length=224)
    x = torch.zeros(1, *longest.latent_shape)
    words = longest.condition([" ".join(["a"] * 300)])
    assert words.tensors["length"].tolist() == [224]
    assert longest.velocity(x, 0.5, words).isfinite().all()


def test_the_default_resolution_is_the_pipelines() -> None:
    made = tiny_zimage.pipeline()
    made.transformer.register_to_config(axes_lens=[1536, 512, 512])
    policy = zimage.ZImagePolicy(made)
    assert policy.image_size == (1024, 1024)
    assert policy.max_sequence_length == 512


def test_z_image_on_the_meta_device() -> None:
    """The transformer/config.json of Tongyi-MAI/Z-Image-Turbo: the defaults of diffusers, and longer texts."""
    with torch.device("meta"):
        transformer = ZImageTransformer2DModel(**configurations.transformer("Tongyi-MAI/Z-Image-Turbo"))
        assert (transformer.dim, len(transformer.layers), transformer.config.cap_feat_dim) == (3840, 30, 2560)
        assert sum(parameter.numel() for parameter in transformer.parameters()) == 6_154_908_736
        adapters = lora.Adapters(transformer, zimage.ZImagePolicy.targets)
    names = {name for name, module in transformer.named_modules() if hasattr(module, "lora_A")}
    assert names == {f"layers.{k}.attention.{each}" for k in range(30) for each in zimage.PROJECTIONS}
    assert sum(parameter.numel() for parameter in adapters.parameters) == 120 * 32 * (3840 + 3840) == 29_491_200


def test_curves_training_and_plain_diffusers(folder: Path, tmp_path: Path) -> None:
    run_through(folder, tmp_path, ["a red circle", LONG], LENGTH, 0.001)
    run = tmp_path / "run"
    base, trained = load(folder), load(folder, lora=str(run / "lora"))
    ours = generate(trained, SEVERAL, [7, 8, 9], steps=4, method="euler")
    assert (ours - generate(base, SEVERAL, [7, 8, 9], steps=4, method="euler")).abs().max() > 1e-3
    pipe = ZImagePipeline.from_pretrained(folder)
    pipe.load_lora_weights(run / "lora")
    assert torch.equal(ours, pipe_images(frozen(pipe), SEVERAL, 4))


def test_the_recipe_loads() -> None:
    paths = list((ROOT / "recipes/zimage").glob("*.yaml"))
    assert paths
    for path in paths:
        assert config.load(path).policy.model.startswith("Tongyi-MAI/Z-Image")
        assert "never run at size" in path.read_text().splitlines()[0]
