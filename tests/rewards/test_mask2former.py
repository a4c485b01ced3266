"""Mask2Former from mmdet's checkpoints: the names, the shapes, and the layers whose tensors are stored differently."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import mmdet_layout
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recast.errors import RecastError
from recast.rewards import geneval_detector, mask2former
from tolerance import tolerance

META = {"CLASSES": ("person", "bicycle"), "config": "model = dict()", "epoch": 50, "hook_msgs": {"iter": 368750}}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return mmdet_layout.tensors(**mmdet_layout.SMALL)


@pytest.fixture(scope="module")
def model(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = mmdet_layout.save(tmp_path_factory.mktemp("mmdet") / "tiny.pth", META, OrderedDict(tensors))
    return mask2former.load(path, 80).eval()


def found(model: Any, ending: str) -> Any:
    """The one module whose name ends so."""
    (module,) = [module for name, module in model.named_modules() if name.endswith(ending)]
    return module


def assert_equal(ours: Tensor, expected: Tensor, terms: int) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(ours, expected, atol=tolerance(terms, scale), rtol=0)


def test_every_tensor_of_the_published_model_has_its_place() -> None:
    """The names and shapes of mmdet's Swin-S with 80 classes, none missing, none left over."""
    shapes = mmdet_layout.shapes()
    assert len(shapes) == 649
    empty = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    config = mask2former.config(empty)
    swin = config.backbone_config
    assert (swin.embed_dim, swin.depths, swin.num_heads, swin.window_size) == (96, [2, 2, 18, 2], [3, 6, 12, 24], 7)
    assert (config.encoder_layers, config.decoder_layers, config.num_queries, config.num_labels) == (6, 10, 100, 80)
    assert (config.num_attention_heads, config.encoder_feedforward_dim, config.dim_feedforward) == (8, 1024, 2048)
    state = mask2former.renamed(empty)
    # Three for one in 24 blocks (weight and bias) and in 9 layers of the decoder; 24 indices are not loaded.
    assert len(state) == 649 + 2 * 2 * 24 + 2 * 2 * 9 - 24
    assert sum(value.numel() for value in state.values()) == 68_741_083 - 2 * 768  # without a norm that is not used
    assert not [name for name in state if name.startswith(("backbone", "panoptic_head"))]


def test_merged_patches_are_read_in_mmdets_order(model: Any, tensors: dict[str, Tensor]) -> None:
    """mmdet unfolds two by two patches: channel, row, column."""
    image = torch.randn(1, 6, 10, 8, generator=torch.Generator().manual_seed(1))
    name = "backbone.stages.0.downsample."
    unfolded = functional.unfold(image.permute(0, 3, 1, 2), 2, stride=2).transpose(1, 2)
    normed = functional.layer_norm(unfolded, (32,), tensors[name + "norm.weight"], tensors[name + "norm.bias"])
    expected = normed @ tensors[name + "reduction.weight"].T
    merge = found(model, "encoder.layers.0.downsample")
    assert_equal(merge(image.reshape(1, 60, 8), (6, 10)), expected, 32)
    plain = functional.linear(normed, merge.reduction.weight)
    assert (plain - expected).abs().max() > 0.1  # the order matters


def test_windows_attend_as_in_mmdet(model: Any, tensors: dict[str, Tensor]) -> None:
    """One projection for queries, keys and values; positions relative to each other by row, then by column."""
    block, name, heads, side = found(model, "encoder.layers.1.blocks.0"), "backbone.stages.1.blocks.0.", 2, 3
    tokens = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(2))
    x = functional.layer_norm(tokens, (16,), tensors[name + "norm1.weight"], tensors[name + "norm1.bias"])
    qkv = x @ tensors[name + "attn.w_msa.qkv.weight"].T + tensors[name + "attn.w_msa.qkv.bias"]
    q, k, v = qkv.view(9, 3, heads, 8).permute(1, 2, 0, 3)
    places = [(row, column) for row in range(side) for column in range(side)]
    index = [[(a[0] - b[0] + 2) * 5 + a[1] - b[1] + 2 for b in places] for a in places]
    bias = tensors[name + "attn.w_msa.relative_position_bias_table"][torch.tensor(index)].permute(2, 0, 1)
    mixed = ((q @ k.transpose(1, 2) / 8**0.5 + bias).softmax(-1) @ v).transpose(0, 1).reshape(1, 9, 16)
    y = tokens + mixed @ tensors[name + "attn.w_msa.proj.weight"].T + tensors[name + "attn.w_msa.proj.bias"]
    x = functional.layer_norm(y, (16,), tensors[name + "norm2.weight"], tensors[name + "norm2.bias"])
    x = functional.gelu(x @ tensors[name + "ffn.layers.0.0.weight"].T + tensors[name + "ffn.layers.0.0.bias"])
    expected = y + x @ tensors[name + "ffn.layers.1.weight"].T + tensors[name + "ffn.layers.1.bias"]
    output = block(tokens, (side, side))
    assert_equal(output if isinstance(output, Tensor) else output[0], expected, 64 * 9)


