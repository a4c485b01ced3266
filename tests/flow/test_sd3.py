"""The SD3 policy against diffusers' own pipeline, on tiny checkpoints in the real format."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from family import check_plain_guidance
from safetensors.torch import load_file, save_file

import tiny
from recast import config
from recast.errors import RecastError
from recast.flow import families, loading, lora, sampling, sd3
from recast.flow.generate import generate
from recast.flow.policy import conditioned

PROMPT = "a red circle and a blue square"
DEPTH = 64
"""Matrix products and convolutions one after another, at most: two transformer calls, or one, and the VAE."""
ROUNDING = DEPTH * math.sqrt(1024) * torch.finfo(torch.float32).eps
"""How far float32 results of order 1 may differ if batches differ: sums of up to 1024 terms in another order have
errors that grow as the root of their length, and DEPTH of them add up. What these tests tell apart differs by 0.01 or
more."""


def pipe_images(pipe: Any, steps: int, guidance: float, count: int, length: int, prompt: Any = PROMPT) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(7 + k) for k in range(count)]
    return pipe(
        prompt,
        num_images_per_prompt=count if isinstance(prompt, str) else 1,
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=length,
        generator=generators,
        output_type="pt",
    ).images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("sd3"))


def test_the_tiny_folder_has_the_published_layout(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    assert index["text_encoder_3"] == ["transformers", "T5EncoderModel"]
    assert index["vae"] == ["diffusers", "AutoencoderKL"]
    for part in ("transformer", "vae"):
        assert (folder / part / "diffusion_pytorch_model.safetensors").is_file()
    for part in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        assert (folder / part / "model.safetensors").is_file()


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("steps", [4, 10])
def test_images_are_those_of_the_pipeline_to_the_last_bit(folder: Path, guidance: float, steps: int) -> None:
    policy = families.load(config.policy(model=str(folder), guidance=guidance))
    ours = generate(policy, [PROMPT] * 3, [7, 8, 9], steps=steps, method="euler")
    theirs = pipe_images(StableDiffusion3Pipeline.from_pretrained(folder), steps, guidance, 3, 256)
    assert theirs.std() > 0.01
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_shapes_base_gives_the_images_of_its_pipeline_to_the_last_bit(guidance: float) -> None:
    policy = families.load(config.policy(model="shapes", guidance=guidance))
    ours = generate(policy, [PROMPT] * 4, [7, 8, 9, 10], steps=10, method="euler")
    assert torch.equal(ours, pipe_images(policy.pipe, 10, guidance, 4, 1))


def test_an_absent_t5_is_handled_as_the_pipeline_handles_it(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path, text_encoder_3=None, tokenizer_3=None)
    assert json.loads((folder / "model_index.json").read_text())["text_encoder_3"] == [None, None]
    policy = families.load(config.policy(model=str(folder)))
    assert policy.pipe.text_encoder_3 is None
    assert policy.condition([PROMPT]).tensors["embeds"].shape == (1, 24 + 256, 32)
    assert (policy.condition([PROMPT]).tensors["embeds"][:, 24:] == 0).all()
    ours = generate(policy, [PROMPT], [7], steps=3, method="euler")
    assert torch.equal(ours, pipe_images(policy.pipe, 3, 1.0, 1, 256))


def test_max_sequence_length_is_the_pipelines(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder), max_sequence_length=32))
    assert policy.condition([PROMPT]).tensors["embeds"].shape == (1, 24 + 32, 32)
    ours = generate(policy, [PROMPT], [7], steps=3, method="euler")
    assert torch.equal(ours, pipe_images(policy.pipe, 3, 1.0, 1, 32))


def test_the_grid_is_the_schedulers_own(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder)))
    sigmas = policy.sigmas(10)
    assert [round(s, 3) for s in sigmas] == [0, 0.009, 0.278, 0.465, 0.602, 0.707, 0.790, 0.858, 0.913, 0.960, 1]
    policy.pipe.scheduler.set_timesteps(25)
    assert policy.sigmas(25) == policy.pipe.scheduler.sigmas.flip(0).tolist()
    policy.sigmas(7)
    assert len(policy.pipe.scheduler.timesteps) == 25  # the pipeline's own scheduler is left as it was


def test_dynamic_shifting_is_the_pipelines(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder)))
    policy.pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigmas = policy.sigmas(5)
    pipe_images(policy.pipe, 5, 1.0, 1, 256)
    assert sigmas == policy.pipe.scheduler.sigmas.flip(0).tolist()


def test_a_batch_with_one_prompt_each_and_one_sigma_each(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder), guidance=2.0))
    condition = policy.condition([PROMPT, "a red circle", PROMPT])
    x = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.5, 0.1])
    with torch.no_grad():
        together = policy.velocity(x, sigma, condition)
        for k, level in enumerate(sigma.tolist()):
            alone = policy.velocity(x[k : k + 1], level, condition.rows([k]))
            torch.testing.assert_close(together[k : k + 1], alone, atol=ROUNDING, rtol=0)
    with pytest.raises(RecastError, match="3 samples cannot be conditioned on 2 prompts"):
        policy.velocity(x, 0.5, condition.rows(slice(2)))


def test_guidance_is_the_plain_formula(folder: Path) -> None:
    guided = families.load(config.policy(model=str(folder), guidance=3.0))
    plain = families.load(config.policy(model=str(folder)))
    check_plain_guidance(guided, plain, PROMPT)


def test_velocity_is_differentiable(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder)))
    x = torch.randn(1, *policy.latent_shape).requires_grad_()
    policy.velocity(x, 0.5, policy.condition([PROMPT])).square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0


def test_prompts_are_encoded_once_and_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = families.load(config.policy(model=str(folder), cached_prompts=2))
    asked: list[list[str]] = []
    encode = policy.pipe.encode_prompt

    def spy(prompt: list[str], *rest: Any, **more: Any) -> Any:
        asked.append(prompt)
        return encode(prompt, *rest, **more)

    monkeypatch.setattr(policy.pipe, "encode_prompt", spy)
    first = policy.condition(["a", "b", "a"])
    assert asked == [["a"], ["b"]]
    again = policy.condition(["a"])
    assert asked == [["a"], ["b"]]
    assert torch.equal(first.tensors["embeds"][2:], again.tensors["embeds"])
    assert torch.equal(first.tensors["pooled"][:1], again.tensors["pooled"])
    policy.condition(["c"])  # "b" was used longest ago
    policy.condition(["a"])
    assert asked == [["a"], ["b"], ["c"]]
    policy.condition(["b"])
    assert asked == [["a"], ["b"], ["c"], ["b"]]
    assert len(policy.condition(["a", "b", "c", "d"])) == 4  # more than are kept, and all are there


def test_text_encoders_leave_the_device_after_encoding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = families.load(config.policy(model=str(folder), offload_text=True))
    placed: list[str] = []
    monkeypatch.setattr(policy, "_place_text", lambda device: placed.append(str(device)))
    policy.device = torch.device("cpu", 0)  # another name than "cpu", on a machine with one device
    condition = policy.condition([PROMPT])
    assert placed == ["cpu:0", "cpu"]
    policy.condition([PROMPT])
    assert placed == ["cpu:0", "cpu"]  # nothing new to encode, nothing moved
    kept = families.load(config.policy(model=str(folder))).condition([PROMPT])
    assert torch.equal(condition.tensors["embeds"], kept.tensors["embeds"])


def test_offloaded_text_encoders_start_off_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[str] = []
    monkeypatch.setattr(sd3.SD3Policy, "_place_text", lambda _self, device: placed.append(str(device)))
    pipe = loading.load_pipeline(folder)
    for offload in (True, False):
        sd3.SD3Policy(pipe, device=torch.device("cpu", 0), offload_text=offload)
    assert placed == ["cpu", "cpu:0"]


def test_a_failure_while_encoding_keeps_what_was_encoded_and_frees_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = families.load(config.policy(model=str(folder), offload_text=True))
    placed: list[str] = []
    monkeypatch.setattr(policy, "_place_text", lambda device: placed.append(str(device)))
    encode = policy.pipe.encode_prompt
    monkeypatch.setattr(policy.pipe, "encode_prompt", lambda p, *r, **m: 1 / 0 if p == ["c"] else encode(p, *r, **m))
    with pytest.raises(ZeroDivisionError):
        policy.condition(["a", "b", "c"])
    assert placed == ["cpu", "cpu"]
    assert list(policy._cache) == ["a", "b"]


def test_the_transformer_and_the_vae_go_to_the_device(folder: Path) -> None:
    pipe = loading.load_pipeline(folder)
    sd3.SD3Policy(pipe, device="meta")
    assert pipe.transformer.device.type == pipe.vae.device.type == pipe.text_encoder_3.device.type == "meta"


def test_placing_text_encoders_moves_every_one(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder)))
    policy._place_text(torch.device("meta"))
    parts = [policy.pipe.text_encoder, policy.pipe.text_encoder_2, policy.pipe.text_encoder_3]
    assert {part.device.type for part in parts} == {"meta"}
    assert policy.pipe.transformer.device.type == "cpu"


def test_dtype_is_the_configs_and_latents_stay_float32(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder), dtype="bfloat16"))
    assert policy.pipe.transformer.dtype == policy.pipe.text_encoder_3.dtype == torch.bfloat16
    exact_vae = loading.load_pipeline(folder).vae.state_dict()
    for name, tensor in policy.pipe.vae.state_dict().items():
        assert torch.equal(tensor, exact_vae[name])  # not rounded on the way either
    x = torch.randn(1, *policy.latent_shape)
    assert policy.velocity(x, 0.5, policy.condition([PROMPT])).dtype == torch.float32
    images = generate(policy, [PROMPT], [0], steps=3)
    exact = generate(families.load(config.policy(model=str(folder))), [PROMPT], [0], steps=3)
    assert images.dtype == torch.float32
    # bfloat16 rounds every product's result, and the errors of DEPTH of them add up as a random walk.
    assert 0 < (images - exact).abs().max() < math.sqrt(DEPTH) * torch.finfo(torch.bfloat16).eps


def test_encode_inverts_decode_as_far_as_the_vae_does(folder: Path) -> None:
    """Shift and scale are the VAE's: encode, then diffusers' own decoding gives the VAE's reconstruction."""
    policy = families.load(config.policy(model=str(folder), vae_batch=2))
    assert policy.vae_batch == 2
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    latents = policy.encode(images)
    vae = policy.pipe.vae
    with torch.no_grad():
        mean = vae.encode(images * 2 - 1).latent_dist.mean
        back = (vae.decode(mean).sample / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(latents, (mean - 0.0609) * 1.5305, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(policy.decode(latents), back, atol=ROUNDING, rtol=0)


def test_another_resolution(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder), resolution=96))
    assert policy.latent_shape == (16, 12, 12)
    assert generate(policy, [PROMPT], [0], steps=2).shape == (1, 3, 96, 96)
    with pytest.raises(RecastError, match="resolution 256 is above 192, the largest"):
        families.load(config.policy(model=str(folder), resolution=256))
    with pytest.raises(RecastError, match="resolution 100 is not a multiple of 16"):
        families.load(config.policy(model=str(folder), resolution=100))
    with pytest.raises(RecastError, match=r"images have the shape \(B, 3, 96, 96\), not \(1, 3, 64, 64\)"):
        policy.encode(torch.zeros(1, 3, 64, 64))


