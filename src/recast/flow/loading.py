"""Loading diffusers pipelines: from a hub name or a folder, with an error for every tensor that is missing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from diffusers import BitsAndBytesConfig, DiffusionPipeline, TorchAoConfig
from diffusers.quantizers import PipelineQuantizationConfig
from safetensors import SafetensorError

from recast import objects
from recast.config import PolicyConfig
from recast.errors import RecastError
from recast.flow import lora
from recast.flow.lora import FILE
from recast.quiet import quiet

__all__ = ["Quantization", "accelerate", "add_lora", "load_pipeline", "pipeline_class"]

Quantization = Literal["none", "int8", "nf4"]
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, ImportError, AttributeError, RuntimeError, SafetensorError)


def pipeline_class(source: str | Path) -> str:
    """The name of a pipeline's class in its `model_index.json`."""
    try:
        with quiet():
            return str(DiffusionPipeline.load_config(_folder(source))["_class_name"])
    except _UNREADABLE as error:
        raise _absent(source, "diffusers", error) from error


def load_pipeline(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    quantize: Quantization = "none",
    optional: Sequence[str] = (),
) -> Any:
    """A diffusers pipeline from a hub name or folder, without the components that its index omits.

    The VAE is float32 for any `dtype`. A RecastError is raised if a tensor is missing in the checkpoint, since
    diffusers and transformers would initialize it randomly.

    Parameters
    ----------
    source : str or Path
        Hub name or folder.
    dtype : torch.dtype, default torch.float32
        Precision of the transformer and the text encoders.
    quantize : {"none", "int8", "nf4"}, default "none"
        Quantization of the transformer, by torchao (int8) or bitsandbytes (nf4).
    optional : sequence of str, optional
        Components that a model may lack.
    """
    folder, kind, quantized = _folder(source), pipeline_class(source), _quantization(quantize, dtype)
    try:
        with quiet():
            found = getattr(diffusers, kind)
            index = found.load_config(folder)
            parts = {name: part for name, part in index.items() if isinstance(part, (list, tuple))}
            given: dict[str, Any] = {name: None for name in optional if parts.get(name, [None])[0] is None}
            given |= quantized
            for name, (library, part) in parts.items():
                if library == "transformers" and name.startswith("text_encoder"):
                    given[name] = _encoder(folder, name, part, dtype)
                elif library and library.startswith("recast."):
                    importlib.import_module(library)  # diffusers does not import a module that a folder names
            pipe = found.from_pretrained(folder, torch_dtype={"vae": torch.float32, "default": dtype}, **given)
    except _UNREADABLE as error:
        raise _absent(source, kind, error) from error
    for name in ("transformer", "vae"):
        empty = [key for key, tensor in getattr(pipe, name).state_dict().items() if tensor.is_meta]
        if empty:
            raise RecastError(
                f"the {name} in {str(source)!r} has no tensor {empty[0]}: download or save the checkpoint again"
            )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def add_lora(pipe: Any, folder: str | Path) -> None:
    """Load a saved adapter into the pipeline, as a diffusers user would."""
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        raise RecastError(f"there is no adapter {path}")
    try:
        lora.read(path)
        with quiet():
            pipe.load_lora_weights(path.parent, weight_name=FILE)
    except RecastError:
        raise
    except _UNREADABLE as error:
        raise RecastError(f"{path} is not an adapter of this model: {_reason(error)}") from error


def accelerate(network: Any, config: PolicyConfig) -> None:
    """Set the attention backend and compile the transformer, as the recipe asks."""
    if config.attention is not None:
        try:
            with quiet():
                network.set_attention_backend(config.attention)
        except _UNREADABLE as error:
            raise RecastError(f"policy.attention = {config.attention} cannot be used: {_reason(error)}") from error
    if config.compile:
        # Only the repeated blocks, which is much faster to compile and as fast to run.
        network.compile_repeated_blocks() if network._repeated_blocks else network.compile()


def _folder(source: str | Path) -> str | Path:
    """A path if the source looks like one, else the hub name."""
    if not str(source).startswith((".", "/", "~")):
        return source
    path = Path(source).expanduser()
    if not path.is_dir():
        raise RecastError(f"the folder {str(path)!r} does not exist: give a hub name or the folder of a pipeline")
    return path


def _quantization(quantize: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """The argument of `from_pretrained` that quantizes the transformer: int8 by torchao, nf4 by bitsandbytes."""
    setting = f"policy.quantize = {quantize}"
    if quantize == "none":
        return {}
    if quantize == "int8":
        config: Any = TorchAoConfig(objects.library("torchao.quantization", setting, "none").Int8WeightOnlyConfig())
    else:
        objects.library("bitsandbytes", setting, "int8 or none")
        if not torch.cuda.is_available():  # diffusers' own condition
            raise RecastError(f"{setting} needs a GPU: choose int8 or none")
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping={"transformer": config})}


def _encoder(source: str | Path, name: str, kind: str, dtype: torch.dtype) -> Any:
    """A text encoder; an error for a missing tensor, which transformers would initialize randomly."""
    import transformers

    found = getattr(transformers, kind)
    model, report = found.from_pretrained(source, subfolder=name, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:
        raise ValueError(f"{name} has no tensor {min(report['missing_keys'])}")
    return model


def _absent(source: str | Path, kind: str, error: Exception) -> RecastError:
    what = kind if kind.endswith("Pipeline") else f"{kind} pipeline"
    return RecastError(f"no {what} in {str(source)!r}: give a hub name or a folder ({_reason(error)})")


def _reason(error: Exception) -> str:
    """First line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
