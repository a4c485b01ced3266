"""int8 and 8-bit AdamW on the embedded model, on a CPU: size, images, and training that resumes.

    pip install 'recast-diffusion[quantize]'
    python benchmarks/quantize.py

Needs torchao and bitsandbytes, which the tests do without. The results are written to results/quantize.json next to
this file. nf4 needs a GPU and is not run.
"""

from __future__ import annotations

import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from recast import config
from recast.core import artifact
from recast.flow import families
from recast.flow.generate import generate
from recast.shapes import prompts
from recast.train import stage

RESULTS = Path(__file__).parent / "results"
ADAPTER = "lora/pytorch_lora_weights.safetensors"
SMALL = ("train.prompts_per_epoch=8", "train.images_per_prompt=4", "train.batch=16", "train.trackers=[]")


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; a quantized one has integers and scales inside."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])


def compared() -> dict[str, float]:
    """Bytes of the transformer in int8 over float32, and how far the images are apart."""
    plain, small = (families.load(config.policy(quantize=how)) for how in ("none", "int8"))
    sizes = [sum(size(parameter) for parameter in each.network.parameters()) for each in (plain, small)]
    texts = [row["prompt"] for row in prompts.load("test")[:16]]
    images = [generate(each, texts, range(len(texts)), steps=10) for each in (plain, small)]
    return {
        "bytes_over_float32": sizes[1] / sizes[0],
        "mean_absolute_difference": float((images[0] - images[1]).abs().mean()),
    }


def trained(*overrides: str, epochs: int, out: Path) -> dict[str, np.ndarray]:
    """The adapter after so many epochs; what is in the folder is continued."""
    recipe = config.load(
        Path(__file__).parents[1] / "recipes/shapes.yaml",
        ["weigh.method=static", f"train.epochs={epochs}", *SMALL, *overrides],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stage.train(recipe, out)
    return load_file(out / ADAPTER)


def main() -> None:
    """Compare, train in one go and in two, print and write the results."""
    found: dict[str, object] = {name: version(name) for name in ("torchao", "bitsandbytes", "torch")}
    found |= compared()
    print(f"int8: {found['bytes_over_float32']:.3f} of the bytes of float32")
    print(f"int8: images differ by {found['mean_absolute_difference']:.4f} of the range on average")
    for name, overrides in {
        "adamw8bit": ("train.optimizer=adamw8bit",),
        "int8 and adamw8bit": ("train.optimizer=adamw8bit", "policy.quantize=int8"),
    }.items():
        with tempfile.TemporaryDirectory() as place:
            whole = trained(*overrides, epochs=2, out=Path(place) / "whole")
            first = trained(*overrides, epochs=1, out=Path(place) / "parts")
            parts = trained(*overrides, epochs=2, out=Path(place) / "parts")
        moved = any(np.abs(parts[key] - first[key]).max() > 0 for key in first)
        same = all(np.array_equal(whole[key], parts[key]) for key in whole)
        found[name] = {"trains": moved, "resumes_to_the_same_bytes": same}
        print(f"{name}: trains {moved}, resumes to the same bytes {same}")
    artifact.write(RESULTS / "quantize.json", "recast.benchmark.quantize", found)


if __name__ == "__main__":
    main()
