"""HPSv3 beside the published package: tokens, pixels, and rewards in float32 and in its own bfloat16.

    pip download --no-deps hpsv3==1.0.0
    python benchmarks/published/hpsv3.py --python hpsv3/bin/python --wheel hpsv3-1.0.0-py3-none-any.whl

`hpsv3` is the second environment of README.md in this folder, with transformers 4.45.2, which the package names. Its
`HPSv3RewardInferencer` runs as it is published, on the CPU, with a random Qwen2-VL of the published layout, few
channels and a vocabulary of bytes; our side takes the instruction out of the wheel. For float32 the published model is
converted after its own cast to bfloat16, which also rounds the rotary frequencies. Writes
results/published/hpsv3.json; about two minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

MODEL, FILE = "Qwen/Qwen2-VL-7B-Instruct", "HPSv3.safetensors"
SIZES = ((512, 512), (512, 768), (517, 333), (100, 64))
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "image_token_id": 261,
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "video_token_id": 290,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "torch_dtype": "bfloat16",
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
}
KINDS = ("tokens", "pixels", "scores", "scores in bfloat16")
ABOUT = {
    "source": "the wheel of hpsv3, HPSv3RewardInferencer",
    "commit": "1.0.0",
    "not_compared": [
        "the published checkpoint, its size and its vocabulary (the model is random, with few channels, on bytes)",
        "Qwen's own chat template (one with the same result for a single turn)",
        "flash attention, and a GPU",
    ],
}


def save_base(folder: Path) -> None:
    """Qwen2-VL's folder: configuration, tokenizer and processor in the files of transformers 4.45, and parameters."""
    from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    words = {chr(byte): byte for byte in shown} | {chr(256 + k): byte for k, byte in enumerate(hidden)}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.add_tokens(list(SPECIALS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    Qwen2VLForConditionalGeneration(Qwen2VLConfig(**CONFIG)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def save(folder: Path, published: Any) -> tuple[str, str]:
    """Write the published configuration for a CPU, and the checkpoint as the published model names its tensors."""
    from safetensors.torch import save_file

    given = Path(published.__file__).parent / "config" / "HPSv3_7B.yaml"
    config = folder / "HPSv3_7B.yaml"
    config.write_text(given.read_text() + "\nuse_cpu: true\n")
    train, parser = common.published("hpsv3.train"), common.published("hpsv3.utils.parser")
    kinds = (parser.DataConfig, parser.TrainingConfig, parser.ModelConfig, parser.PEFTLoraConfig)
    (_, training, model, adapters), _ = parser.parse_args_with_yaml(kinds, str(config), is_train=False)
    made, *_ = train.create_model_and_processor(model_config=model, peft_lora_config=adapters, training_args=training)
    head = made.rm_head
    made.float()
    common.widen(made)
    made.to(torch.bfloat16)
    head.float()
    save_file({name: value.contiguous() for name, value in made.state_dict().items()}, folder / FILE)
    return str(config), str(folder / FILE)


def theirs(folder: Path, given: Any) -> None:
    """Write the checkpoint and what the published scorer makes of it."""
    common.torchvision()
    save_base(folder / MODEL)
    published = common.published("hpsv3")
    config, checkpoint = save(folder, published)
    scorer = published.HPSv3RewardInferencer(config, checkpoint, device="cpu")
    # The published forward pass asks for float32 at the head by an autocast that only a GPU has.
    scorer.model.rm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    found: common.Found = {what: [] for what in KINDS}
    with torch.no_grad():
        for half in (True, False):
            for images, prompts in common.batches(folder):
                pil = common.as_pil(images)
                rewards = scorer.reward(pil, prompts)[:, 0].float().numpy()
                found["scores in bfloat16" if half else "scores"].append(rewards)
                if half:
                    batch = scorer.prepare_batch(pil, prompts)
                    found["tokens"].append(batch["input_ids"].numpy())
                    found["pixels"].append(batch["pixel_values"].float().numpy().reshape(len(pil), -1))
            scorer.model.float()
    names = ("torch", "torchvision", "transformers", "hpsv3", "pillow", "numpy")
    common.write_found(folder, found, common.versions(*names))


def ours(folder: Path, given: Any) -> common.Found:
    """The same by this package."""
    from recast.rewards.hpsv3 import HPSv3

    found: common.Found = {what: [] for what in KINDS}
    for dtype, what in (("bfloat16", "scores in bfloat16"), ("float32", "scores")):
        reward = HPSv3(folder / FILE, folder / MODEL, instruction=given.wheel, device="cpu", dtype=dtype)
        for images, prompts in common.batches(folder):
            tensor = common.as_tensor(images)
            found[what].append(reward(tensor, prompts))
            if what == "scores":
                inputs = reward._inputs(tensor, prompts)
                found["tokens"].append(inputs["input_ids"].numpy())
                found["pixels"].append(inputs["pixel_values"].numpy().reshape(len(images), -1).astype(np.float32))
    return found


if __name__ == "__main__":
    common.run("hpsv3", __file__, theirs, ours, ABOUT, SIZES, {"wheel": "the wheel of hpsv3 1.0.0"})
