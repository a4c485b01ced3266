"""HPSv3: Qwen2-VL-7B fine-tuned on preferences; its published file is read into transformers' own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recast import device as devices
from recast.errors import RecastError
from recast.rewards import catalog, checkpoints, clip, setup
from recast.rewards.base import Images, as_tensor

__all__ = ["HPSv3", "converted", "read_instruction"]

_FILE = "HPSv3.safetensors"
_PROMPT, _REWARD, _IMAGE = "{text_prompt}", "<|Reward|>", "<|image_pad|>"
_PIXELS = 256 * 28 * 28
"""Area to which an image is resized, as closely as sides in multiples of 28 allow."""
_HEAD = (1024, 16, 2)
_SHA256 = setup.SOURCES["hpsv3"].sha256
_PLACES = {"model.visual.": "visual.", "model.language_model.": "language_model.", "model.": "language_model."}
_HOW = (
    "run `pip download --no-deps hpsv3==1.0.0` and `recast rewards setup hpsv3 --from hpsv3-1.0.0-py3-none-any.whl`, "
    "or set `instruction` to the path of the wheel"
)


class HPSv3:
    """The first of the two outputs of HPSv3's head (the mean; the second is its spread), about -10 to 16.

    `checkpoint` is the published file, its folder or its hub repository; `model` provides the configuration and the
    tokenizer. `instruction` is the question on which the model was fine-tuned. It is not ours to distribute: it is
    read from a text file, the published wheel or a clone, by default from the file that `recast rewards setup hpsv3`
    has made, and its SHA-256 must be `instruction_sha256` (None: any).

    Not verified: the published checkpoint was never loaded here, so no published score has been reproduced. The
    published scorer (hpsv3 1.0.0 with transformers 4.45.2, on a CPU) was compared on a tiny random checkpoint of the
    same layout (`benchmarks/published/hpsv3.py`): the same tokens and pixels; rewards within 0.005 in its own bfloat16,
    and within 1e-6 in float32 with the rotary frequencies rounded to bfloat16.
    """

    def __init__(
        self,
        checkpoint: str | Path = catalog.HPSV3,
        model: str | Path = catalog.QWEN2_VL,
        instruction: str | Path | None = None,
        device: str = "auto",
        dtype: str = "bfloat16",
        batch_size: int = 4,
        offload: bool = False,
        instruction_sha256: str | None = _SHA256,
    ) -> None:
        self.batch_size = clip.check_batch("hpsv3", batch_size)
        self.instruction = read_instruction(instruction, instruction_sha256)
        self.device, self.offload = devices.pick(device), offload
        self.model, self.tokenizer, self.processor = _load(checkpoint, model, devices.dtype(dtype))
        self.model.to("cpu" if offload else self.device)

    @staticmethod
    def versions(
        instruction: str | Path | None = None, instruction_sha256: str | None = _SHA256, **_: Any
    ) -> dict[str, str]:
        """What decides a score besides the options: the SHA-256 of the instruction."""
        return {"instruction": instruction_sha256 or setup.digest(read_instruction(instruction, None))}

    @torch.no_grad()
    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """One reward per image."""
        images = as_tensor(images, prompts)
        found = np.empty(len(prompts))
        with devices.visiting(self.model, self.device, self.offload):
            for start in range(0, len(prompts), self.batch_size):
                part = slice(start, start + self.batch_size)
                found[part] = self.model(**self._inputs(images[part], prompts[part])).cpu().double().numpy()
        wrong = np.flatnonzero(~np.isfinite(found))
        if wrong.size:  # NaN would be read as "does not apply"
            raise RecastError(f"hpsv3 overflows for the prompt {prompts[wrong[0]]!r}: use dtype bfloat16 or float32")
        return found

    def _inputs(self, images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """The inputs of the model, on its device."""
        levels = (images.float().clamp(0, 1) * 255).round().byte().cpu().numpy()
        seen = self.processor(list(levels), input_data_format="channels_first", return_tensors="pt")
        places = int(seen["image_grid_thw"][0].prod()) // self.processor.merge_size**2
        texts = [self._chat(prompt).replace(_IMAGE, _IMAGE * places) for prompt in prompts]
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        names = ("input_ids", "attention_mask")
        return {name: value.to(self.device) for name, value in seen.items()} | {
            name: tokens[name].to(self.device) for name in names
        }

    def _chat(self, prompt: str) -> str:
        """The chat: one turn of the user, the image before the question, then the start of the answer."""
        question = self.instruction.replace(_PROMPT, prompt)
        if self.tokenizer.chat_template:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            turns = [{"role": "user", "content": content}]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        else:
            text = (
                "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
                f"<|im_start|>user\n<|vision_start|>{_IMAGE}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
            )
        for token in (_IMAGE, _REWARD):
            if text.count(token) != 1:
                raise RecastError(
                    f"hpsv3's chat has {text.count(token)} tokens {token} for the prompt {prompt!r}, not one: neither "
                    "a prompt nor the tokenizer's chat template may add or drop it"
                )
        return text


class _Model(nn.Module):
    """Qwen2-VL without its language head, and HPSv3's head on the hidden state at one token."""

    def __init__(self, backbone: Any, head: nn.Module, token: int) -> None:
        super().__init__()
        self.backbone, self.head, self.token = backbone, head, token

    def forward(self, input_ids: Tensor, pixel_values: Tensor, **inputs: Tensor) -> Tensor:
        """Rewards (B,) in float32; every row of `input_ids` (B, L) contains the token once."""
        # Without them, transformers places the tokens of an image on a grid (M-RoPE), which HPSv3 was not tuned on.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(3, *input_ids.shape)
        output = self.backbone(
            input_ids=input_ids,
            pixel_values=pixel_values.to(self.backbone.dtype),
            position_ids=positions,
            use_cache=False,
            **inputs,
        )
        return self.head(output.last_hidden_state[input_ids == self.token].float())[:, 0]


