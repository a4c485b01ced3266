"""HPSv2 against a few lines of the original layers, on a tiny checkpoint in open_clip's layout."""

import re
from pathlib import Path

import numpy as np
import pytest
import tiny_clip
import torch
from tiny_clip import pictures
from torch import Tensor, nn
from torch.nn import functional

from recast.errors import RecastError
from recast.rewards import hpsv2
from recast.rewards.hpsv2 import HPSv2
from recast.shapes import models
from tolerance import tolerance

PROMPTS = ["a red circle", "two blue squares", "A &amp;amp; B “quoted” ｆｕｌｌ  ﬁne"]
VOCABULARY = models.tokenizer(length=77).vocab_size


class Block(nn.Module):
    """open_clip's residual block: torch's own attention with a fused projection, exact gelu."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, hidden), "c_proj": nn.Linear(hidden, width)})

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """One block."""
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Tower(nn.Module):
    """`resblocks`, one after the other."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))


class OpenClip(nn.Module):
    """ViT-H-14's parts under their published names; heads are 80 and 64 wide, as there."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, 160, 56, 56, bias=False)
        self.visual.class_embedding = nn.Parameter(torch.randn(160) * 0.1)
        self.visual.positional_embedding = nn.Parameter(torch.randn(17, 160) * 0.1)
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(160), nn.LayerNorm(160)
        self.visual.transformer = Tower(160, 2, 96, 3)
        self.visual.proj = nn.Parameter(torch.randn(160, 64) * 0.1)
        self.token_embedding = nn.Embedding(VOCABULARY, 64)
        self.positional_embedding = nn.Parameter(torch.randn(77, 64) * 0.1)
        self.transformer = Tower(64, 1, 80, 2)
        self.ln_final = nn.LayerNorm(64)
        self.text_projection = nn.Parameter(torch.randn(64, 64) * 0.1)
        self.logit_scale = nn.Parameter(torch.tensor(4.6))

    def image(self, pixels: Tensor) -> Tensor:
        """Normalised embedding of 224-pixel squares."""
        x = self.visual.conv1(pixels).flatten(2).mT
        x = torch.cat([self.visual.class_embedding.expand(len(x), 1, -1), x], 1) + self.visual.positional_embedding
        x = self.visual.ln_pre(x)
        for block in self.visual.transformer.resblocks:
            x = block(x)
        return functional.normalize(self.visual.ln_post(x[:, 0]) @ self.visual.proj, dim=-1)

    def text(self, ids: Tensor) -> Tensor:
        """Normalised embedding of padded token ids."""
        x = self.token_embedding(ids) + self.positional_embedding
        mask = torch.full((77, 77), -torch.inf).triu(1)
        for block in self.transformer.resblocks:
            x = block(x, mask)
        ends = ids.eq(VOCABULARY - 1).int().argmax(-1)
        return functional.normalize(self.ln_final(x)[torch.arange(len(x)), ends] @ self.text_projection, dim=-1)


@pytest.fixture(scope="module")
def original() -> OpenClip:
    torch.manual_seed(0)
    model = OpenClip().eval().requires_grad_(False)
    for parameter in model.parameters():  # biases and norms start at 0 and 1, where a swap would go unseen
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(scope="module")
def file(original: OpenClip, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published file: weights under "state_dict", here with the prefix that some have."""
    path = tmp_path_factory.mktemp("hpsv2") / "HPS_v2.1_compressed.pt"
    state = {f"module.{name}": value for name, value in original.state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state}, path)
    tiny_clip.save_tokenizer(path.parent)
    return path


def test_scores_are_the_cosines_of_the_original_layers(original: OpenClip, file: Path) -> None:
    images, _ = pictures(224, 224)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (hpsv2.clip.MEAN, hpsv2.clip.STD))
    reward = HPSv2(file, tokenizer=file.parent)
    clean = ["a red circle", "two blue squares", 'a & b "quoted" full fine']
    ids = reward.clip.tokenizer(clean, padding="max_length", max_length=77, return_tensors="pt")["input_ids"]
    cosine = (original.image((images - mean) / std) * original.text(ids)).sum(-1)
    # 3 · 56 · 56 products of a patch, 650 in each of three layers for images, 500 in each of two for text.
    np.testing.assert_allclose(reward(images, PROMPTS), cosine, atol=tolerance(13_000), rtol=0)
    assert HPSv2(file.parent, tokenizer=file.parent).clip.model.text_model.config.num_attention_heads == 1


