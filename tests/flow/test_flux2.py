"""The FLUX.2 klein policy against diffusers' own pipeline, on tiny checkpoints in the real format."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from family import ROUNDING, given, noise
from safetensors.torch import load_file
from test_memory import Peak

import tiny_flux2
from recast import config
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.estimate import stage as estimate
from recast.flow import configurations, families, lora
from recast.flow.flux2 import DOUBLE, SINGLE, Flux2KleinPolicy
from recast.flow.generate import generate
from recast.progress import no_progress
from recast.propose import stage as propose
from recast.train import stage as train

RECIPE = Path(__file__).parents[2] / "recipes/flux2/klein.yaml"
PROMPTS = ["a red circle and a blue square", "a red circle", "a blue square and a red circle and a red square"]
SEEDS = [7, 8, 9]
SIZE = (64, 96)
TOKENS = 64
"""Enough for the chat template, byte by byte, and the first words of a prompt."""
KLEIN = {size: configurations.transformer(f"black-forest-labs/FLUX.2-klein-{size}") for size in ("4B", "9B")}
"""What transformer/config.json of FLUX.2-klein-4B and -9B changes in the defaults of the class,
by diffusers' scripts/convert_flux2_to_diffusers.py, which wrote them; the base models have the same."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux2.folder(tmp_path_factory.mktemp("klein"))


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux2.folder(tmp_path_factory.mktemp("distilled"), is_distilled=True)


def load(folder: Path, **more: Any) -> Flux2KleinPolicy:
    settings = {"resolution": SIZE, "max_sequence_length": TOKENS} | more
    found = families.load(config.policy(model=str(folder), **settings))
    assert isinstance(found, Flux2KleinPolicy)
    return found


shared = cache(load)
"""The same for tests that leave it as it is."""


def new_pipe(folder: Path, dtype: torch.dtype = torch.float32) -> Flux2KleinPipeline:
    pipe = Flux2KleinPipeline.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


plain = cache(new_pipe)


def pipe_images(pipe: Any, prompts: list[str], steps: int, guidance: float = 1.0, **more: Any) -> torch.Tensor:
    settings = {"height": SIZE[0], "width": SIZE[1], "max_sequence_length": TOKENS, "output_type": "pt"} | more
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS[: len(prompts)]]
    return pipe(
        prompt=prompts, num_inference_steps=steps, guidance_scale=guidance, generator=generators, **settings
    ).images


def test_the_tiny_folder_has_the_published_layout(folder: Path, distilled: Path) -> None:
    for path, few in ((folder, False), (distilled, True)):
        index = json.loads((path / "model_index.json").read_text())
        assert index["_class_name"] == "Flux2KleinPipeline"
        assert index["is_distilled"] is few
        assert index["text_encoder"] == ["transformers", "Qwen3ForCausalLM"]
        assert index["tokenizer"][1].startswith("Qwen2Tokenizer")
        assert index["transformer"] == ["diffusers", "Flux2Transformer2DModel"]
        assert index["vae"] == ["diffusers", "AutoencoderKLFlux2"]
    for part in ("transformer", "vae"):
        assert (folder / part / "diffusion_pytorch_model.safetensors").is_file()
    assert (folder / "text_encoder/model.safetensors").is_file()
    assert (folder / "tokenizer/chat_template.jinja").is_file()


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize(("count", "size"), [(1, (64, 64)), (3, SIZE)])
def test_images_are_those_of_the_pipeline_to_the_last_bit(
    folder: Path, guidance: float, count: int, size: tuple[int, int]
) -> None:
    policy = shared(folder, guidance=guidance, resolution=size)
    ours = generate(policy, PROMPTS[:count], SEEDS[:count], steps=4, method="euler")
    theirs = pipe_images(plain(folder), PROMPTS[:count], 4, guidance, height=size[0], width=size[1])
    assert theirs.shape == (count, 3, *size)
    assert theirs.std() > 0.01
    assert torch.equal(ours, theirs)


def test_a_distilled_model_gives_the_images_of_its_pipeline_to_the_last_bit(distilled: Path) -> None:
    ours = generate(shared(distilled), PROMPTS[:2], SEEDS[:2], steps=4, method="euler")
    theirs = pipe_images(plain(distilled), PROMPTS[:2], 4, 4.0)  # its pipeline ignores guidance
    assert torch.equal(ours, theirs)