def read_instruction(path: str | Path | None, sha256: str | None = _SHA256) -> str:
    """The question with its placeholders for prompt and reward, from a text file, the published wheel or a clone.

    Without a path, it is the file that `recast rewards setup hpsv3` has made.
    """
    path = setup.stored("hpsv3") if path is None else Path(path)
    if path is None:
        raise RecastError(f"hpsv3 needs its published instruction, which is not ours to distribute: {_HOW}")
    text = setup.extract("hpsv3", path) if path.suffix == ".whl" or path.is_dir() else _read(path)
    found = setup.digest(text)
    if sha256 is not None and found != sha256:
        hashes = f"{found[:12]}…, not {sha256[:12]}…"
        raise RecastError(f"the instruction in {str(path)!r} is not that of hpsv3: its SHA-256 is {hashes}: {_HOW}")
    for place in (_PROMPT, _REWARD):
        if text.count(place) != 1:
            raise RecastError(f"the instruction in {str(path)!r} has {text.count(place)} placeholders {place}, not one")
    return text


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # every byte counts: no newline is translated
    except (OSError, UnicodeDecodeError) as error:
        raise RecastError(f"no instruction of hpsv3 in {str(path)!r} ({error}): {_HOW}") from error


def converted(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a checkpoint under the names of transformers' `Qwen2VLModel`, and those of the head.

    The published names are older than transformers' split of the model; files with the newer names are read, too.
    """
    backbone, head = {}, {}
    for name, value in state.items():
        if name.startswith("rm_head."):
            head[name] = value
        elif not name.startswith("lm_head."):  # not needed: no text is generated
            start = next((old for old in _PLACES if name.startswith(old)), "")
            backbone[_PLACES.get(start, "") + name.removeprefix(start)] = value
    return backbone, head


def _load(source: str | Path, model: str | Path, dtype: torch.dtype) -> tuple[_Model, Any, Any]:
    try:
        from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLImageProcessorPil
    except ImportError as error:
        raise RecastError(f"hpsv3 needs transformers 5.4 or later ({error})") from error
    with checkpoints.loading("Qwen2-VL configuration and tokenizer", model):
        config, tokenizer = Qwen2VLConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        tokenizer.add_tokens([_REWARD], special_tokens=True)
    with checkpoints.loading("HPSv3 checkpoint", source):
        state, head = converted(checkpoints.read(checkpoints.find(source, _FILE)))
        backbone = _backbone(config, state, len(tokenizer), dtype)
        layers = _head(config.text_config.hidden_size, head)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": _PIXELS, "longest_edge": _PIXELS})
    made = _Model(backbone, layers, tokenizer.convert_tokens_to_ids(_REWARD))
    return made.eval().requires_grad_(False), tokenizer, processor


def _backbone(config: Any, state: Mapping[str, Tensor], words: int, dtype: torch.dtype) -> Any:
    from transformers import Qwen2VLModel

    embedding = state.get("language_model.embed_tokens.weight")
    if embedding is None:
        raise ValueError("it has no tensor language_model.embed_tokens.weight")
    if len(embedding) != words:
        raise ValueError(f"it embeds {len(embedding)} tokens, but the tokenizer has {words} with {_REWARD}")
    config.text_config.vocab_size = words
    backbone = checkpoints.pretrained(Qwen2VLModel, None, config, state, dtype=dtype)
    # The published scorer and the tuning cast the whole model to bfloat16, including the rotary frequencies: at a
    # distance of 600 tokens, about that of reward and image, this rotates a pair of channels by up to 0.7 radians.
    for name, buffer in backbone.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(buffer.bfloat16())
    return backbone


def _head(width: int, state: Mapping[str, Tensor]) -> nn.Module:
    """HPSv3's head, always in float32."""
    first, second, last = _HEAD
    head = nn.Sequential(
        nn.Linear(width, first), nn.ReLU(), nn.Dropout(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, last)
    )
    checkpoints.fill(nn.ModuleDict({"rm_head": head}), state)
    return head
