"""The SANA policy against diffusers' own pipeline, on tiny checkpoints in the real format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from family import ROUNDING, check_plain_guidance, frozen, run_through

import tiny_sana
from recast import config
from recast.errors import RecastError
from recast.flow import configurations, families, lora, sana
from recast.flow.generate import generate

ROOT = Path(__file__).parents[2]
PROMPT = "a red circle and a blue square"
SEVERAL = [PROMPT, "a red circle", "A Blue Square"]
EPS = torch.finfo(torch.float32).eps


def pipe_images(
    pipe: Any,
    prompts: list[str],
    steps: int,
    guidance: float = 1.0,
    size: tuple[int, int] = (64, 64),
    length: int = 300,
) -> torch.Tensor:
    """One image per prompt with seeds 7, 8, …, as the policy's settings ask for them."""
    return pipe(
        list(prompts),
        num_inference_steps=steps,
        guidance_scale=guidance,
        height=size[0],
        width=size[1],
        max_sequence_length=length,
        generator=[torch.Generator().manual_seed(7 + k) for k in range(len(prompts))],
        output_type="pt",
        complex_human_instruction=None,
        use_resolution_binning=False,
        clean_caption=False,
    ).images


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SANA with its usual scheduler."""
    return tiny_sana.folder(tmp_path_factory.mktemp("sana"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SANA with the scheduler whose steps ours repeat to the last bit."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return tiny_sana.folder(tmp_path_factory.mktemp("sana_euler"), scheduler=scheduler)


def load(folder: Path, **settings: Any) -> sana.SanaPolicy:
    found = families.load(config.policy(model=str(folder), **settings))
    assert isinstance(found, sana.SanaPolicy)
    return found


def test_the_tiny_folder_has_the_published_layout(usual: Path) -> None:
    index = json.loads((usual / "model_index.json").read_text())
    assert index["_class_name"] == "SanaPipeline"
    assert index["scheduler"] == ["diffusers", "DPMSolverMultistepScheduler"]
    assert index["text_encoder"] == ["transformers", "Gemma2Model"]
    assert index["transformer"] == ["diffusers", "SanaTransformer2DModel"]
    assert index["vae"] == ["diffusers", "AutoencoderDC"]
    policy = load(usual)
    assert policy.latent_shape == (8, 2, 2)
    assert policy.image_tokens == 4  # a token is a latent cell
    assert policy.max_sequence_length == 300


@pytest.mark.parametrize(
    ("guidance", "prompts", "size"),
    [
        (1.0, [PROMPT], (64, 64)),
        (4.5, [PROMPT], (64, 96)),
        (1.0, SEVERAL, (64, 96)),
        (4.5, SEVERAL, (64, 64)),
    ],
)
def test_images_are_those_of_the_pipeline_to_the_last_bit(
    folder: Path, guidance: float, prompts: list[str], size: tuple[int, int]
) -> None:
    policy = load(folder, guidance=guidance, resolution=size)
    ours = generate(policy, prompts, [7, 8, 9][: len(prompts)], steps=4, method="euler")
    theirs = pipe_images(frozen(SanaPipeline.from_pretrained(folder)), prompts, 4, guidance, size)
    assert theirs.std() > 0.01
    assert torch.equal(ours, theirs)


def test_a_pipeline_that_is_not_frozen_differs_by_rounding(folder: Path) -> None:
    ours = generate(load(folder), SEVERAL, [7, 8, 9], steps=4, method="euler")
    theirs = pipe_images(SanaPipeline.from_pretrained(folder), SEVERAL, 4)
    torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(("guidance", "steps"), [(1.0, 4), (4.5, 20)])
def test_the_usual_scheduler_gives_the_images_of_our_second_order_sampler(
    usual: Path, guidance: float, steps: int
) -> None:
    policy = load(usual, guidance=guidance)
    ours = generate(policy, SEVERAL, [7, 8, 9], steps=steps, method="dpm2")
    theirs = pipe_images(policy.pipe, SEVERAL, steps, guidance)
    # diffusers has the coefficients of a step from float32 logarithms of up to 8, we from float64: they differ by 16 ε
    # at most, and the steps' errors add up. Euler's images, on the same grid, differ by 0.03 or more.
    torch.testing.assert_close(ours, theirs, atol=steps * 16 * EPS, rtol=0)
    assert (generate(policy, SEVERAL, [7, 8, 9], steps=steps, method="euler") - theirs).abs().max() > 0.03


@pytest.mark.parametrize("steps", [1, 5])
def test_the_grid_is_the_schedulers_own(folder: Path, usual: Path, steps: int) -> None:
    for path, highest in ((folder, 1.0), (usual, 2.997 / 2.998)):
        policy = load(path)
        pipe_images(policy.pipe, [PROMPT], steps)
        sigmas = policy.sigmas(steps)
        assert sigmas == policy.pipe.scheduler.sigmas.flip(0).tolist()
        assert len(sigmas) == steps + 1
        assert sigmas[-1] == pytest.approx(highest, abs=EPS)


@pytest.mark.parametrize("shift", [3.0, 6.0])  # of SANA up to 2K, and at 4K
def test_timesteps_are_those_of_the_usual_scheduler(usual: Path, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(usual)
    asked: list[torch.Tensor] = []

    def network(hidden_states: torch.Tensor, timestep: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        asked.append(timestep)
        return (hidden_states,)

    monkeypatch.setattr(policy, "model", network)
    policy.pipe.scheduler.register_to_config(flow_shift=shift)
    condition = policy.condition([PROMPT])
    for steps in (1, 10, 20, 40, 100):
        scheduler = DPMSolverMultistepScheduler.from_config(policy.pipe.scheduler.config)
        scheduler.set_timesteps(steps)
        level = scheduler.sigmas[:-1]
        policy.velocity(torch.zeros(steps, *policy.latent_shape), level, condition)
        assert torch.equal(asked.pop(), scheduler.timesteps.float())
    policy.pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    policy.velocity(torch.zeros(1, *policy.latent_shape), 0.2505, condition)
    assert asked.pop().item() == 250.5
    policy.network.register_to_config(timestep_scale=0.001)
    policy.velocity(torch.zeros(1, *policy.latent_shape), 0.5, condition)
    assert asked.pop().item() == pytest.approx(0.5, abs=EPS)


def test_a_scheduler_that_is_not_of_a_flow_is_refused(usual: Path) -> None:
    policy = load(usual)
    right = policy.pipe.scheduler.config
    for wrong in ({"use_flow_sigmas": False}, {"prediction_type": "epsilon"}, {"final_sigmas_type": "sigma_min"}):
        policy.pipe.scheduler = DPMSolverMultistepScheduler.from_config({**right, **wrong})
        with pytest.raises(RecastError, match="DPMSolverMultistepScheduler of this model does not follow a flow to 0"):
            policy.sigmas(4)


def test_the_human_instruction_is_off_and_the_length_is_the_pipelines(folder: Path) -> None:
    policy = load(folder, max_sequence_length=12)
    found = policy.condition(SEVERAL).tensors
    assert found["embeds"].shape == (3, 12, 16)
    assert found["mask"].sum(1).tolist() == [1 + 7, 1 + 3, 1 + 3]  # <bos> and one token per word
    embeds, mask, _, _ = policy.pipe.encode_prompt(SEVERAL[2].lower(), False, max_sequence_length=12)
    assert torch.equal(found["embeds"][2:], embeds)
    assert torch.equal(found["mask"][2:], mask)
    ours = generate(policy, SEVERAL, [7, 8, 9], steps=2, method="euler")
    assert torch.equal(ours, pipe_images(policy.pipe, SEVERAL, 2, length=12))
    instructed, _, _, _ = policy.pipe.encode_prompt(
        PROMPT, False, max_sequence_length=12, complex_human_instruction=["a red square and"]
    )
    assert (instructed - found["embeds"][:1]).abs().max() > 0.1


def test_padding_has_no_influence(folder: Path) -> None:
    short, long = load(folder, max_sequence_length=8), load(folder, max_sequence_length=64)
    x = torch.randn(1, *short.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = [policy.velocity(x, 0.5, policy.condition([PROMPT])) for policy in (short, long)]
    torch.testing.assert_close(found[0], found[1], atol=ROUNDING, rtol=0)


def test_guidance_is_the_plain_formula(folder: Path) -> None:
    check_plain_guidance(load(folder, guidance=3.0), load(folder), PROMPT)


def test_learned_variances_are_left_out() -> None:
    transformer = SanaTransformer2DModel(
        **(dict(tiny_sana.pipeline().transformer.config) | {"out_channels": 16, "num_layers": 1})
    )
    policy = sana.SanaPolicy(tiny_sana.pipeline(transformer=transformer))
    x = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    assert policy.velocity(x, 0.5, policy.condition([PROMPT])).shape == x.shape


def test_encode_inverts_decode_as_far_as_the_autoencoder_does(folder: Path) -> None:
    policy = load(folder, vae_batch=2, resolution=(64, 96))
    images = torch.rand(3, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    latents, vae = policy.encode(images), policy.pipe.vae
    assert latents.shape == (3, 8, 2, 3)
    with torch.no_grad():
        plain = vae.encoder(images * 2 - 1)
        back = (vae.decoder(plain) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(latents, plain * 0.41407, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.decode(latents), back, atol=ROUNDING, rtol=0)
    with torch.no_grad():
        again = vae.encoder(back * 2 - 1) * 0.41407
    torch.testing.assert_close(policy.encode(policy.decode(latents)), again, atol=ROUNDING, rtol=0)
    with pytest.raises(RecastError, match=r"images have the shape \(B, 3, 64, 96\), not \(1, 3, 96, 64\)"):
        policy.encode(torch.zeros(1, 3, 96, 64))
    with pytest.raises(RecastError, match="the resolution 80 is not a multiple of 32"):
        load(folder, resolution=(64, 80))


def test_sana_1600m_on_the_meta_device() -> None:
    """The numbers are those of Sana_1600M_1024px in diffusers' scripts/convert_sana_to_diffusers.py."""
    with torch.device("meta"):
        name = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
        transformer = SanaTransformer2DModel(**configurations.transformer(name))
        assert sum(parameter.numel() for parameter in transformer.parameters()) == 1_604_462_752
        adapters = lora.Adapters(transformer, sana.SanaPolicy.targets)
    names = {name for name, module in transformer.named_modules() if hasattr(module, "lora_A")}
    attentions = [f"transformer_blocks.{k}.{part}" for k in range(20) for part in ("attn1", "attn2")]
    assert names == {f"{attention}.{each}" for attention in attentions for each in sana.PROJECTIONS}
    assert sum(parameter.numel() for parameter in adapters.parameters) == 160 * 32 * (2240 + 2240) == 22_937_600