def test_prompts_have_the_pipelines_512_tokens_by_default(folder: Path) -> None:
    policy = shared(folder, max_sequence_length=None)
    embeds = policy.condition(PROMPTS[:1]).tensors["embeds"]
    assert embeds.shape == (1, 512, 3 * 16)
    assert torch.equal(embeds[0, :TOKENS], shared(folder).condition(PROMPTS[:1]).tensors["embeds"][0])
    ours = generate(policy, PROMPTS[:1], SEEDS[:1], steps=2, method="euler")
    assert torch.equal(ours, pipe_images(plain(folder), PROMPTS[:1], 2, max_sequence_length=512))
    assert not torch.equal(ours, generate(shared(folder), PROMPTS[:1], SEEDS[:1], steps=2, method="euler"))


def test_a_prompt_is_layers_9_18_and_27_of_its_chat_turn(folder: Path) -> None:
    policy = shared(folder)
    turn = f"<|im_start|>user\n{PROMPTS[1]}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tokens = policy.pipe.tokenizer(turn, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = policy.pipe.text_encoder(tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in (9, 18, 27)], dim=1)
    found = policy.condition(PROMPTS[1:2]).tensors["embeds"][0]
    assert 20 < tokens.shape[1] < TOKENS
    largest = expected.abs().max().item()
    torch.testing.assert_close(found[: tokens.shape[1]], expected, atol=largest * ROUNDING, rtol=0)
    assert found[tokens.shape[1] :].abs().min(1).values.max() > 0  # the padding is encoded, not zero


@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize("size", [(64, 64), SIZE])
def test_the_grid_is_the_pipelines(folder: Path, steps: int, size: tuple[int, int]) -> None:
    pipe = plain(folder)
    sigmas = shared(folder, resolution=size).sigmas(steps)
    pipe_images(pipe, PROMPTS[:1], steps, height=size[0], width=size[1], output_type="latent")
    assert sigmas == pipe.scheduler.sigmas.flip(0).tolist()


def test_the_grid_is_shifted_by_the_size_of_the_image_and_the_number_of_steps(folder: Path) -> None:
    # At 1024², 4096 tokens, the pipeline's mu is linear in the steps from 2.2562 at 10 to 1.1500 at 200.
    policy = shared(folder, resolution=None)
    assert policy.image_size == (1024, 1024)
    for steps in (4, 50):
        level = np.linspace(0, 1, steps + 1)
        mu = 2.2562457 + (1.14999658 - 2.2562457) * (steps - 10) / 190
        expected = math.exp(mu) * level / (1 + (math.exp(mu) - 1) * level)
        np.testing.assert_allclose(policy.sigmas(steps), expected, atol=1e-6)


def test_a_scheduler_with_flow_sigmas_of_its_own(folder: Path) -> None:
    policy = load(folder)
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
def test_the_network_is_given_what_the_pipeline_gives_it(folder: Path, dtype: str) -> None:
    """In bfloat16 the pipeline also rounds latents after every step, so that its images are not those of the policy."""
    policy, pipe = load(folder, guidance=4.0, dtype=dtype), new_pipe(folder, getattr(torch, dtype))
    ours, theirs = given(policy.network), given(pipe.transformer)
    generate(policy, PROMPTS[:1], SEEDS[:1], steps=3, method="euler")
    pipe_images(pipe, PROMPTS[:1], 3, 4.0, output_type="latent")
    assert len(ours) == len(theirs) == 2 * 3  # with the prompt, then with the empty one
    for mine, their in zip(ours, theirs, strict=True):
        for name in ("timestep", "encoder_hidden_states"):
            assert torch.equal(mine[name], their[name])
            assert mine[name].dtype == their[name].dtype
        for name in ("txt_ids", "img_ids"):
            assert torch.equal(mine[name], their[name][0])
        assert mine["guidance"] is their["guidance"] is None
        assert mine["hidden_states"].shape == their["hidden_states"].shape == (1, 4 * 6, 32)
    assert all(mine["img_ids"] is ours[0]["img_ids"] for mine in ours)  # built once


def test_a_batch_with_one_prompt_each_and_one_sigma_each(folder: Path) -> None:
    policy = shared(folder, guidance=2.0)
    condition = policy.condition(PROMPTS)
    x, sigma = noise(policy, 3), torch.tensor([0.9, 0.5, 0.1])
    with torch.no_grad():
        together = policy.velocity(x, sigma, condition)
        for k, level in enumerate(sigma.tolist()):
            alone = policy.velocity(x[k : k + 1], level, condition.rows([k]))
            torch.testing.assert_close(together[k : k + 1], alone, atol=3 * ROUNDING, rtol=0)  # guidance 2: 2 + 1
        assert (together[:1] - policy.velocity(x[:1], 0.5, condition.rows([0]))).abs().max() > 30 * ROUNDING
    assert together.shape == x.shape == (3, 32, 4, 6)


