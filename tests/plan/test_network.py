"""Costs of policies: every family, every shipped configuration, quantization, and one's own family."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tiny
from recast import config
from recast.errors import RecastError
from recast.flow import configurations, families
from recast.flow.configurations import Configuration
from recast.plan import network, scorers
from recast.plan.network import Network
from recast.rewards import catalog

ROOT = Path(__file__).parents[2]
PARAMETERS = {
    "stabilityai/stable-diffusion-3.5-medium": 2_243_171_520,
    "stabilityai/stable-diffusion-3.5-large": 8_056_627_520,
    "black-forest-labs/FLUX.1-dev": 11_901_408_320,
    "black-forest-labs/FLUX.1-schnell": 11_891_178_560,
    "black-forest-labs/FLUX.2-klein-base-4B": 3_875_544_576,
    "black-forest-labs/FLUX.2-klein-base-9B": 9_078_581_248,
    "Qwen/Qwen-Image": 20_430_401_088,
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": 1_604_462_752,
    "Tongyi-MAI/Z-Image": 6_154_908_736,
}


def shrunk(found: Configuration) -> Configuration:
    """The same with few blocks and a small text encoder: what differs between families stays."""
    part = found.parts["transformer"]
    sizes = {
        "num_layers": 2,
        "dual_attention_layers": [0],
        "num_single_layers": 1,
        "n_layers": 2,
        "n_refiner_layers": 1,
    }
    known = {key: value for key, value in sizes.items() if key in part.settings or key.startswith(("num_layers", "n_"))}
    own = {**part.settings, **{k: v for k, v in known.items() if part.kind.startswith("ZImage") == k.startswith("n_")}}
    parts = {name: each for name, each in found.parts.items() if not name.startswith("text_encoder")}
    return replace(found, parts={**parts, "transformer": replace(part, settings=own)})


@pytest.mark.parametrize("name", [name for name in PARAMETERS if not name.endswith(("large", "schnell", "9B"))])
def test_every_family_is_counted_by_its_own_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = configurations.read
    monkeypatch.setattr(configurations, "read", lambda source: shrunk(read(source)))
    made = Network(config.policy(model=name, dtype="bfloat16", resolution=512))
    assert made.origin == "shipped"
    assert set(made.velocity.flops) <= {"bfloat16", "float32"}
    bound = made.policy.row_bytes
    assert 0.4 * bound < made.velocity.memory.each < 1.05 * bound  # what `estimate.memory` reckons with
    weights = sum(each.numel() for each in made.policy.network.parameters())
    tokens = made.policy.image_tokens
    assert made.velocity.total > 0.5 * 2 * weights * tokens * 0.5
    assert made.decoding.total > made.encoding.total > 1e11


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_shipped_transformers_have_the_published_sizes(name: str, count: int) -> None:
    part = configurations.read(name).parts["transformer"]
    with torch.device("meta"):
        assert sum(each.numel() for each in part.make().parameters()) == count


def test_text_encoders_have_the_published_sizes() -> None:
    sizes = {}
    with torch.device("meta"):
        for name in ("stabilityai/stable-diffusion-3.5-medium", "Qwen/Qwen-Image"):
            for key, part in configurations.read(name).parts.items():
                if key.startswith("text_encoder"):
                    sizes[part.kind, key] = sum(each.numel() for each in part.make().parameters()) / 1e9
    rounded = [round(size, 2) for size in sizes.values()]
    assert rounded == [0.12, 0.69, 4.76, 8.29]  # CLIP-L, CLIP-G, T5-XXL's encoder, Qwen2.5-VL-7B


@pytest.mark.parametrize("name", ["clipscore", "pickscore", "imagereward", "geneval", "hpsv3", "alignment"])
def test_rewards_have_the_bytes_that_were_measured(name: str) -> None:
    found = scorers.scorer(name, None)
    assert sum(found.models.values()) == pytest.approx(catalog.measured()[name].parameters, rel=1e-7)
    assert found.activations > 0


def test_rewards_share_a_clip_but_not_two_checkpoints() -> None:
    one, two = (scorers.scorer(name, None) for name in ("clipscore", "aesthetic"))
    assert scorers.resident([one, two]) - scorers.resident([one]) < 4e6  # the head
    one, two = (scorers.scorer(name, None) for name in ("hpsv2", "pickscore"))
    assert scorers.resident([one, two]) == 2 * scorers.resident([one])
    assert scorers.resident([scorers.scorer("clipscore", {"offload": True})]) == 0
    assert scorers.scorer("clipscore", {"device": "cpu"}).where == "cpu"
    assert scorers.scorer("package.module:Mine", None).where == "unknown"
    # A ViT-L/14 by hand: 257 tokens, 24 layers of 12 d² products per token and their attention; the first convolution.
    by_hand = 24 * (2 * 257 * 12 * 1024**2 + 4 * 257**2 * 1024) + 2 * 256 * 3 * 14**2 * 1024 + 2 * 1024 * 768
    assert sum(scorers.scorer("clipscore", None).flops.values()) == by_hand


def test_a_local_folder_is_read_and_its_bytes_grow_in_a_line(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "tiny")
    for path in folder.rglob("*.safetensors"):
        path.unlink()  # only configurations are needed
    made = Network(config.policy(model=str(folder), guidance=2.0))
    assert made.origin == "folder"
    wider = Network(config.policy(model=str(folder), guidance=2.0))
    wider.points = (5, 20)
    assert wider.velocity.flops == pytest.approx(made.velocity.flops)
    for rows in (1, 5, 20):
        assert wider.velocity.memory.at(rows) == pytest.approx(made.velocity.memory.at(rows), rel=0.01)
    wide, narrow = made, made.guided(1.0)
    assert wide.velocity.total == pytest.approx(2 * narrow.velocity.total, rel=1e-6)
    assert made.guided(2.0) is made


def test_quantized_bytes() -> None:
    with torch.device("meta"):
        linear = torch.nn.Linear(128, 64, bias=True, dtype=torch.bfloat16)
    assert network.weight_bytes(linear) == 2 * (128 * 64 + 64)
    assert network.weight_bytes(linear, "int8") == 128 * 64 + 64 * 2 + 64 * 2
    assert network.weight_bytes(linear, "nf4") == 128 * 64 // 2 + 128 * 64 // 64 * 4 + 64 * 2


def test_unknown_models_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=r"configuration of the model 'nobody/knows' is not known: give a folder"):
        Network(config.policy(model="nobody/knows"))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "OtherPipeline"}))
    with pytest.raises(RecastError, match=r"is a OtherPipeline, which no family supports"):
        Network(config.policy(model=str(tmp_path)))
    index = {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(RecastError, match=r"config.json: the configuration cannot be read"):
        Network(config.policy(model=str(tmp_path)))


def test_the_hubs_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.folder(tmp_path / "tiny")
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _name, file: str(folder / file))
    assert configurations.read("somebody/tiny").origin == "cache"


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks/plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_memory_is_what_the_allocator_holds_in_the_real_trainer(tmp_path: Path) -> None:
    """Lines from 2 and 8 rows, at 64."""
    measuring = benchmark()
    pair, _ = Network(config.policy()).training(config.load(ROOT / "recipes/shapes.yaml").train)
    for name, how in (("shapes, 64 pairs", "plain"), ("shapes, 64 pairs, checkpointing", "checkpointed")):
        real = measuring.allocated(measuring.call_of(name, tmp_path))
        assert pair.memory[how].at(64) == pytest.approx(real, rel=0.1)


def test_the_published_comparison_is_within_a_tenth() -> None:
    found = json.loads((ROOT / "benchmarks/results/plan.json").read_text(encoding="utf-8"))["memory"]
    assert set(found) == set(benchmark().CASES)
    for row in found.values():
        assert row["computed"] == pytest.approx(row["allocated"], rel=0.1)


def test_ones_own_family_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests/flow")
    settings = config.policy(model="toy", family="test_families:Toy")
    made = Network(settings)
    assert made.origin == "loaded"
    assert made.parameters["transformer"] == sum(each.nbytes for each in families.load(settings).network.parameters())
    assert made.velocity.total > 0
    pair, adapter = made.training(config.load(ROOT / "recipes/shapes.yaml").train)
    assert adapter > 0
    assert pair.memory["plain"].at(2) > 0
