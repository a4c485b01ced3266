"""The Qwen-Image policy against diffusers' own pipeline, on tiny checkpoints in the real format."""

import inspect
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from diffusers import QwenImageTransformer2DModel as Transformer
from torch.nn import Linear

import tiny_qwen
from recast import config
from recast.core.curves import GainCurves
from recast.errors import RecastError
from recast.estimate import stage as estimate
from recast.flow import configurations, families, lora, qwen
from recast.flow.generate import generate
from recast.progress import no_progress
from recast.propose import stage as propose
from recast.train import stage
from recast.weigh import weigh_recipe

ROOT = Path(__file__).parents[2]
PROMPT = tiny_qwen.PROMPT
PROMPTS = ["a red circle", PROMPT, "zebra"]
DEPTH = 64
ROUNDING = DEPTH * math.sqrt(1024) * torch.finfo(torch.float32).eps
"""How far float32 results of order 1 may differ if batches differ: DEPTH sums of up to 1024 terms in another order."""
SIZES = configurations.transformer("Qwen/Qwen-Image")
"""The transformer/config.json of Qwen/Qwen-Image, which Qwen/Qwen-Image-2512 shares."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen.folder(tmp_path_factory.mktemp("qwen"))


@cache
def load(folder: Path, **settings: Any) -> qwen.QwenImagePolicy:
    found = families.load(config.policy(model=str(folder), **({"resolution": (64, 96)} | settings)))
    assert isinstance(found, qwen.QwenImagePolicy)
    return found


@cache
def plain_pipe(folder: Path, adapter: Path | None = None) -> Any:
    """The pipeline as a user of diffusers has it."""
    pipe = QwenImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    if adapter is not None:
        pipe.load_lora_weights(adapter)
    return pipe


def pipe_images(pipe: Any, prompts: list[str], guidance: float, **more: Any) -> torch.Tensor:
    return pipe(
        prompts,
        negative_prompt=[""] * len(prompts) if guidance > 1 else None,
        true_cfg_scale=guidance,
        num_inference_steps=4,
        generator=[torch.Generator().manual_seed(7 + k) for k in range(len(prompts))],
        height=64,
        width=96,
        output_type="pt",
        **more,
    ).images


def our_images(policy: qwen.QwenImagePolicy, prompts: list[str]) -> torch.Tensor:
    return generate(policy, prompts, [7 + k for k in range(len(prompts))], steps=4, method="euler")


def test_the_tiny_folder_has_the_published_layout(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    assert {name: part for name, part in index.items() if isinstance(part, list)} == {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    assert index["_class_name"] == "QwenImagePipeline"
    policy = load(folder)
    assert policy.latent_shape == (16, 8, 12)
    assert policy.image_tokens == 4 * 6
    assert policy.max_sequence_length == 512
    whole = load(folder, resolution=None)
    assert whole.image_size == (1024, 1024)
    assert whole.image_tokens == 4096


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("count", [1, 3])
def test_images_are_those_of_the_pipeline_to_the_last_bit(folder: Path, guidance: float, count: int) -> None:
    prompts = PROMPTS[-count:]  # three have 3, 7 and 5 tokens: the transformer gets a mask
    theirs = pipe_images(plain_pipe(folder), prompts, guidance)
    assert theirs.shape == (count, 3, 64, 96)
    assert torch.equal(our_images(load(folder, guidance=guidance), prompts), theirs)


def test_prompts_and_guidance_change_the_image(folder: Path) -> None:
    """What the comparison above could otherwise not notice."""
    plain, guided = (our_images(load(folder, guidance=scale), ["a red circle"]) for scale in (1.0, 4.0))
    other = our_images(load(folder), ["zebra"])
    assert plain.std() > 0.01
    assert (plain - guided).abs().max() > 0.01
    assert (plain - other).abs().max() > 0.01


@pytest.mark.parametrize("resolution", [(64, 96), 1328])
@pytest.mark.parametrize("steps", [2, 10])
def test_the_grid_is_the_pipelines(folder: Path, resolution: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(folder, resolution=resolution)
    sigmas, pipe = policy.sigmas(steps), policy.pipe
    monkeypatch.setattr(pipe.transformer, "forward", lambda hidden_states, **_: (hidden_states,))
    sizes = {"height": policy.image_size[0], "width": policy.image_size[1]}
    pipe("a", num_inference_steps=steps, true_cfg_scale=1.0, output_type="latent", **sizes)
    assert sigmas == pipe.scheduler.sigmas.flip(0).tolist()
    assert sigmas[-1] == 1
    assert sigmas[1] == pytest.approx(0.02, rel=1e-5)  # shift_terminal


def test_the_scheduler_may_have_no_dynamic_shifting(tmp_path: Path) -> None:
    folder = tiny_qwen.folder(tmp_path, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    policy = load(folder)
    assert torch.equal(our_images(policy, ["zebra"]), pipe_images(plain_pipe(folder), ["zebra"], 1.0))
    assert policy.sigmas(2) == [0.0, 0.75, 1.0]


def test_the_instruction_of_the_template_is_cut_off(folder: Path) -> None:
    policy = load(folder)
    pipe = policy.pipe
    before, after = (pipe.tokenizer(part).input_ids for part in pipe.prompt_template_encode.split("{}"))
    assert len(before) == pipe.prompt_template_encode_start_idx == 34
    tensors = policy.condition([*PROMPTS, ""]).tensors
    lengths = [len(pipe.tokenizer(prompt).input_ids) + len(after) for prompt in (*PROMPTS, "")]
    assert tensors["mask"].sum(1).tolist() == lengths == [8, 12, 10, 5]
    assert tensors["embeds"].shape == (4, 12, 32)
    ids = torch.tensor([before + pipe.tokenizer("a red circle").input_ids + after])
    with torch.no_grad():
        hidden = pipe.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, 34:]
    torch.testing.assert_close(tensors["embeds"][0, :8], hidden, atol=ROUNDING, rtol=ROUNDING)
    assert (tensors["embeds"][0, 8:] == 0).all()


def test_long_prompts_are_cut_as_the_pipeline_cuts_them(folder: Path) -> None:
    policy = load(folder, max_sequence_length=6)
    assert policy.condition([PROMPT]).tensors["embeds"].shape == (1, 6, 32)
    assert torch.equal(
        our_images(policy, [PROMPT]), pipe_images(plain_pipe(folder), [PROMPT], 1.0, max_sequence_length=6)
    )


def test_a_mask_is_passed_only_if_prompts_differ_in_length(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(folder, guidance=2.0)
    seen: list[tuple[Any, ...]] = []

    def look(**given: Any) -> tuple[torch.Tensor]:
        seen.append((given["encoder_hidden_states"].shape[1], given["encoder_hidden_states_mask"], given["img_shapes"]))
        return (given["hidden_states"],)

    monkeypatch.setattr(policy, "model", look)
    x = torch.randn(2, *policy.latent_shape)
    policy.velocity(x, 0.5, policy.condition(PROMPTS[:2]))
    policy.velocity(x, 0.5, policy.condition(PROMPTS).rows([0, 0]))  # a row of a padded batch
    assert [length for length, _, _ in seen] == [12, 5, 8, 5]
    assert seen[0][1].tolist() == [[True] * 8 + [False] * 4, [True] * 12]
    assert all(mask is None for _, mask, _ in seen[1:])
    assert all(shapes == [[(1, 4, 6)]] * 2 for _, _, shapes in seen)


def test_guidance_keeps_the_norm_of_every_token(folder: Path) -> None:
    guided, plain = load(folder, guidance=3.0), load(folder)
    x = torch.randn(2, *plain.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        prompted, empty = (plain.velocity(x, 0.6, plain.condition([text])) for text in (PROMPT, ""))
        found = guided.velocity(x, 0.6, guided.condition([PROMPT]))

    def tokens(v: torch.Tensor) -> torch.Tensor:
        return v.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)  # (B, 4, 6, 64)

    combined = empty + 3 * (prompted - empty)
    norms = [tokens(each).norm(dim=-1) for each in (prompted, combined, found)]
    tolerance = 5 * ROUNDING * float(norms[1].max())
    torch.testing.assert_close(norms[2], norms[0], atol=tolerance, rtol=0)
    assert (norms[1] - norms[0]).abs().max() > 10 * tolerance
    expected = tokens(combined) * (norms[0] / norms[1])[..., None]
    torch.testing.assert_close(tokens(found), expected, atol=tolerance, rtol=0)
    assert not plain.needs_empty
    assert not plain.condition([PROMPT]).empty


def test_a_batch_with_one_prompt_each_and_one_sigma_each(folder: Path) -> None:
    policy = load(folder, guidance=2.0)
    condition = policy.condition(PROMPTS)
    x = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sigma = torch.tensor([0.9, 0.5, 0.1])
    together = policy.velocity(x, sigma, condition)
    with torch.no_grad():
        for k, level in enumerate(sigma.tolist()):
            alone = policy.velocity(x[k : k + 1], level, condition.rows([k]))
            torch.testing.assert_close(together[k : k + 1], alone, atol=10 * ROUNDING, rtol=0)
    together.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_encoding_and_decoding_use_the_statistics_of_the_vae(folder: Path) -> None:
    policy = load(folder, vae_batch=2)
    vae = policy.pipe.vae
    images = torch.rand(3, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    published = inspect.signature(AutoencoderKLQwenImage).parameters
    mean, std = (torch.tensor(published[f"latents_{name}"].default).view(16, 1, 1) for name in ("mean", "std"))
    assert (mean[1].item(), std[1].item()) == pytest.approx((-0.7089, 1.4541))
    with torch.no_grad():
        raw = vae.encode((images * 2 - 1)[:, :, None]).latent_dist.mean
        back = vae.decode(raw).sample
    assert raw.shape == (3, 16, 1, 8, 12)
    latents = policy.encode(images)
    torch.testing.assert_close(latents, (raw[:, :, 0] - mean) / std, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.decode(latents), (back[:, :, 0] / 2 + 0.5).clamp(0, 1), atol=ROUNDING, rtol=0)
    shuffled = policy.decode(latents.flip(1))
    assert (shuffled - policy.decode(latents)).abs().max() > 100 * ROUNDING


def test_sizes_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(RecastError, match="resolution 72 is not a multiple of 16"):
        load(folder, resolution=(64, 72))
    with pytest.raises(RecastError, match=r"images have the shape \(B, 3, 64, 96\), not \(1, 3, 96, 64\)"):
        load(folder).encode(torch.zeros(1, 3, 96, 64))


@pytest.mark.parametrize("setting", ["guidance_embeds", "use_additional_t_cond"])
def test_a_transformer_that_the_pipeline_cannot_run_is_refused(tmp_path: Path, setting: str) -> None:
    pipe = tiny_qwen.pipeline(transformer=tiny_qwen.transformer(**{setting: True}))
    with pytest.raises((TypeError, ValueError)):  # diffusers fails in the first call
        pipe("a", guidance_scale=2.0, num_inference_steps=2, height=32, width=32)
    pipe.save_pretrained(tmp_path)
    with pytest.raises(RecastError, match=f"has {setting} = true, which QwenImagePipeline of diffusers cannot run"):
        load(tmp_path)


def test_more_tokens_than_the_pipeline_encodes_are_refused() -> None:
    with pytest.raises(RecastError, match="max_sequence_length = 1025 is above 1024, the most tokens that Qwen-Image"):
        qwen.QwenImagePolicy(tiny_qwen.pipeline(), resolution=32, max_sequence_length=1025)


def test_bfloat16_keeps_latents_and_the_vae_in_float32(folder: Path) -> None:
    """Diffusers' transformer rounds σ to bfloat16 as well, which its sinusoids of 1000 σ make visible."""
    policy, exact = load(folder, dtype="bfloat16"), load(folder)
    assert policy.network.dtype == policy.pipe.text_encoder.dtype == torch.bfloat16
    assert policy.pipe.vae.dtype == torch.float32
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted = (each.velocity(x, 0.5, each.condition(PROMPTS[:2])) for each in (policy, exact))
        rounded, above = (policy.velocity(x, sigma, policy.condition([PROMPT])) for sigma in (0.905, 0.90625))
    assert found.dtype == torch.float32
    # bfloat16 rounds every product's result, and the errors of DEPTH of them add up as a random walk.
    tolerance = math.sqrt(DEPTH) * torch.finfo(torch.bfloat16).eps * float(wanted.abs().max())
    assert 0 < (found - wanted).abs().max() < tolerance
    assert torch.equal(rounded, above)


