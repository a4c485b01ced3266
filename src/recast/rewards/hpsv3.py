"""HPSv3: Qwen2-VL-7B tuned on preferences, its published file read into transformers' own model."""

from __future__ import annotations

import ast
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recast import device as devices
from recast.errors import RecastError
from recast.rewards import catalog, checkpoints, clip
from recast.rewards.base import Images, as_tensor

FILE = "HPSv3.safetensors"
PROMPT, REWARD, IMAGE = "{text_prompt}", "<|Reward|>", "<|image_pad|>"
PIXELS = 256 * 28 * 28
"""Pixels that an image is resized to, as nearly as sides in multiples of 28 allow."""
HEAD = (1024, 16, 2)
SHA256 = "f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c"
"""Of the published instruction, before the prompt is filled in."""
_PLACES = {"model.visual.": "visual.", "model.language_model.": "language_model.", "model.": "language_model."}
_MODULE, _PARTS = "hpsv3/dataset/data_collator_qwen.py", ("INSTRUCTION", "prompt_with_special_token")
_HOW = (
    "run `pip download --no-deps hpsv3==1.0.0` and give the wheel's path as `instruction`, or a text file that holds "
    f"{' + '.join(_PARTS)} of the wheel's {_MODULE}"
)


class HPSv3:
    """The first of the two outputs of HPSv3's head (the mean; the second is its spread), about -10 to 16.

    `weights` is the published file, its folder or its hub repository; `model` gives the configuration and the
    tokenizer; `instruction` is the question the model was tuned on: not ours to ship, so the user gives the wheel or
    the text file that holds it, and it must have the digest `instruction_sha256` (None: whatever it is).

    Not verified here: the published weights were never loaded, so no published score has been reproduced. Compared was
    the published scorer (hpsv3 1.0.0 with transformers 4.45.2, on a CPU) on a tiny random checkpoint of its layout:
    the same tokens and pixels; rewards within 0.01 in its own bfloat16, and within 1e-6 once it is put to float32
    with the rotary frequencies left as bfloat16 has them.
    """

    def __init__(
        self,
        weights: str | Path = catalog.HPSV3,
        model: str | Path = catalog.QWEN2_VL,
        instruction: str | Path | None = None,
        device: str = "auto",
        dtype: str = "bfloat16",
        batch_size: int = 4,
        offload: bool = False,
        instruction_sha256: str | None = SHA256,
    ) -> None:
        self.batch_size = clip.check_batch("hpsv3", batch_size)
        self.instruction = read_instruction(instruction, instruction_sha256)
        self.device, self.offload = devices.pick(device), offload
        self.judge, self.tokenizer, self.processor = _load(weights, model, devices.dtype(dtype))
        self.judge.to("cpu" if offload else self.device)

    @torch.no_grad()
    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """The reward of each image for its prompt."""
        images = as_tensor(images, prompts)
        found = np.empty(len(prompts))
        with devices.visiting(self.judge, self.device, self.offload):
            for start in range(0, len(prompts), self.batch_size):
                part = slice(start, start + self.batch_size)
                found[part] = self.judge(**self._inputs(images[part], prompts[part])).double().cpu().numpy()
        wrong = np.flatnonzero(~np.isfinite(found))
        if wrong.size:  # NaN would be read as "does not apply"
            raise RecastError(f"hpsv3 overflows for the prompt {prompts[wrong[0]]!r}: use dtype bfloat16 or float32")
        return found

    def _inputs(self, images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """What the model takes, on its device."""
        levels = (images.float().clamp(0, 1) * 255).round().byte().cpu().numpy()
        seen = self.processor(list(levels), input_data_format="channels_first", return_tensors="pt")
        places = int(seen["image_grid_thw"][0].prod()) // self.processor.merge_size**2
        texts = [self._chat(prompt).replace(IMAGE, IMAGE * places) for prompt in prompts]
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        names = ("input_ids", "attention_mask")
        return {name: value.to(self.device) for name, value in seen.items()} | {
            name: tokens[name].to(self.device) for name in names
        }

    def _chat(self, prompt: str) -> str:
        """One user's turn, the image before the question, with the answer about to begin."""
        question = self.instruction.replace(PROMPT, prompt)
        if self.tokenizer.chat_template:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            turns = [{"role": "user", "content": content}]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        else:
            text = (
                "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
                f"<|im_start|>user\n<|vision_start|>{IMAGE}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
            )
        for token in (IMAGE, REWARD):
            if text.count(token) != 1:
                raise RecastError(
                    f"hpsv3's chat has {text.count(token)} tokens {token} for the prompt {prompt!r}, not one: neither "
                    "a prompt nor the tokenizer's chat template may add or drop it"
                )
        return text


class Judge(nn.Module):
    """Qwen2-VL without its language head, and HPSv3's head on the hidden state at one token."""

    def __init__(self, backbone: Any, head: nn.Module, token: int) -> None:
        super().__init__()
        self.backbone, self.head, self.token = backbone, head, token

    def forward(self, input_ids: Tensor, pixel_values: Tensor, **inputs: Tensor) -> Tensor:
        """Rewards (B,) in float32; every row of `input_ids` (B, L) holds the token once."""
        # Given, or transformers would place an image's tokens on a grid (M-RoPE), which HPSv3 was not tuned on.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(3, *input_ids.shape)
        output = self.backbone(
            input_ids=input_ids,
            pixel_values=pixel_values.to(self.backbone.dtype),
            position_ids=positions,
            use_cache=False,
            **inputs,
        )
        return self.head(output.last_hidden_state[input_ids == self.token].float())[:, 0]


def read_instruction(path: str | Path | None, sha256: str | None = SHA256) -> str:
    """The question with places for the prompt and the reward, of a text file or of the published wheel."""
    if path is None:
        raise RecastError(f"hpsv3 needs its published instruction, which is not ours to ship: {_HOW}")
    path = Path(path)
    try:
        text = _of_wheel(path) if path.suffix == ".whl" else path.read_bytes().decode()
    except (OSError, ValueError, KeyError, SyntaxError, zipfile.BadZipFile) as error:
        raise RecastError(f"no instruction of hpsv3 in {str(path)!r} ({error}): {_HOW}") from error
    found = hashlib.sha256(text.encode()).hexdigest()
    if sha256 is not None and found != sha256:
        raise RecastError(
            f"the instruction in {str(path)!r} is not hpsv3's: its SHA-256 is {found[:12]}…, not {sha256[:12]}…: {_HOW}"
        )
    for place in (PROMPT, REWARD):
        if text.count(place) != 1:
            raise RecastError(f"the instruction in {str(path)!r} has {text.count(place)} places {place}, not one")
    return text


def _of_wheel(path: Path) -> str:
    """The instruction as the wheel's module spells it; nothing of the wheel is run."""
    with zipfile.ZipFile(path) as wheel:
        module = ast.parse(wheel.read(_MODULE))
    texts = {
        target.id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return "".join(str(texts[name]) for name in _PARTS)


def converted(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's weights by the names of transformers' `Qwen2VLModel`, and those of the head.

    The published names are older than transformers' own split of the model; files with the newer ones are read too.
    """
    backbone, head = {}, {}
    for name, value in state.items():
        if name.startswith("rm_head."):
            head[name] = value
        elif not name.startswith("lm_head."):  # of no use: the model writes nothing
            start = next((old for old in _PLACES if name.startswith(old)), "")
            backbone[_PLACES.get(start, "") + name.removeprefix(start)] = value
    return backbone, head


def _load(source: str | Path, model: str | Path, dtype: torch.dtype) -> tuple[Judge, Any, Any]:
    try:
        from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLImageProcessorPil
    except ImportError as error:
        raise RecastError(f"hpsv3 needs transformers 5 or later ({error})") from error
    with checkpoints.loading("Qwen2-VL configuration and tokenizer", model):
        config, tokenizer = Qwen2VLConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        tokenizer.add_tokens([REWARD], special_tokens=True)
    with checkpoints.loading("HPSv3 checkpoint", source):
        state, head = converted(checkpoints.read(checkpoints.find(source, FILE)))
        backbone = _backbone(config, state, len(tokenizer), dtype)
        layers = _head(config.text_config.hidden_size, head)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": PIXELS, "longest_edge": PIXELS})
    judge = Judge(backbone, layers, tokenizer.convert_tokens_to_ids(REWARD))
    return judge.eval().requires_grad_(False), tokenizer, processor


def _backbone(config: Any, state: Mapping[str, Tensor], words: int, dtype: torch.dtype) -> Any:
    from transformers import Qwen2VLModel

    embedding = state.get("language_model.embed_tokens.weight")
    if embedding is None:
        raise ValueError("it has no weights for language_model.embed_tokens.weight")
    if len(embedding) != words:
        raise ValueError(f"it embeds {len(embedding)} tokens, but the tokenizer has {words} with {REWARD}")
    config.text_config.vocab_size = words
    backbone = checkpoints.pretrained(Qwen2VLModel, None, config, state, dtype=dtype)
    # The published scorer, and the tuning before it, cast the whole model to bfloat16, rotary frequencies and all: 600
    # tokens apart, about as far as the reward from the image, that turns a pair of channels by up to 0.7 radians.
    for name, buffer in backbone.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(buffer.bfloat16())
    return backbone


def _head(width: int, state: Mapping[str, Tensor]) -> nn.Module:
    """HPSv3's head in float32, whatever the model runs in."""
    first, second, last = HEAD
    head = nn.Sequential(
        nn.Linear(width, first), nn.ReLU(), nn.Dropout(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, last)
    )
    checkpoints.fill(nn.ModuleDict({"rm_head": head}), state)
    return head
