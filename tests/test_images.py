"""Files that are no single image, whatever they are called."""

import io
from pathlib import Path

import pytest
from PIL import Image

from recast import images
from recast.errors import RecastError
from server import png


def animated(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (64, 64), (value, 0, 0)) for value in (0, 255)]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be decoded as an image"),
        (png()[:-30], "cannot be decoded as an image"),
        (png()[:20], "cannot be decoded as an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded as an image"),
        (b"some text", "cannot be decoded as an image"),
        (animated("PNG"), "is an animation of 2 images"),
        (animated("WEBP"), "is an animation of 2 images"),
        (animated("GIF"), "has the format GIF; supported formats are PNG, JPEG, WEBP"),
        (png(side=1), "is 1×1 pixels, below the minimum of 2"),
    ],
)
def test_a_file_that_is_no_image_is_one_sentence(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=said) as caught:
        images.inspect(content, 2, "it")
    assert "\n" not in str(caught.value)
    if "1×1" not in said:
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(RecastError, match=f"a.png {said}.*: make it again"):
            images.read(tmp_path / "a.png", "make it again")