def test_qwen_image_on_the_meta_device() -> None:
    with torch.device("meta"):
        whole, block = Transformer(**SIZES), Transformer(**(SIZES | {"num_layers": 1}))
        adapters = lora.Adapters(block, qwen.QwenImagePolicy.targets)  # of one block: peft takes seconds for sixty
    assert sum(parameter.numel() for parameter in whole.parameters()) == 20_430_401_088
    pattern = re.compile(qwen.QwenImagePolicy.targets)
    names = [name for name, _ in whole.named_modules() if pattern.fullmatch(name)]
    assert names == [name for name, part in whole.named_modules() if ".attn." in name and type(part) is Linear]
    assert len(names) == 60 * len(qwen.PROJECTIONS) == 480  # a policy leaves out one in the last block
    adapted = [name for name, module in block.named_modules() if hasattr(module, "lora_A")]
    assert adapted == [name for name in names if name.startswith("transformer_blocks.0.")]
    count = sum(parameter.numel() for parameter in adapters.parameters)
    assert 60 * count - count // 8 == 479 * 32 * (3072 + 3072) == 94_175_232


def test_the_vae_on_the_meta_device() -> None:
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage()
    assert sum(parameter.numel() for parameter in vae.parameters()) == 126_892_531


def recipe(folder: Path, out: Path, *more: str) -> config.Recipe:
    """Two prompts, three steps, an example reward, and one optimizer step on four images."""
    out.mkdir(exist_ok=True)
    (out / "prompts.txt").write_text("\n".join(PROMPTS[:2]))
    (out / "mini.yaml").write_text(
        json.dumps(
            {
                "world": {"kind": "images"},
                "policy": {"model": str(folder), "resolution": [32, 64], "guidance": 2.0},
                "prompts": {"source": str(out / "prompts.txt")},
                "propose": {"source": "policy", "smallest": 32},
                "rewards": {"jpeg": None},
                "estimate": {"steps": 3, "samples": 2, "noisings": 1, "rollouts": 4, "spacing": 8.0},
                "train": {
                    "prompts": str(out / "prompts.txt"),
                    **{"epochs": 1, "prompts_per_epoch": 2, "images_per_prompt": 2, "batch": 4, "rank": 4, "alpha": 8},
                    **{"preview_every": 0, "trackers": [], "learning_rate": 0.01, "checkpointing": True},
                },
            }
        )
    )
    return config.load(out / "mini.yaml", list(more))