@pytest.mark.parametrize("steps", [10, 25])
@pytest.mark.parametrize("method", sampling.METHODS)
def test_every_sampler_runs_on_the_shapes_base_without_nan(steps: int, method: sampling.Method) -> None:
    policy = families.load(config.policy(model="shapes"))
    velocity = conditioned(policy, policy.condition([PROMPT]))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *policy.latent_shape, generator=generator)
    sigmas = policy.sigmas(steps)
    seen: list[float] = []

    def watched(x: torch.Tensor, sigma: float) -> torch.Tensor:
        seen.append(sigma)
        v = velocity(x, sigma)
        assert v.isfinite().all()
        return v

    with torch.no_grad():
        latents = sampling.sample(
            watched, x, sigmas, method=method, noise=lambda _: torch.randn(x.shape, generator=generator)
        )
    assert seen == sigmas[:0:-1]
    assert latents.isfinite().all()
    images = policy.decode(latents)
    assert 0.5 < images.mean() < 1  # mostly paper


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_velocity_is_finite_at_both_ends(sigma: float) -> None:
    policy = families.load(config.policy(model="shapes"))
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert policy.velocity(x, sigma, policy.condition([PROMPT])).isfinite().all()


def test_batches_change_no_image_and_build_no_graph(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder)))
    lora.Adapters(policy.network, policy.targets)
    prompts = ["a red circle", PROMPT, "a blue square"]
    whole = generate(policy, prompts, [1, 2, 3], steps=2, batch=3)
    parts = generate(policy, prompts, [1, 2, 3], steps=2, batch=2)
    torch.testing.assert_close(whole, parts, atol=ROUNDING, rtol=0)
    assert (whole[0] - whole[2]).abs().max() > 1e-3
    assert not whole.requires_grad
    assert not policy.decode(torch.zeros(1, *policy.latent_shape, requires_grad=True)).requires_grad


