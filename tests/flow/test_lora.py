"""LoRA adapters: which modules, how many parameters, exact switching, and files that plain diffusers reads."""

from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file

import tiny
from recast import config
from recast.errors import RecastError
from recast.flow import configurations, families, lora, sd3
from recast.flow.generate import generate

PROMPT = "a red circle and a blue square"
EPS = torch.finfo(torch.float32).eps
SD35_MEDIUM = configurations.transformer("stabilityai/stable-diffusion-3.5-medium")
"""The transformer/config.json of stabilityai/stable-diffusion-3.5-medium."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("sd3"))


@pytest.fixture
def policy(folder: Path) -> sd3.SD3Policy:
    found = families.load(config.policy(model=str(folder)))
    assert isinstance(found, sd3.SD3Policy)
    return found


def image(policy: sd3.SD3Policy) -> torch.Tensor:
    return generate(policy, [PROMPT, "a red circle"], [7, 8], steps=3, method="euler")


def shake(adapters: lora.Adapters, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.parameters:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def test_sd35_medium_on_the_meta_device() -> None:
    with torch.device("meta"):
        transformer = SD3Transformer2DModel(**SD35_MEDIUM)
        assert sum(parameter.numel() for parameter in transformer.parameters()) == 2_243_171_520
        adapters = lora.Adapters(transformer, sd3.SD3Policy.targets)
    names = {name for name, module in transformer.named_modules() if hasattr(module, "lora_A")}
    expected = {f"transformer_blocks.{k}.attn.{part}" for k in range(24) for part in sd3.PROJECTIONS}
    assert names == expected - {"transformer_blocks.23.attn.to_add_out"}
    trainable = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trainable) == 191 * 32 * (1536 + 1536) == 18_776_064
    assert {id(parameter) for parameter in trainable} == {id(parameter) for parameter in adapters.parameters}


def test_defaults_are_the_papers(policy: sd3.SD3Policy) -> None:
    lora.Adapters(policy.network, policy.targets)
    for name in ("default", "old"):
        settings = policy.pipe.transformer.peft_config[name]
        assert (settings.r, settings.lora_alpha, settings.init_lora_weights) == (32, 64, "gaussian")


def test_the_second_attention_is_left_alone(policy: sd3.SD3Policy) -> None:
    lora.Adapters(policy.network, policy.targets)
    names = [name for name, module in policy.pipe.transformer.named_modules() if hasattr(module, "lora_A")]
    assert any("attn2" in name for name, _ in policy.pipe.transformer.named_modules())
    assert len(names) == 2 * 8 - 1
    assert not any("attn2" in name for name in names)


def test_all_three_start_as_the_base_and_old_equals_default(policy: sd3.SD3Policy) -> None:
    bare = image(policy)
    adapters = lora.Adapters(policy.network, policy.targets, seed=3)
    for who in ("default", "old", "base"):
        with adapters.using(who):
            assert torch.equal(image(policy), bare)
    assert all(torch.equal(a, b) for a, b in zip(adapters.parameters, adapters.old_parameters, strict=True))
    first = adapters.parameters[0]
    assert first.std().item() == pytest.approx(1 / 32, rel=0.15)  # Gaussian with standard deviation 1/rank
    assert (adapters.parameters[1] == 0).all()


def test_the_seed_decides_the_start_and_the_global_generator_is_left(folder: Path) -> None:
    def start(seed: int) -> torch.Tensor:
        return lora.Adapters(tiny.pipeline().transformer, sd3.SD3Policy.targets, seed=seed).parameters[0].clone()

    torch.manual_seed(5)
    expected = torch.rand(2)
    transformer = tiny.pipeline().transformer
    torch.manual_seed(5)
    lora.Adapters(transformer, sd3.SD3Policy.targets, seed=1)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


def test_switching_is_exact(policy: sd3.SD3Policy) -> None:
    bare = image(policy)
    adapters = lora.Adapters(policy.network, policy.targets)
    shake(adapters, 0)
    adapters.update_old()
    shake(adapters, 1)
    new = image(policy)
    with adapters.using("old"):
        old = image(policy)
        assert adapters.active == "old"
        with adapters.using("base"):
            assert torch.equal(image(policy), bare)
        assert torch.equal(image(policy), old)
    assert adapters.active == "default"
    assert torch.equal(image(policy), new)
    assert (new - old).abs().max() > 1e-3
    assert (old - bare).abs().max() > 1e-3


def test_a_failure_inside_using_switches_back(policy: sd3.SD3Policy) -> None:
    adapters = lora.Adapters(policy.network, policy.targets)
    with pytest.raises(KeyError), adapters.using("base"):
        raise KeyError
    assert adapters.active == "default"


@pytest.mark.parametrize("who", ["default", "old", "base"])
def test_only_default_ever_requires_gradients(policy: sd3.SD3Policy, who: lora.Who) -> None:
    adapters = lora.Adapters(policy.network, policy.targets)
    adapters.use(who)
    trainable = {id(p) for p in policy.pipe.transformer.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in adapters.parameters}


def test_gradients_reach_default_though_old_ran_in_between(policy: sd3.SD3Policy) -> None:
    """DiffusionNFT's step: the old velocity is computed between the forward and the backward pass."""
    adapters = lora.Adapters(policy.network, policy.targets)
    condition = policy.condition([PROMPT])
    x = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))

    def gradients(between: bool) -> list[torch.Tensor]:
        for parameter in adapters.parameters:
            parameter.grad = None
        v = policy.velocity(x, 0.5, condition)
        if between:
            with torch.no_grad():
                for who in ("old", "base"):
                    with adapters.using(who):
                        policy.velocity(x, 0.5, condition)
        v.square().mean().backward()
        return [parameter.grad.clone() for parameter in adapters.parameters if parameter.grad is not None]

    plain, interrupted = gradients(False), gradients(True)
    assert len(plain) == len(adapters.parameters)
    assert max(float(g.abs().max()) for g in plain) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, interrupted, strict=True))
    assert all(parameter.grad is None for parameter in adapters.old_parameters)