def test_curves_training_and_the_adapter_in_plain_diffusers(folder: Path, tmp_path: Path) -> None:
    settings = recipe(folder, tmp_path)
    propose.propose(settings, tmp_path, no_progress)
    estimate.estimate(settings, tmp_path, no_progress)
    curves = GainCurves.load(tmp_path / "gains.json")
    assert np.isfinite(curves.D).all()
    assert curves.sigmas.tolist() == load(folder, resolution=(32, 64)).sigmas(3)
    weigh_recipe(settings, curves).save(tmp_path / "weights.json")
    assert stage.train(settings, tmp_path) == 1
    base, trained = load(folder, guidance=2.0), load(folder, guidance=2.0, lora=str(tmp_path / "lora"))
    images = our_images(trained, PROMPTS)
    assert (images - our_images(base, PROMPTS)).abs().max() > 1e-3
    assert torch.equal(images, pipe_images(plain_pipe(folder, tmp_path / "lora"), PROMPTS, 2.0))


def test_the_recipe_loads_and_fits_the_model() -> None:
    found = config.load(ROOT / "recipes/qwen/rewards.yaml")
    assert found.policy.model == "Qwen/Qwen-Image"
    assert found.policy.dtype == "bfloat16"
    assert found.policy.quantize == "nf4"
    assert found.train.batch % found.train.images_per_prompt == 0
