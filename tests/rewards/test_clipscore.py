"""ClipScore against transformers' own processor and model, on a tiny checkpoint in the published layout."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_clip
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_clip import LAYERS, PROMPTS, TERMS, pictures
from torch.nn import functional
from transformers import CLIPImageProcessorPil

from recast.errors import RecastError
from recast.rewards.clipscore import ClipScore
from tolerance import tolerance

COSINE, PIXEL = tolerance(TERMS), tolerance(3, scale=3)
"""Of a cosine, and of a pixel: divided by 255, less a mean, over a deviation, up to 2.2."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip.save(tmp_path_factory.mktemp("clip"))


def test_scores_are_the_cosines_of_model_and_processor(folder: Path) -> None:
    images, pil = pictures()
    image, text = tiny_clip.embeddings(folder, pil, PROMPTS)
    cosine = (image * text).sum(-1)
    assert cosine.abs().max() > 0.01
    np.testing.assert_allclose(ClipScore(folder)(images, PROMPTS), cosine, atol=COSINE, rtol=0)
    np.testing.assert_allclose(ClipScore(folder)(pil, PROMPTS), cosine, atol=COSINE, rtol=0)


@pytest.mark.parametrize("size", [(48, 64), (64, 48), (32, 32), (20, 30), (37, 55), (440, 440), (320, 360)])
def test_pixels_are_the_processors(folder: Path, size: tuple[int, int]) -> None:
    images, pil = pictures(*size)
    score = ClipScore(folder)
    theirs = CLIPImageProcessorPil.from_pretrained(folder)(pil, return_tensors="pt")["pixel_values"]
    ours = score.pixels(images)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, atol=PIXEL, rtol=0)


def test_nft_preprocessing_is_bilinear_on_floats(folder: Path) -> None:
    images, _ = pictures()
    images = images * 0.9 + 0.001  # not 8-bit any more
    nft, own = ClipScore(folder, preprocess="nft").pixels(images), ClipScore(folder).pixels(images)
    resized = functional.interpolate(images, (32, 42), mode="bilinear", antialias=True)[..., 5:37]
    mean, std = (
        torch.tensor(v).view(3, 1, 1)
        for v in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    )
    torch.testing.assert_close(nft, (resized - mean) / std, atol=PIXEL, rtol=0)
    assert (nft - own).abs().max() > 0.01


def triangle(old: int, new: int) -> np.ndarray:
    """Antialiased bilinear resizing of a line as a matrix (new, old): a triangle about each new pixel's center."""
    scale = old / new
    centers, pixels = (np.arange(new) + 0.5) * scale, np.arange(old) + 0.5
    weights = np.clip(1 - np.abs(pixels - centers[:, None]) / max(scale, 1), 0, None)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 80), (20, 30), (37, 32)])
def test_nft_pixels_are_those_of_a_triangle_filter(folder: Path, height: int, width: int) -> None:
    images = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    small = (32, int(32 * width / height)) if height <= width else (int(32 * height / width), 32)
    rows, columns = triangle(height, small[0]), triangle(width, small[1])
    resized = np.einsum("yh,xw,bchw->bcyx", rows, columns, images.double().numpy())
    top, left = (round((side - 32) / 2) for side in small)
    score = ClipScore(folder, preprocess="nft")
    mean, std = (np.array(each)[:, None, None] for each in (score.pixels.mean, score.pixels.std))
    expected = (resized[..., top : top + 32, left : left + 32] - mean) / std
    np.testing.assert_allclose(score.pixels(images), expected, atol=tolerance(16, scale=4), rtol=0)


def test_an_odd_margin_is_cut_as_each_of_the_two_cuts_it(folder: Path) -> None:
    """37 by 55 becomes 32 by 47, a margin of 7.5: the processor starts at 7, torchvision's crop at 8."""
    images, _ = pictures(37, 55)
    resized = functional.interpolate(images, (32, 47), mode="bilinear", antialias=True)
    score = ClipScore(folder, preprocess="nft")
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (score.pixels.mean, score.pixels.std))
    torch.testing.assert_close(score.pixels(images), (resized[..., 8:40] - mean) / std, atol=PIXEL, rtol=0)


def test_negative_cosines_stay_as_they_are(folder: Path) -> None:
    """Training takes the cosine itself; only gain curves clamp it (`base.positive`)."""
    images, _ = pictures()
    score = ClipScore(folder, batch_size=2)
    cosine = score(images, PROMPTS)
    with torch.no_grad():
        score.clip.model.visual_projection.weight.mul_(-1)
    np.testing.assert_allclose(score(images.clone(), PROMPTS), -cosine, atol=COSINE, rtol=0)
    assert (cosine > 0).any()


def test_batches_and_cached_texts_change_nothing(folder: Path) -> None:
    images, _ = pictures()
    whole, parts = ClipScore(folder), ClipScore(folder, batch_size=1)
    np.testing.assert_allclose(whole(images, PROMPTS), parts(images, PROMPTS), atol=COSINE, rtol=0)
    assert list(whole.clip._texts) == PROMPTS[:2]
    again = whole(images, PROMPTS)
    whole.clip._texts.clear()
    assert (whole(images, PROMPTS) == again).all()


def test_long_prompts_are_cut_and_floats_are_rounded_to_8_bits(folder: Path) -> None:
    images, _ = pictures()
    score = ClipScore(folder)
    assert score(images[:1], ["red circle " * 200]).shape == (1,)
    fine = images * 0.9 + 0.0013
    rounded = [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in fine]
    theirs = CLIPImageProcessorPil.from_pretrained(folder)(rounded, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(score.pixels(fine), theirs, atol=PIXEL, rtol=0)


def test_device_and_dtype_by_name(folder: Path) -> None:
    images, _ = pictures()
    half = ClipScore(folder, dtype="bfloat16", device="cpu")
    assert half.clip.model.dtype == torch.bfloat16
    # Errors of the 24 numbers of both embeddings are independent: they make sqrt(2 / 24) of theirs in a cosine.
    close = tolerance(LAYERS, scale=(2 / 24) ** 0.5, dtype=torch.bfloat16)
    np.testing.assert_allclose(half(images, PROMPTS), ClipScore(folder)(images, PROMPTS), atol=close, rtol=0)
    with pytest.raises(RecastError, match="unknown dtype 'half'"):
        ClipScore(folder, dtype="half")
    with pytest.raises(RecastError, match="the device 'gpu' cannot be used here"):
        ClipScore(folder, device="gpu")
    with pytest.raises(RecastError, match="batch_size must be at least 1, not 0"):
        ClipScore(folder, batch_size=0)


def test_a_checkpoint_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "less")
    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, tmp_path / "less/model.safetensors", {"format": "pt"})
    with pytest.raises(RecastError, match="no tensor visual_projection.weight"):
        ClipScore(tmp_path / "less")
    (tmp_path / "less/model.safetensors").write_bytes(b"12345678" * 9)
    with pytest.raises(RecastError, match="no CLIP model in"):
        ClipScore(tmp_path / "less")


def test_a_wrong_folder_or_option_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="no CLIP model in"):
        ClipScore(tmp_path)
    with pytest.raises(RecastError, match="'processor' and 'nft', not 'bicubic'"):
        ClipScore(folder, preprocess="bicubic")  # type: ignore[arg-type]