def test_the_whole_image_is_seen_on_black(file: Path) -> None:
    """A wide picture keeps its edges: 120 by 300 becomes 90 by 224, with 67 black rows above and below."""
    images = torch.ones(1, 3, 120, 300)
    images[..., :20] = 0.25
    seen = hpsv2.pixels(images)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (hpsv2.clip.MEAN, hpsv2.clip.STD))
    back = (seen * std + mean)[0]
    assert back.shape == (3, 224, 224)
    assert back[:, :67].abs().max() < tolerance(4)
    assert back[:, 157:].abs().max() < tolerance(4)
    torch.testing.assert_close(back[:, 70, -1], torch.ones(3), atol=tolerance(100), rtol=0)
    torch.testing.assert_close(back[:, 70, 2], torch.full((3,), 0.25), atol=1e-2, rtol=0)  # the edge reaches that far


@pytest.mark.parametrize(("height", "width", "margins"), [(300, 199, (37, 38, 0, 0)), (90, 200, (0, 0, 61, 62))])
def test_a_picture_is_resized_by_torchs_bicubic_filter(
    height: int, width: int, margins: tuple[int, int, int, int]
) -> None:
    """A noisy one, so that another filter would show; an odd rest goes to the right or below."""
    images = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    left, right, top, bottom = margins
    size = (224 - top - bottom, 224 - left - right)
    small = functional.interpolate(images, size, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (hpsv2.clip.MEAN, hpsv2.clip.STD))
    expected = (functional.pad(small, margins) - mean) / std
    torch.testing.assert_close(hpsv2.pixels(images), expected, atol=tolerance(4, scale=4), rtol=0)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("It’s  “two”\n dogs", 'it\'s "two" dogs'),
        ("fish &amp;amp; chips &lt;3", "fish & chips <3"),
        ("ﬁne ｗｉｄｅ Ａ", "fine wide a"),
        ("schÃ¶n", "schön"),
    ],
)
def test_prompts_are_cleaned_as_open_clip_does(text: str, clean: str) -> None:
    assert hpsv2.cleaned(text) == clean


def test_every_published_name_has_a_place(original: OpenClip) -> None:
    """The real sizes: 686 names (one of them the logit scale) become 910 less that one."""
    state: dict[str, Tensor] = {}
    for name, value in original.state_dict().items():
        match = re.match(r"(.*resblocks\.)0(\..*)", name)
        layers = (32 if name.startswith("visual") else 24) if match else 1
        if match or ".resblocks." not in name:
            state |= {f"{match[1]}{k}{match[2]}" if match else name: value for k in range(layers)}
    assert len(state) == 686
    names = hpsv2.converted({name: value for name, value in state.items() if name != "logit_scale"})
    assert len(names) == 909
    assert not [name for name in names if "resblocks" in name or "attn.in_proj" in name or ".ln_" in name]


def test_a_checkpoint_that_does_not_fit_is_named(original: OpenClip, file: Path, tmp_path: Path) -> None:
    whole = original.state_dict()

    def refused(state: object, words: str) -> None:
        torch.save(state, tmp_path / "x.pt")
        with pytest.raises(RecastError, match=f"no HPS v2.1 checkpoint in '.*x.pt': .*{words}"):
            HPSv2(tmp_path / "x.pt", tokenizer=file.parent)

    refused({k: v for k, v in whole.items() if k != "ln_final.bias"}, "no tensor text_model.final_layer_norm.bias")
    refused({k: v for k, v in whole.items() if k != "visual.conv1.weight"}, "no tensor visual.conv1.weight")
    refused(whole | {"visual.new.bias": torch.zeros(1)}, "has a tensor visual.new.bias, which this model does not have")
    refused(
        whole | {"visual.ln_post.bias": torch.zeros(3)},
        r"tensor vision_model.post_layernorm.bias has the shape \(3,\), not \(160,\)",
    )
    refused([1, 2], "it contains a list, not named tensors")
    with pytest.raises(RecastError, match="no CLIP tokenizer in '.*nowhere'"):
        HPSv2(file, tokenizer=tmp_path / "nowhere")