def test_timesteps_are_in_the_schedulers_units(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder)))
    x = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    condition = policy.condition([PROMPT])
    before = policy.velocity(x, 0.5, condition)
    policy.pipe.scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=500)
    assert torch.equal(policy.velocity(x, 1.0, condition), before)


def test_a_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert loading.load_pipeline(f"~/{folder.name}").transformer is not None
    with pytest.raises(RecastError, match="the folder .*nowhere' does not exist"):
        loading.load_pipeline("~/nowhere")


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_3", "transformer", "vae"])
def test_a_checkpoint_with_a_tensor_missing_is_refused(folder: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = next((tmp_path / "copy" / part).glob("*.safetensors"))
    tensors = load_file(path)
    lost = sorted(name for name in tensors if "weight" in name and "shared" not in name and "embed" not in name)[0]
    del tensors[lost]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RecastError, match="has no tensor"):
        loading.load_pipeline(tmp_path / "copy")


def test_a_truncated_file_and_an_unknown_part_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "cut")
    path = tmp_path / "cut/text_encoder/model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RecastError, match="no StableDiffusion3Pipeline in"):
        loading.load_pipeline(tmp_path / "cut")
    shutil.copytree(folder, tmp_path / "odd")
    index = json.loads((folder / "model_index.json").read_text()) | {"vae": ["recast.shapes.nothing", "VAE"]}
    (tmp_path / "odd/model_index.json").write_text(json.dumps(index))
    with pytest.raises(RecastError, match="no StableDiffusion3Pipeline in"):
        loading.load_pipeline(tmp_path / "odd")