def test_packing_by_hand(folder: Path) -> None:
    """A token is one cell of the patched latents, with all its channels, and the velocity is unpacked likewise."""
    policy = load(folder)
    calls: list[dict[str, Any]] = []
    policy.model = lambda **named: (calls.append(named), named["hidden_states"])[1:]
    x = noise(policy, 2)
    same = policy.velocity(x, 0.5, policy.condition(PROMPTS[:1]))
    assert torch.equal(calls[0]["hidden_states"][1, 6 * 2 + 3], x[1, :, 2, 3])
    assert calls[0]["img_ids"][6 * 2 + 3].tolist() == [0, 2, 3, 0]
    assert calls[0]["txt_ids"][5].tolist() == [0, 0, 0, 5]
    assert torch.equal(same, x)


def test_velocity_is_differentiable(folder: Path) -> None:
    policy = shared(folder)
    x = noise(policy, 1).requires_grad_()
    policy.velocity(x, 0.5, policy.condition(PROMPTS[:1])).square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0


def test_guidance_is_the_plain_formula_in_two_calls(folder: Path) -> None:
    guided, one = load(folder, guidance=3.0), shared(folder)
    calls, x = given(guided.network), noise(one, 2)
    with torch.no_grad():
        prompted, empty = (one.velocity(x, 0.6, one.condition([text])) for text in (PROMPTS[0], ""))
        found = guided.velocity(x, 0.6, guided.condition(PROMPTS[:1]))
    assert [len(call["hidden_states"]) for call in calls] == [2, 2]
    assert guided.row_bytes == one.row_bytes
    assert (prompted - empty).abs().max() > 10 * ROUNDING
    assert torch.equal(found, empty + 3 * (prompted - empty))


def test_a_distilled_model_refuses_guidance(distilled: Path) -> None:
    words = "guidance 4.5 cannot be used with this FLUX.2 model, .* set policy.guidance and evaluate.guidance to 1"
    with pytest.raises(RecastError, match=words):
        load(distilled, guidance=4.5)
    assert not shared(distilled).needs_empty
    assert not shared(distilled).condition(PROMPTS).empty


