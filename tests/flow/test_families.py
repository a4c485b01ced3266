"""How a model finds its family, one's own family in one class, and settings that all families share."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from numpy.typing import NDArray
from torch import Tensor, nn

import tiny
from recast import config, objects
from recast.errors import RecastError
from recast.estimate import stage as estimation
from recast.flow import configurations, families, loading, sd3
from recast.flow.generate import generate
from recast.flow.pipeline import PipelinePolicy, stacked, trimmed
from recast.flow.policy import Condition
from recast.progress import no_progress
from recast.propose import stage as proposing
from recast.train import stage as training

SOURCE = Path(__file__).parents[2] / "src/recast"
PROMPT = "a red circle and a blue square"
DEPTH = 5e-6
"""Float32 rounding (6e-8) of sums over some hundred numbers, over three steps through two blocks and a VAE."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("family"))


class Network(nn.Module):
    """A network of one layer that pulls a latent towards the prompt's length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.peft_config: dict[str, object] = {}

    def add_adapter(self, settings: object, name: str) -> None:
        """As diffusers' models have it."""
        from peft import inject_adapter_in_model

        inject_adapter_in_model(settings, self, name)
        self.peft_config[name] = settings

    def forward(self, x: Tensor, level: Tensor, length: Tensor) -> Tensor:
        """A velocity."""
        found: Tensor = self.layer(x) * level[:, None] - length[:, None] / 100
        return found


class Toy:
    """The whole of one's own family: latents (3,) are the color of a 64 × 96 image."""

    targets, image_size, latent_shape, row_bytes = "layer", (64, 96), (3,), 12

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.device, self.network = torch.device("cpu"), Network()
        self.model, self.identity = self.network, {"family": "toy"}

    @classmethod
    def load(cls, _source: str, _config: config.PolicyConfig, _device: torch.device) -> "Toy":
        """What `policy.family` needs."""
        return cls()

    def sigmas(self, steps: int) -> list[float]:
        return torch.linspace(0, 1, steps + 1).tolist()

    def condition(self, prompts: list[str]) -> Condition:
        return Condition({"length": torch.tensor([float(len(prompt)) for prompt in prompts])})

    def velocity(self, x: Tensor, sigma: float | Tensor, condition: Condition) -> Tensor:
        assert x.shape == (len(x), *self.latent_shape)  # broadcasting would hide latents of another rank
        level = torch.as_tensor(sigma, dtype=torch.float32).expand(len(x))
        found: Tensor = self.model(x, level, condition.expand(len(x)).tensors["length"])
        return found

    def decode(self, latents: Tensor) -> Tensor:
        return torch.sigmoid(latents)[:, :, None, None].expand(-1, -1, 64, 96)

    def encode(self, images: Tensor) -> Tensor:
        return torch.logit(images.mean((2, 3)), eps=1e-3)


def bright(images: Tensor, prompts: list[str], metadata: object = None) -> NDArray[np.float64]:
    """A reward."""
    found: NDArray[np.float64] = images.double().mean((1, 2, 3)).numpy()
    return found


def test_ones_own_family_takes_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    (tmp_path / "prompts.txt").write_text("a\nbbbb\ncc\n")
    given = {
        "world": {"kind": "images"},
        "policy": {"model": "toy", "family": "test_families:Toy", "device": "cpu"},
        "prompts": {"source": str(tmp_path / "prompts.txt")},
        "propose": {"source": "policy"},
        "rewards": {"test_families:bright": None},
        "estimate": {"steps": 3, "samples": 2, "noisings": 2},
        "weigh": {"method": "static"},
        "train": {"prompts": str(tmp_path / "prompts.txt"), "epochs": 1, "prompts_per_epoch": 2, "images_per_prompt": 2}
        | {"batch": 4, "steps": 3, "rank": 2, "alpha": 4, "trackers": [], "preview_every": 1},
    }
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(given))
    recipe = config.load(path)
    out = tmp_path / "run"
    proposing.propose(recipe, out, no_progress)
    estimation.estimate(recipe, out, no_progress)
    assert (out / "gains.json").is_file()
    training.train(recipe, out)
    assert (out / "lora/pytorch_lora_weights.safetensors").is_file()