@pytest.mark.parametrize("device", ["gpu", "cuda:7"])
def test_a_device_that_is_not_there_is_named(folder: Path, device: str) -> None:
    with pytest.raises(RecastError, match=f"the device '{device}' cannot be used here"):
        families.load(config.policy(model=str(folder), device=device))


def test_a_missing_or_wrong_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="no diffusers pipeline in"):
        families.load(config.policy(model=str(tmp_path)))
    (tmp_path / "model_index.json").write_text("{not json")
    with pytest.raises(RecastError, match="no diffusers pipeline in"):
        families.load(config.policy(model=str(tmp_path)))


def test_a_folder_without_a_part_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/transformer")
    with pytest.raises(RecastError, match="no StableDiffusion3Pipeline in"):
        families.load(config.policy(model=str(tmp_path / "copy")))


def test_bad_requests_are_named(folder: Path) -> None:
    policy = families.load(config.policy(model=str(folder)))
    for wrong in ([], "two red circles"):
        with pytest.raises(RecastError, match="prompts must be a list of at least one"):
            policy.condition(wrong)
        with pytest.raises(RecastError, match="prompts must be a list of at least one"):
            generate(policy, wrong, [0] * len(wrong), steps=2)
    with pytest.raises(RecastError, match="at least 1, not 0"):
        policy.sigmas(0)
    with pytest.raises(RecastError, match="2 prompts need as many seeds, not 1"):
        generate(policy, ["a", "b"], [0], steps=2)
    with pytest.raises(RecastError, match="not 'ancestral'"):
        generate(policy, ["a"], [0], steps=2, method="ancestral")
    with pytest.raises(RecastError, match="policy: guidance = 0.5"):
        config.policy(guidance=0.5)
    with pytest.raises(RecastError, match="unknown key 'guidence'; did you mean 'guidance'"):
        config.policy(guidence=2)