@pytest.mark.parametrize(
    ("layers", "heads", "norm", "parameters"),
    [(28, (36, 16), None, 591_747_872), (60, (70, 20), "rms_norm_across_heads", 4_721_825_952)],
)
def test_other_published_sizes(layers: int, heads: tuple[int, int], norm: str | None, parameters: int) -> None:
    """Sana_600M_1024px and SANA1.5_4.8B_1024px, from the same script; blocks are all of one size."""
    width = 32 * heads[0]
    settings = {"num_attention_heads": heads[0], "num_cross_attention_heads": heads[1], "cross_attention_dim": width}
    with torch.device("meta"):
        sizes = []
        for count in (1, 2):
            made = SanaTransformer2DModel(
                **settings, cross_attention_head_dim=width // heads[1], num_layers=count, qk_norm=norm
            )
            sizes.append(sum(parameter.numel() for parameter in made.parameters()))
    assert sizes[0] + (layers - 1) * (sizes[1] - sizes[0]) == parameters


def test_curves_training_and_plain_diffusers(usual: Path, folder: Path, tmp_path: Path) -> None:
    curves = run_through(usual, tmp_path, ["a red circle", "a blue square and a red square"], 16, 0.01)
    assert curves.sigmas[-1] == pytest.approx(2.997 / 2.998, abs=EPS)
    run = tmp_path / "run"
    settings = {"model": str(folder), "max_sequence_length": 16}
    base, trained = (families.load(config.policy(**settings, **more)) for more in ({}, {"lora": str(run / "lora")}))
    ours = generate(trained, SEVERAL, [7, 8, 9], steps=4, method="euler")
    assert (ours - generate(base, SEVERAL, [7, 8, 9], steps=4, method="euler")).abs().max() > 1e-3
    pipe = SanaPipeline.from_pretrained(folder)
    pipe.load_lora_weights(run / "lora")
    assert torch.equal(ours, pipe_images(frozen(pipe), SEVERAL, 4, length=16))


def test_the_recipe_loads() -> None:
    paths = list((ROOT / "recipes/sana").glob("*.yaml"))
    assert paths
    for path in paths:
        assert config.load(path).policy.model.startswith("Efficient-Large-Model/Sana")
        assert "never run at size" in path.read_text().splitlines()[0]