def test_the_stages_mention_no_family() -> None:
    names = re.compile(r"\bsd3\b|SD3|Stable ?Diffusion3|\bflux|Flux|QwenImage|qwen\b|Sana\b|ZImage|zimage", re.ASCII)
    stages = ("propose", "estimate", "weigh", "train", "evaluate", "judge", "report", "sweep", "core", "config", "cli")
    outside = [path for name in stages for path in (SOURCE / name).rglob("*.py")]
    outside += [SOURCE / f"{name}.py" for name in ("identity", "images", "prompts", "device", "processes")]
    assert len(outside) > 60
    assert [f"{path.name}: {found[0]}" for path in outside if (found := names.search(path.read_text()))] == []


def test_a_family_is_found_by_its_pipeline(folder: Path) -> None:
    assert families.find(str(folder)) is sd3.SD3Policy
    for place in families.FAMILIES.values():
        assert issubclass(objects.find(place, "x", "load"), PipelinePolicy)


def test_an_unsupported_pipeline_is_refused_by_naming_the_others(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KolorsPipeline"}))
    with pytest.raises(RecastError, match="is a KolorsPipeline, which no family supports: .*FluxPipeline.*family as"):
        families.load(config.policy(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("toy", "policy.family = 'toy' must have the form package.module:Object"),
        ("no_such_module:Toy", "policy.family = 'no_such_module:Toy' cannot be imported"),
        ("recast.flow.sd3:Nothing", "the module recast.flow.sd3 has no 'Nothing'"),
        ("recast.flow.sd3:PROJECTIONS", "it has no method load"),
    ],
)
def test_a_wrong_family_is_one_sentence(folder: Path, family: str, words: str) -> None:
    with pytest.raises(RecastError, match=words):
        families.load(config.policy(model=str(folder), family=family))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_images_need_not_be_square(folder: Path, guidance: float) -> None:
    policy = families.load(config.policy(model=str(folder), resolution=[64, 96], guidance=guidance))
    assert isinstance(policy, PipelinePolicy)
    assert policy.latent_shape == (16, 8, 12)
    ours = generate(policy, [PROMPT] * 2, [3, 4], steps=3, method="euler")
    theirs = policy.pipe(
        PROMPT,
        num_images_per_prompt=2,
        height=64,
        width=96,
        num_inference_steps=3,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in (3, 4)],
        output_type="pt",
    ).images
    assert ours.shape == (2, 3, 64, 96)
    assert torch.equal(ours, theirs)
    assert policy.encode(ours).shape == (2, 16, 8, 12)
    with pytest.raises(RecastError, match=r"shape \(B, 3, 64, 96\)"):
        policy.encode(ours.transpose(2, 3))


@pytest.mark.parametrize("wrong", [0, -64, 64.5, "big", True, [64], [64, 0], [64, None], [64, 64, 64]])
def test_a_resolution_is_one_number_or_two(wrong: object) -> None:
    assert config.policy(resolution=[64, 96]).resolution == (64, 96)
    assert config.policy(resolution=64).resolution == 64
    assert config.policy(resolution=None).resolution is None
    with pytest.raises(RecastError, match=r"policy: resolution = .*: must be a number of pixels or \[height, width\]"):
        config.policy(resolution=wrong)


def test_large_is_a_matter_of_the_folder() -> None:
    """SD3.5-Large: 38 blocks of width 2,432 without dual attention (its transformer/config.json)."""
    with torch.device("meta"):
        name = "stabilityai/stable-diffusion-3.5-large"
        transformer = SD3Transformer2DModel(**configurations.transformer(name))
        assert sum(parameter.numel() for parameter in transformer.parameters()) == 8_056_627_520
        found = [each for name, each in transformer.named_modules() if re.fullmatch(sd3.SD3Policy.targets, name)]
    assert len(found) == 38 * 8 - 1  # the last block's text stream ends in its attention
    assert sum(32 * (each.in_features + each.out_features) for each in found) == 47_161_344  # at rank 32