def decoded(layer: int, attention: int, tensors: dict[str, Tensor]) -> torch.nn.MultiheadAttention:
    """The attention of torch that mmdet wraps."""
    module = torch.nn.MultiheadAttention(32, 4)
    name = f"panoptic_head.transformer_decoder.layers.{layer}.attentions.{attention}.attn."
    module.load_state_dict({each.removeprefix(name): tensors[each] for each in tensors if each.startswith(name)})
    return module.eval()


def test_a_layer_of_the_decoder_is_mmdets(model: Any, tensors: dict[str, Tensor]) -> None:
    """Cross-attention, then self-attention, then a hidden layer, with a norm after each."""
    generator = torch.Generator().manual_seed(3)
    query, place, memory, where = (torch.randn(n, 1, 32, generator=generator) for n in (6, 6, 20, 20))
    top = "panoptic_head.transformer_decoder.layers.1."

    def norm(x: Tensor, number: int) -> Tensor:
        name = f"{top}norms.{number}."
        return functional.layer_norm(x, (32,), tensors[name + "weight"], tensors[name + "bias"])

    with torch.no_grad():
        x = norm(query + decoded(1, 0, tensors)(query + place, memory + where, memory)[0], 0)
        x = norm(x + decoded(1, 1, tensors)(x + place, x + place, x)[0], 1)
        hidden = (x @ tensors[top + "ffns.0.layers.0.0.weight"].T + tensors[top + "ffns.0.layers.0.0.bias"]).relu()
        out = hidden @ tensors[top + "ffns.0.layers.1.weight"].T + tensors[top + "ffns.0.layers.1.bias"]
        layer = found(model, "transformer_module.decoder.layers.1")
        ours = layer(
            query,
            level_index=0,
            position_embeddings=[where],
            query_position_embeddings=place,
            encoder_hidden_states=[memory],
        )
    assert_equal(ours[0] if isinstance(ours, tuple) else ours, norm(x + out, 2), 40 * 32)


def test_the_detector_takes_the_file(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = mmdet_layout.save(tmp_path / "tiny.pth", META, tensors)
    detector = geneval_detector.load(path, torch.device("cpu"))
    detector.edges = (96, 192)
    seen = next(detector.detect(torch.full((1, 3, 64, 80), 200, dtype=torch.uint8), [0.0], 1))
    assert len(seen.scores) > 0
    assert seen.masks.shape[1:] == (64, 80)


def test_numbers_of_numpy_beside_the_tensors_are_read_and_other_classes_refused(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    best = {"best_score": np.float64(0.44), "seed": np.int64(1)}
    path = mmdet_layout.save(tmp_path / "best.pth", META | {"hook_msgs": best}, tensors)
    assert mask2former.load(path, 80).config.num_queries == 6
    other = mmdet_layout.save(tmp_path / "other.pth", META | {"config": Path("config.py")}, tensors)
    with pytest.raises(RecastError, match=r"no Mask2Former model in .*other.pth.* not a file of plain tensors"):
        geneval_detector.load(other, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"panoptic_head.query_feat.weight": None}, "no tensor panoptic_head.query_feat.weight, so it is no Mask2Fo"),
        ({"backbone.norm2.bias": None}, "it has no tensor model.*hidden_states_norms.stage3.bias"),
        ({"backbone.norm2.bias": torch.zeros(3)}, r"stage3.bias has the shape \(3,\), not \(32,\)"),
        ({"roi_head.weight": torch.zeros(3)}, "it has a tensor roi_head.weight, which this model does not have"),
        (
            {
                f"panoptic_head.cls_embed.{each}": torch.zeros(134, *rest)
                for each, rest in (("weight", [32]), ("bias", []))
            },
            "it has 133 classes, not the 80 of COCO's instances",
        ),
    ],
)
def test_another_file_is_refused(
    tensors: dict[str, Tensor], tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    changed = {name: value for name, value in (tensors | change).items() if value is not None}
    path = mmdet_layout.save(tmp_path / "x.pth", META, changed)
    with pytest.raises(RecastError, match=message):
        geneval_detector.load(path, torch.device("cpu"))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=r"no Mask2Former model in .*missing.pth.*does not exist"):
        geneval_detector.load(tmp_path / "missing.pth", torch.device("cpu"))