def test_update_old_is_a_moving_average(policy: sd3.SD3Policy) -> None:
    adapters = lora.Adapters(policy.network, policy.targets)
    before = [parameter.clone() for parameter in adapters.old_parameters]
    shake(adapters)
    adapters.update_old(0.75)
    for old, start, new in zip(adapters.old_parameters, before, adapters.parameters, strict=True):
        torch.testing.assert_close(old, 0.75 * start + 0.25 * new, rtol=0, atol=4 * EPS)  # values below 2, 4 roundings
    adapters.update_old()
    assert all(torch.equal(a, b) for a, b in zip(adapters.parameters, adapters.old_parameters, strict=True))
    with pytest.raises(RecastError, match=r"\[0, 1\], not 2"):
        adapters.update_old(2)


def test_plain_diffusers_loads_the_folder_and_gives_the_same_image(
    policy: sd3.SD3Policy, folder: Path, tmp_path: Path
) -> None:
    adapters = lora.Adapters(policy.network, policy.targets)
    shake(adapters)
    trained = generate(policy, [PROMPT] * 2, [7, 8], steps=4, method="euler")
    assert adapters.save(tmp_path / "lora").name == "pytorch_lora_weights.safetensors"
    pipe = StableDiffusion3Pipeline.from_pretrained(folder)
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 8)]
    settings = {"num_images_per_prompt": 2, "num_inference_steps": 4, "guidance_scale": 1.0, "output_type": "pt"}
    pipe.load_lora_weights(tmp_path / "lora")
    assert torch.equal(pipe(PROMPT, generator=generators, **settings).images, trained)