def test_conditions_of_any_tensors() -> None:
    rows = [
        {"embeds": torch.ones(2, 3), "scale": torch.tensor(1.0)},
        {"embeds": torch.ones(4, 3), "scale": torch.tensor(2.0)},
    ]
    made = Condition(stacked(rows), empty=stacked(rows[:1]))
    assert made.tensors["embeds"].shape == (2, 4, 3)
    assert made.rows([1, 1, 0]).tensors["scale"].tolist() == [2.0, 2.0, 1.0]
    assert made.rows([0]).expand(5).tensors["embeds"].is_contiguous()
    moved = made.to("meta")
    assert {tensor.device.type for each in (moved.tensors, moved.empty) for tensor in each.values()} == {"meta"}
    with pytest.raises(RecastError, match="3 samples cannot be conditioned on 2 prompts"):
        made.expand(3)


def test_padding_that_no_row_needs_is_cut_and_a_full_mask_left_out() -> None:
    embeds, mask = torch.arange(24.0).view(2, 6, 2), torch.zeros(2, 6, dtype=torch.long)
    mask[0, :3] = mask[1, :2] = 1
    found, kept = trimmed(embeds, mask, mask.sum(1))
    assert torch.equal(found, embeds[:, :3])
    assert kept is not None
    assert kept.tolist() == [[1, 1, 1], [1, 1, 0]]
    found, kept = trimmed(embeds[:1], mask[:1], mask[:1].sum(1))
    assert found.shape == (1, 3, 2)
    assert kept is None


@pytest.mark.parametrize("setting", [{"attention": "_native_math"}, {"compile": True}])
def test_attention_and_compilation_change_rounding_only(
    folder: Path, setting: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inductor gives the same image but needs a minute for it: here its graphs are run without being compiled.
    compiled = nn.Module.compile
    seen: list[str] = []

    def traced(module: nn.Module, *_given: object, **_options: object) -> None:
        seen.append(type(module).__name__)
        compiled(module, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", traced)
    plain = generate(families.load(config.policy(model=str(folder))), [PROMPT], [0], steps=2)
    found = generate(families.load(config.policy(model=str(folder), **setting)), [PROMPT], [0], steps=2)
    torch.testing.assert_close(found, plain, atol=DEPTH, rtol=0)
    assert seen == (["SD3Transformer2DModel"] if "compile" in setting else [])


def test_an_unknown_attention_is_one_sentence(folder: Path) -> None:
    with pytest.raises(RecastError, match="policy.attention = fast cannot be used: "):
        families.load(config.policy(model=str(folder), attention="fast"))


@pytest.mark.parametrize(("quantize", "library"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_quantization_without_its_library_is_one_sentence(
    folder: Path, quantize: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (library, f"{library}.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RecastError, match=f"policy.quantize = {quantize} needs {library}: pip install"):
        families.load(config.policy(model=str(folder), quantize=quantize))


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_only_the_transformer_is_quantized(folder: Path, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to diffusers, which needs the libraries for the rest: benchmarks/quantize.py runs int8 with them."""
    given: dict[str, object] = {}

    class Library:
        Int8WeightOnlyConfig = staticmethod(lambda: "int8, weights only")

    def load(_folder: object, **arguments: object) -> None:
        given.update(arguments)
        raise ValueError("seen")

    monkeypatch.setattr(objects, "library", lambda *_: Library)
    monkeypatch.setattr(loading, "TorchAoConfig", lambda kind: kind)
    monkeypatch.setattr(loading, "BitsAndBytesConfig", lambda **kind: kind)
    monkeypatch.setattr(loading, "PipelineQuantizationConfig", lambda quant_mapping: quant_mapping)
    monkeypatch.setattr(StableDiffusion3Pipeline, "from_pretrained", load)
    with pytest.raises(RecastError, match="needs a GPU: choose int8 or none" if quantize == "nf4" else "seen"):
        families.load(config.policy(model=str(folder), quantize=quantize))
    if quantize == "nf4":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(RecastError, match="seen"):
            families.load(config.policy(model=str(folder), quantize=quantize, device="cpu"))
    expected = {
        "int8": "int8, weights only",
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    }
    assert given["quantization_config"] == {"transformer": expected[quantize]}
