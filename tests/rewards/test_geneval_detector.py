"""What GenEval's detector sees and what is made of its output, against OpenCV and interpolation by hand."""

from typing import Any

import cv2
import numpy as np
import pytest
import torch

from recast.rewards.geneval_detector import Instances, inputs, resized
from recast.rewards.geneval_detector import instances as instances_of_all
from tolerance import tolerance


def levels(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize("size", [(80, 80), (51, 117), (40, 56), (20, 28), (33, 31), (1, 200)])
def test_images_are_resized_as_opencv_does(size: tuple[int, int]) -> None:
    images = levels(40, 56)
    for image, ours in zip(images, resized(images, size), strict=True):
        theirs = cv2.resize(image.permute(1, 2, 0).numpy(), size[::-1], interpolation=cv2.INTER_LINEAR)
        np.testing.assert_array_equal(ours.permute(1, 2, 0).numpy(), theirs)


@pytest.mark.parametrize(
    ("image", "inside", "padded"),
    [
        ((64, 64), (80, 80), (96, 96)),  # the short edge
        ((30, 70), (57, 133), (64, 160)),  # the long edge: 30 · 133 / 70 = 57.0
        ((100, 64), (125, 80), (128, 96)),
        ((200, 200), (80, 80), (96, 96)),
        ((51, 80), (80, 125), (96, 128)),  # 80 · 80 / 51 = 125.49
    ],
)
def test_the_input_of_the_detector(image: tuple[int, int], inside: tuple[int, int], padded: tuple[int, int]) -> None:
    """As large as 80 and 133 allow, gray up to multiples of 32, with the statistics of ImageNet."""
    images = levels(*image)
    pixels, found = inputs(images, 80, 133)
    assert found == inside
    assert pixels.shape == (2, 3, *padded)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    back = (pixels * std + mean) * 255
    atol = tolerance(4, 255)
    gray = back.clone()
    gray[..., : inside[0], : inside[1]] = 128
    torch.testing.assert_close(gray, torch.full_like(gray, 128), atol=atol, rtol=0)
    seen = back[..., : inside[0], : inside[1]]
    torch.testing.assert_close(seen, resized(images, inside).float(), atol=atol, rtol=0)


def instances(classes: torch.Tensor, masks: torch.Tensor, *sizes_and_threshold: Any) -> Instances:
    """Those of one image, which are the same beside another image with another threshold."""
    *sizes, threshold = sizes_and_threshold
    (alone,) = instances_of_all(classes[None], masks[None], *sizes, [threshold])
    other = instances_of_all(
        torch.stack([classes.flip(0), classes]), masks.expand(2, *masks.shape), *sizes, [0.45, threshold]
    )
    for name in ("scores", "labels", "masks"):
        assert torch.equal(getattr(alone, name), getattr(other[1], name))
    return alone


def line(values: np.ndarray, count: int) -> np.ndarray:
    """Linear interpolation between the centers of pixels."""
    return np.interp((np.arange(count) + 0.5) * len(values) / count - 0.5, np.arange(len(values)), values)


def test_masks_are_bilinear_at_the_size_of_the_image() -> None:
    """To the padded input, cut to what is inside, to the image: each along a line, since the rows are alike."""
    classes = torch.tensor([[0.7, 0.2, 0.1]]).log()
    values = np.array([-3.0, -1.0, -0.5, 2.0, 1.0, -2.0, 3.0, 3.0])
    masks = torch.tensor(values).float().expand(1, 5, 8)
    seen = instances(classes, masks, (20, 32), (20, 27), (50, 61), 0.3)
    logits = line(line(values, 32)[:27], 61)
    assert seen.masks.shape == (1, 50, 61)
    np.testing.assert_array_equal(seen.masks[0].numpy(), np.tile(logits > 0, (50, 1)))
    mean = (1 / (1 + np.exp(-logits[logits > 0]))).mean()
    assert float(seen.scores[0]) == pytest.approx(0.7 * mean, abs=tolerance(50 * 61, 0.7))
    columns = np.flatnonzero(logits > 0)
    assert seen.boxes()[0].tolist() == [columns[0], 0, columns[-1] + 1, 50]


def test_instances_by_hand() -> None:
    """Three queries and three classes: scores are chance times the mean probability inside; one mask is empty."""
    classes = torch.tensor([[0.6, 0.3, 0.05, 0.05], [0.1, 0.05, 0.8, 0.05], [0.01, 0.97, 0.01, 0.01]]).log()
    masks = torch.full((3, 4, 4), -5.0)
    masks[0, :, :2] = torch.tensor(0.9).logit()
    masks[1] = torch.tensor(0.7).logit()
    sizes = ((16, 16), (16, 16), (8, 8))
    seen = instances(classes, masks, *sizes, 0.3)
    assert seen.labels.tolist() == [2, 0]  # the third query has the largest chance, but nothing in its mask
    assert float(seen.scores[0]) == pytest.approx(0.8 * 0.7, abs=tolerance(64, 0.56))
    assert 0.6 * 0.5 < float(seen.scores[1]) < 0.6 * 0.9  # less than 0.9: the border is interpolated
    assert seen.boxes().tolist() == [[0, 0, 8, 8], [0, 0, 4, 8]]
    assert len(instances(classes, masks, *sizes, 0.99).scores) == 0


def test_a_query_may_be_of_two_classes_and_a_hundred_pairs_are_considered() -> None:
    classes = torch.tensor([[0.5, 0.4, 0.1]]).log()
    sizes = ((4, 4), (4, 4), (4, 4))
    assert instances(classes, torch.full((1, 4, 4), 9.0), *sizes, 0.3).labels.tolist() == [0, 1]
    many = torch.full((60, 2), 0.25).log()
    assert len(instances(torch.cat([many, many[:, :1]], 1), torch.full((60, 4, 4), 9.0), *sizes, 0.0).scores) == 100


def test_boxes_are_those_of_the_masks_pixels() -> None:
    masks = torch.rand(20, 17, 23, generator=torch.Generator().manual_seed(0)) > 0.99
    masks = masks[masks.flatten(1).any(1)]
    boxes = Instances(torch.ones(len(masks)), torch.zeros(len(masks)), masks).boxes()
    for mask, box in zip(masks, boxes.tolist(), strict=True):
        ys, xs = np.nonzero(mask.numpy())
        assert box == [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
    assert Instances(torch.empty(0), torch.empty(0), masks[:0]).boxes().shape == (0, 4)