def test_the_same_holds_on_the_shapes_base(tmp_path: Path) -> None:
    policy = families.load(config.policy(model="shapes"))
    adapters = lora.Adapters(policy.network, policy.targets)
    assert len(adapters.parameters) == 2 * 31
    shake(adapters)
    trained = generate(policy, [PROMPT], [7], steps=10, method="euler")
    adapters.save(tmp_path)
    pipe = families.load(config.policy(model="shapes")).pipe
    pipe.load_lora_weights(tmp_path)
    settings = {"num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 1, "output_type": "pt"}
    assert torch.equal(pipe(PROMPT, generator=torch.Generator().manual_seed(7), **settings).images, trained)


def test_saving_gives_the_same_bytes_and_loads_back(policy: sd3.SD3Policy, tmp_path: Path) -> None:
    adapters = lora.Adapters(policy.network, policy.targets)
    shake(adapters)
    new = image(policy)
    first, second = adapters.save(tmp_path / "a"), adapters.save(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [lora.FILE]
    adapters.load(tmp_path / "a", "old")
    with adapters.using("old"):
        assert torch.equal(image(policy), new)
    shake(adapters, 1)  # so that the two differ: it is the old one that is asked for
    adapters.save(tmp_path / "c", "old")
    assert {k: v.tolist() for k, v in load_file(tmp_path / "c" / lora.FILE).items()} == {
        k: v.tolist() for k, v in load_file(first).items()
    }


def test_adapter_files_that_do_not_fit_are_refused(policy: sd3.SD3Policy, tmp_path: Path) -> None:
    adapters = lora.Adapters(policy.network, policy.targets)
    with pytest.raises(RecastError, match="the adapter file does not exist"):
        adapters.load(tmp_path)
    lora.Adapters(tiny.pipeline().transformer, sd3.SD3Policy.targets, rank=4, alpha=8).save(tmp_path / "small")
    with pytest.raises(RecastError, match="its rank is 4, but this policy's is 32"):
        adapters.load(tmp_path / "small")
    lora.Adapters(tiny.pipeline().transformer, sd3.SD3Policy.targets, rank=32, alpha=32).save(tmp_path / "weak")
    with pytest.raises(RecastError, match="its alpha is 32, but this policy's is 64"):
        adapters.load(tmp_path / "weak")
    shapes = families.load(config.policy(model="shapes"))
    lora.Adapters(shapes.network, shapes.targets).save(tmp_path / "shapes")
    with pytest.raises(RecastError, match="is for another transformer"):
        adapters.load(tmp_path / "shapes")
    whole = adapters.save(tmp_path / "cut").read_bytes()
    (tmp_path / "cut" / lora.FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecastError, match="the adapter file cannot be read"):
        adapters.load(tmp_path / "cut")
    (tmp_path / "foreign").mkdir()
    save_file({"transformer.x.lora_A.weight": torch.zeros(1)}, tmp_path / "foreign" / lora.FILE)
    with pytest.raises(RecastError, match="its rank is None"):
        adapters.load(tmp_path / "foreign")


def test_adapters_are_float32_on_a_bfloat16_base(folder: Path) -> None:
    """In bfloat16 an average with decay 0.999 does not move, and small optimizer steps are lost."""
    policy = families.load(config.policy(model=str(folder), dtype="bfloat16"))
    adapters = lora.Adapters(policy.network, policy.targets)
    assert {p.dtype for p in (*adapters.parameters, *adapters.old_parameters)} == {torch.float32}
    assert policy.pipe.transformer.dtype == torch.bfloat16
    policy.velocity(torch.randn(1, *policy.latent_shape), 0.5, policy.condition([PROMPT])).square().mean().backward()
    gradients = [p.grad for p in adapters.parameters if p.grad is not None]
    assert len(gradients) == len(adapters.parameters)
    with torch.no_grad():
        adapters.parameters[0].fill_(0.1)
        adapters.old_parameters[0].fill_(0.09)
    for _ in range(100):
        adapters.update_old(0.999)
    # 100 averages with a rounding or two each; they move the value by 1 % of it.
    assert adapters.old_parameters[0][0, 0].item() == pytest.approx(0.1 - 0.01 * 0.999**100, rel=200 * EPS)


def test_building_adapters_reseeds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    transformer = tiny.pipeline().transformer
    seeded.clear()
    lora.Adapters(transformer, sd3.SD3Policy.targets)
    assert seeded == []


def test_a_folder_that_cannot_be_written_is_one_sentence(policy: sd3.SD3Policy, tmp_path: Path) -> None:
    adapters = lora.Adapters(policy.network, policy.targets)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecastError, match="cannot be written: (File exists|Not a directory)"):
        adapters.save(tmp_path / "file")
    with pytest.raises(RecastError, match="unknown adapter 'base' to save"):
        adapters.save(tmp_path, "base")  # type: ignore[arg-type]


def test_bad_settings_are_named(policy: sd3.SD3Policy) -> None:
    with pytest.raises(RecastError, match="above 0, not 0 and 64"):
        lora.Adapters(policy.network, policy.targets, rank=0)
    adapters = lora.Adapters(policy.network, policy.targets)
    with pytest.raises(RecastError, match="already has adapters: default, old"):
        lora.Adapters(policy.network, policy.targets)
    with pytest.raises(RecastError, match="unknown adapter 'new'"):
        adapters.use("new")  # type: ignore[arg-type]