def test_encode_and_decode_use_the_vaes_batch_statistics(folder: Path) -> None:
    policy = load(folder, vae_batch=2)  # in two parts
    images = torch.rand(3, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    latents, vae = policy.encode(images), policy.pipe.vae
    with torch.no_grad():
        mean = vae.encode(images * 2 - 1).latent_dist.mean
        back = (vae.decode(mean).sample / 2 + 0.5).clamp(0, 1)
        # Channel 4 c + 2 i + j of a patch is channel c of the cell in its row i and column j.
        patches = torch.stack([mean[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=2).flatten(1, 2)
        shift, scale = (each.view(-1, 1, 1) for each in (vae.bn.running_mean, (vae.bn.running_var + 1e-4).sqrt()))
        x = noise(policy, 1)
        whole = torch.zeros(1, 8, 8, 12)
        for k, (i, j) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            whole[:, :, i::2, j::2] = (x * scale + shift)[:, k::4]
        drawn = (vae.decode(whole).sample / 2 + 0.5).clamp(0, 1)
    assert latents.shape == (3, *policy.latent_shape) == (3, 32, 4, 6)
    torch.testing.assert_close(latents, (patches - shift) / scale, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.decode(latents), back, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.decode(x), drawn, atol=ROUNDING, rtol=0)


def test_wrong_sizes_are_refused(folder: Path) -> None:
    with pytest.raises(RecastError, match="resolution 72 is not a multiple of 16"):
        load(folder, resolution=(64, 72))
    with pytest.raises(RecastError, match=r"images have the shape \(B, 3, 64, 96\), not \(1, 3, 96, 64\)"):
        shared(folder).encode(torch.zeros(1, 3, 96, 64))


@pytest.mark.parametrize("image", [1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_takes_what_the_memory_budget_reckons_with(
    dtype: torch.dtype, image: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The 4B model's own widths at 512² and 1024²; the peak does not grow with depth. On the meta device attention would
    # form its matrix, which kernels for real devices do not.
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda **each: torch.empty_like(each["query"])
    )
    text = 512
    with torch.device("meta"):
        shape = KLEIN["4B"] | {"num_layers": 1, "num_single_layers": 2}
        model = Flux2Transformer2DModel(**shape).to(dtype)
        inputs = {
            "hidden_states": torch.zeros(1, image, 128, dtype=dtype),
            "encoder_hidden_states": torch.zeros(1, text, 7680, dtype=dtype),
            "timestep": torch.zeros(1),
            "txt_ids": torch.zeros(text, 4),
            "img_ids": torch.zeros(image, 4),
        }

    class Klein:
        vectors, needs_empty, joint = Flux2KleinPolicy.vectors, False, False
        _dtype, width, image_tokens, text_tokens = dtype, 3072, image, text

    with torch.no_grad(), Peak(model) as memory:
        model(**inputs)
    reckoned = Flux2KleinPolicy.row_bytes.fget(Klein)  # type: ignore[attr-defined]
    assert 0.8 * reckoned < memory.peak + sum(tensor.nbytes for tensor in inputs.values()) < reckoned


@pytest.mark.parametrize(
    ("size", "count", "adapted"), [("4B", 3_875_544_576, 37_355_520), ("9B", 9_078_581_248, 63_963_136)]
)
def test_klein_on_the_meta_device(size: str, count: int, adapted: int) -> None:
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(**KLEIN[size])
        assert sum(parameter.numel() for parameter in transformer.parameters()) == count
        adapters = lora.Adapters(transformer, Flux2KleinPolicy.targets)
    double, single, width = KLEIN[size]["num_layers"], KLEIN[size]["num_single_layers"], transformer.inner_dim
    names = {name for name, module in transformer.named_modules() if hasattr(module, "lora_A")}
    expected = {f"transformer_blocks.{k}.attn.{part}" for k in range(double) for part in DOUBLE}
    assert names == expected | {f"single_transformer_blocks.{k}.attn.{part}" for k in range(single) for part in SINGLE}
    # Of a single block, one projection is from 1 width to 3 + 6 (a gated feed-forward of 3), the other from 1 + 3 to 1.
    by_hand = 32 * width * (double * 8 * (1 + 1) + single * ((1 + 9) + (4 + 1)))
    assert sum(parameter.numel() for parameter in adapters.parameters) == by_hand == adapted


def test_the_recipe_says_what_its_users_start_from() -> None:
    recipe = config.load(RECIPE)
    assert recipe.policy.model == "black-forest-labs/FLUX.2-klein-base-4B"
    assert (recipe.policy.guidance, recipe.evaluate.guidance, recipe.evaluate.steps) == (1.0, 4.0, 50)
    assert "Never run at size" in RECIPE.read_text()


def mini(folder: Path, tmp_path: Path) -> config.Recipe:
    """The recipe, for the tiny model."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[:2]))
    return config.load(
        RECIPE,
        [
            *(f"policy.model={folder}", "policy.dtype=float32", "policy.resolution=[64, 96]", "policy.device=cpu"),
            *(
                f"policy.max_sequence_length={TOKENS}",
                "rewards={jpeg: {}}",
                "weigh={method: static, budget: {jpeg: 1}}",
            ),
            *(f"prompts.source={tmp_path / 'prompts.txt'}", "prompts.count=2", "propose={source: policy}"),
            *("estimate.samples=2", "estimate.noisings=1", "estimate.rollouts=4", "estimate.steps=3"),
            *("estimate.spacing=3", f"train.prompts={tmp_path / 'prompts.txt'}", "train.epochs=1"),
            *("train.prompts_per_epoch=2", "train.images_per_prompt=2", "train.batch=4", "train.steps=3"),
            *("train.rank=4", "train.alpha=8", "train.trackers=[]", "train.preview_every=0", "train.precision=float32"),
            *("train.learning_rate=0.01", "train.fraction=1.0"),
        ],
    )


def test_gain_curves(folder: Path, tmp_path: Path) -> None:
    recipe = mini(folder, tmp_path)
    propose.propose(recipe, tmp_path / "run", no_progress)
    estimate.estimate(recipe, tmp_path / "run", no_progress)
    curves = GainCurves.load(tmp_path / "run/gains.json")
    assert curves.rewards == ("jpeg",)
    assert list(curves.sigmas) == pytest.approx(shared(folder).sigmas(3), abs=1e-6)
    assert curves.D.shape == (1, 4)
    assert np.isfinite(curves.D).all()
    assert np.ptp(curves.D) > 1e-4


def test_training_writes_an_adapter_that_plain_diffusers_loads(folder: Path, tmp_path: Path) -> None:
    train.train(mini(folder, tmp_path), tmp_path / "run")
    path = tmp_path / "run/lora"
    state = load_file(path / lora.FILE)
    assert len(state) == 2 * (2 * len(DOUBLE) + 2 * len(SINGLE))
    assert all(tensor.abs().max() > 0 for tensor in state.values())  # B starts at 0, and all modules were trained
    ours = generate(load(folder, guidance=4.0, lora=str(path)), PROMPTS, SEEDS, steps=3, method="euler")
    assert (ours - pipe_images(plain(folder), PROMPTS, 3, 4.0)).abs().max() > 1e-4
    pipe = new_pipe(folder)
    pipe.load_lora_weights(path)
    assert torch.equal(ours, pipe_images(pipe, PROMPTS, 3, 4.0))
