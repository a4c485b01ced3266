"""HPSv3 on a tiny random checkpoint in the published layout, against a few lines that follow the published scorer."""

import hashlib
import json
import shutil
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLModel

from recast.errors import RecastError
from recast.rewards import base, setup
from recast.rewards.hpsv3 import HPSv3, converted, read_instruction
from tolerance import tolerance

PROMPTS = ["a red circle", "two blue squares and, far behind them, a small green hill", "é"]
QUESTION = "\nHow good is this picture of {text_prompt}?\n\n\nRate it: <|Reward|>\n\nEND\n"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
IDS = {token: 256 + k for k, token in enumerate((*SPECIALS, "<|Reward|>"))}
TERMS, LAYERS = 6000, 40
"""Products that one reward adds up: 1176 of a patch, 1240 in each of two layers of the vision tower with attention to
1064 patches, 600 in each of two of the language model, 1072 in the head; and layers that it goes through."""
REWARD, PIXEL = tolerance(TERMS, scale=2), tolerance(3, scale=3)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# The published config.json is flat, and embeds more tokens than the tokenizer has.
CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "image_token_id": IDS["<|image_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
    "video_token_id": 290,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "torch_dtype": "bfloat16",
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HPSv3.safetensors with the older names, in bfloat16 and its head in float32, beside config and tokenizer."""
    path = tmp_path_factory.mktemp("hpsv3")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "question.txt").write_bytes(QUESTION.encode())
    tokenizer().save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2VLConfig.from_pretrained(path)
    config.text_config.vocab_size = len(IDS) + 256
    state = Qwen2VLForConditionalGeneration(config).state_dict()
    shapes = {"0": (1024, 32), "3": (16, 1024), "5": (2, 16)}
    head = {f"rm_head.{k}.weight": torch.randn(shape) / shape[1] ** 0.5 for k, shape in shapes.items()}
    head |= {f"rm_head.{k}.bias": torch.randn(shape[0]) for k, shape in shapes.items()}
    older = {}
    for name, value in state.items():
        # Wider than transformers starts them, so that attention tells one place from another.
        wide = value + (0.3 * torch.randn_like(value) if value.ndim > 1 else 0.1 * torch.randn_like(value))
        place = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        older[place] = wide.bfloat16().contiguous()
    save_file(older | head, path / "HPSv3.safetensors")
    return path


def tokenizer() -> Qwen2Tokenizer:
    """Qwen2's, with the 256 bytes as its only words: a text's ids are its UTF-8 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    words = {chr(byte): byte for byte in shown} | {chr(256 + k): byte for k, byte in enumerate(hidden)}
    made = Qwen2Tokenizer(vocab=words, merges=[])
    made.add_tokens(list(SPECIALS), special_tokens=True)
    return made


def reward(folder: Path, **options: object) -> HPSv3:
    settings = {"dtype": "float32", "instruction": folder / "question.txt", "instruction_sha256": None} | options
    return HPSv3(folder, folder, **settings)


@pytest.fixture(scope="module")
def score(folder: Path) -> HPSv3:
    """One for all tests that do not change it."""
    return reward(folder)


def pictures(height: int = 60, width: int = 80) -> tuple[torch.Tensor, list[Image.Image]]:
    """Smooth images as 8-bit floats, and the same as PIL."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(3, 3, 6, 8, generator=generator)
    images = (functional.interpolate(small, (height, width), mode="bicubic").clamp(0, 1) * 255).round()
    return images / 255, [Image.fromarray(image.byte().permute(1, 2, 0).numpy()) for image in images]


def patches(image: Image.Image, rows: int, columns: int) -> np.ndarray:
    """Patches of 14 pixels, four neighbours after each other, each seen at two times."""
    resized = np.asarray(image.resize((columns * 28, rows * 28), Image.Resampling.BICUBIC), dtype=np.float64)
    pixels = ((resized / 255 - MEAN) / STD).transpose(2, 0, 1)
    found = []
    for row in range(rows):
        for column in range(columns):
            for y, x in ((0, 0), (0, 14), (14, 0), (14, 14)):
                top, left = 28 * row + y, 28 * column + x
                patch = pixels[:, top : top + 14, left : left + 14]
                found.append(np.stack([patch, patch], axis=1).ravel())
    return np.stack(found)


def ids(prompt: str, places: int) -> list[int]:
    """The chat's tokens by hand: ChatML, the image, the question with the prompt in it."""
    before, after = QUESTION.replace("{text_prompt}", prompt).split("<|Reward|>")
    start, end = IDS["<|im_start|>"], IDS["<|im_end|>"]
    return [
        *(start, *b"system\nYou are a helpful assistant.", end, *b"\n", start, *b"user\n"),
        *(IDS["<|vision_start|>"], *[IDS["<|image_pad|>"]] * places, IDS["<|vision_end|>"]),
        *(*before.encode(), IDS["<|Reward|>"], *after.encode(), end, *b"\n", start, *b"assistant\n"),
    ]


@cache
def backbone(folder: Path) -> Qwen2VLModel:
    """transformers' model with the file's weights, its rotary frequencies as a cast to bfloat16 leaves them."""
    config = Qwen2VLConfig.from_pretrained(folder)
    config.text_config.vocab_size = 256 + len(IDS)
    model = Qwen2VLModel(config).float().eval()
    state = load_file(folder / "HPSv3.safetensors")
    ours = {name: value.float() for name, value in state.items() if name.startswith("visual.")}
    ours |= {f"language_{name}": value.float() for name, value in state.items() if name.startswith("model.")}
    model.load_state_dict(ours)
    for rotary in (model.visual.rotary_pos_emb, model.language_model.rotary_emb):
        rotary.inv_freq = rotary.inv_freq.bfloat16()
    return model


@torch.no_grad()
def by_hand(folder: Path, image: Image.Image, prompt: str, rows: int, columns: int, grid: bool = False) -> float:
    """One image's reward, nothing padded, nothing of the package used; with `grid` at Qwen2-VL's own positions."""
    tokens = torch.tensor([ids(prompt, rows * columns)])
    plain = {"position_ids": torch.arange(tokens.shape[1]).view(1, 1, -1).repeat(3, 1, 1)}
    hidden = backbone(folder)(
        input_ids=tokens,
        pixel_values=torch.from_numpy(patches(image, rows, columns)).float(),
        image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]]),
        **({"mm_token_type_ids": (tokens == IDS["<|image_pad|>"]).int()} if grid else plain),
    ).last_hidden_state[0, tokens[0].tolist().index(IDS["<|Reward|>"])]
    head = {name: value.double().numpy() for name, value in load_file(folder / "HPSv3.safetensors").items()}
    values = hidden.double().numpy()
    for k in "03":
        values = np.maximum(head[f"rm_head.{k}.weight"] @ values + head[f"rm_head.{k}.bias"], 0)
    return (head["rm_head.5.weight"] @ values + head["rm_head.5.bias"])[0]


def test_rewards_are_those_of_the_formula_at_plain_positions(folder: Path, score: HPSv3) -> None:
    images, pil = pictures()
    found = score(images, PROMPTS)
    wanted = [by_hand(folder, image, prompt, 14, 19) for image, prompt in zip(pil, PROMPTS, strict=True)]
    assert found.dtype == np.float64
    assert np.ptp(wanted) > 0.1
    np.testing.assert_allclose(found, wanted, atol=REWARD, rtol=0)
    assert abs(by_hand(folder, pil[0], PROMPTS[0], 14, 19, grid=True) - wanted[0]) > 0.01


@pytest.mark.parametrize(
    ("size", "grid"), [((60, 80), (14, 19)), ((512, 512), (16, 16)), ((448, 448), (16, 16)), ((777, 300), (25, 9))]
)
def test_pixels_are_resized_to_one_area_and_cut_into_patches(
    score: HPSv3, size: tuple[int, int], grid: tuple[int, int]
) -> None:
    images, pil = pictures(*size)
    inputs = score._inputs(images, PROMPTS)
    assert inputs["image_grid_thw"].tolist() == [[1, 2 * grid[0], 2 * grid[1]]] * 3
    wanted = np.concatenate([patches(image, *grid) for image in pil])
    np.testing.assert_allclose(inputs["pixel_values"], wanted, atol=PIXEL, rtol=0)


def test_floats_are_rounded_to_8_bits(score: HPSv3) -> None:
    images, _ = pictures()
    fine = images * 0.9 + 0.0013
    rounded = [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in fine]
    wanted = np.concatenate([patches(image, 14, 19) for image in rounded])
    np.testing.assert_allclose(score._inputs(fine, PROMPTS)["pixel_values"], wanted, atol=PIXEL, rtol=0)


def test_tokens_are_the_chats_with_an_image_token_for_every_four_patches_padded_at_the_right(score: HPSv3) -> None:
    images, _ = pictures()
    inputs = score._inputs(images, PROMPTS)
    rows = [ids(prompt, 14 * 19) for prompt in PROMPTS]
    length = max(map(len, rows))
    padding = [[IDS["<|endoftext|>"]] * (length - len(row)) for row in rows]
    assert inputs["input_ids"].tolist() == [row + pads for row, pads in zip(rows, padding, strict=True)]
    assert inputs["attention_mask"].tolist() == [[1] * len(row) + [0] * (length - len(row)) for row in rows]


def test_neither_batches_nor_order_nor_the_kind_of_image_change_a_reward(folder: Path, score: HPSv3) -> None:
    images, pil = pictures()
    whole = score(images, PROMPTS)
    np.testing.assert_allclose(reward(folder, batch_size=1)(images, PROMPTS), whole, atol=REWARD, rtol=0)
    np.testing.assert_allclose(reward(folder, batch_size=2)(pil, PROMPTS), whole, atol=REWARD, rtol=0)
    order = [2, 0, 1]
    turned = reward(folder, offload=True)(images[order], [PROMPTS[k] for k in order])
    np.testing.assert_allclose(turned, whole[order], atol=REWARD, rtol=0)
    assert score(images[:0], []).shape == (0,)


def test_half_precision_is_the_default_and_keeps_the_head_whole(folder: Path, score: HPSv3) -> None:
    images, _ = pictures()
    half = HPSv3(folder, folder, folder / "question.txt", instruction_sha256=None)
    assert (half.model.backbone.dtype, half.model.head[0].weight.dtype) == (torch.bfloat16, torch.float32)
    whole = score(images, PROMPTS)
    close = tolerance(LAYERS, scale=0.5, dtype=torch.bfloat16)  # about what the last hidden state changes
    np.testing.assert_allclose(half(images, PROMPTS), whole, atol=close, rtol=0)


def test_the_tokenizers_own_chat_template_is_used(folder: Path, score: HPSv3, tmp_path: Path) -> None:
    images, _ = pictures()
    plain = score(images, PROMPTS)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    turn = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
        "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def with_template(template: str) -> np.ndarray:
        path = shutil.copytree(folder, tmp_path / hashlib.sha256(template.encode()).hexdigest()[:8])
        (path / "chat_template.jinja").write_text(template)
        return reward(path)(images, PROMPTS)

    np.testing.assert_allclose(with_template(system + turn), plain, atol=REWARD, rtol=0)
    assert np.abs(with_template(turn) - plain).max() > 1e-3
    with pytest.raises(RecastError, match=r"has 0 tokens <\|image_pad\|> for the prompt 'a red circle', not one"):
        with_template(turn.replace("<|image_pad|>", ""))


def test_a_prompt_with_the_models_own_tokens_is_refused(score: HPSv3) -> None:
    images, _ = pictures()
    with pytest.raises(RecastError, match=r"has 2 tokens <\|Reward\|> for the prompt 'a <\|Reward\|>', not one"):
        score(images[:1], ["a <|Reward|>"])


def test_an_overflow_is_an_error_and_not_a_reward_that_does_not_apply(folder: Path) -> None:
    images, _ = pictures()
    score = reward(folder)
    score.model.backbone.language_model.norm.weight.fill_(torch.inf)
    with pytest.raises(RecastError, match="hpsv3 overflows for the prompt 'a red circle'"):
        score(images, PROMPTS)


def test_the_instruction_must_be_given_and_must_be_the_published_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(
        RecastError,
        match=r"needs its published instruction.*pip download --no-deps hpsv3==1\.0\.0` and "
        r"`recast rewards setup hpsv3 --from hpsv3-1\.0\.0-py3-none-any\.whl`",
    ):
        HPSv3(folder, folder)
    with pytest.raises(
        RecastError, match=r"question.txt' is not that of hpsv3: its SHA-256 is .*, not f6ee57479d4e…: run"
    ):
        HPSv3(folder, folder, folder / "question.txt")
    with pytest.raises(RecastError, match=r"no instruction of hpsv3 in .*absent.txt' .*: run `pip download"):
        read_instruction(tmp_path / "absent.txt")
    (tmp_path / "short.txt").write_text("Rate {text_prompt}")
    with pytest.raises(RecastError, match=r"short.txt' has 0 placeholders <\|Reward\|>, not one"):
        read_instruction(tmp_path / "short.txt", None)


def test_the_instruction_is_read_from_the_wheel_without_running_it(tmp_path: Path) -> None:
    first, second = QUESTION.split("Rate it")
    module = f"import nothing.at.all\nINSTRUCTION = {first!r}\nprompt_with_special_token = {'Rate it' + second!r}\n"
    wheel = tmp_path / "hpsv3-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hpsv3/dataset/data_collator_qwen.py", module)
    assert read_instruction(wheel, hashlib.sha256(QUESTION.encode()).hexdigest()) == QUESTION
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hpsv3/__init__.py", "")
    with pytest.raises(RecastError, match="none-any.whl' has no instruction of hpsv3 in .*There is no item named"):
        read_instruction(wheel)


def test_an_instruction_that_was_set_up_is_the_default_and_is_its_version(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    published = HPSv3.versions(dtype="float32")  # the only one that is accepted: nothing is read
    assert published == {"instruction": "f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c"}
    own = hashlib.sha256(QUESTION.encode()).hexdigest()
    assert HPSv3.versions(instruction=folder / "question.txt", instruction_sha256=None) == {"instruction": own}
    setup.place("hpsv3").parent.mkdir(parents=True)
    setup.place("hpsv3").write_bytes(QUESTION.encode())
    assert HPSv3.versions(instruction_sha256=None) == {"instruction": own}
    assert HPSv3(folder, folder, instruction_sha256=None).instruction == QUESTION
    with pytest.raises(RecastError, match=r"rewards/hpsv3.txt' is not that of hpsv3: its SHA-256 is"):
        HPSv3(folder, folder)


def test_files_with_the_newer_names_are_read_too(folder: Path, score: HPSv3, tmp_path: Path) -> None:
    state = load_file(folder / "HPSv3.safetensors")
    newer = {
        name.replace("model.", "model.language_model.") if name.startswith("model.") else name: value
        for name, value in state.items()
        if not name.startswith(("visual.", "lm_head."))
    } | {f"model.{name}": value for name, value in state.items() if name.startswith("visual.")}
    save_file(newer, tmp_path / "HPSv3.safetensors")
    ours, theirs = converted(newer), converted(state)
    assert [sorted(part) for part in ours] == [sorted(part) for part in theirs]
    images, _ = pictures()
    settings = {"instruction": folder / "question.txt", "instruction_sha256": None, "dtype": "float32"}
    again = base.load("hpsv3", checkpoint=tmp_path, model=folder, **settings)(images, PROMPTS)
    np.testing.assert_allclose(again, score(images, PROMPTS), atol=REWARD, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "no tensor language_model.layers.1.mlp.up_proj.weight"),
        ({"visual.merger.ln_q.bias": None}, "it has no tensor visual.merger.ln_q.bias"),
        ({"model.embed_tokens.weight": None}, "it has no tensor language_model.embed_tokens.weight"),
        ({"rm_head.3.bias": None}, "it has no tensor rm_head.3.bias"),
        ({"rm_head.7.bias": torch.zeros(2)}, "it has a tensor rm_head.7.bias, which this model does not have"),
        ({"model.layers.2.mlp.bias": torch.zeros(2)}, "it has a tensor language_model.layers.2.mlp.bias, which"),
        ({"extra": torch.zeros(2)}, "it has a tensor extra, which this model does not have"),
        ({"rm_head.5.weight": torch.zeros(1, 16)}, r"rm_head.5.weight has the shape \(1, 16\), not \(2, 16\)"),
        ({"model.norm.weight": torch.zeros(31)}, r"language_model.norm.weight has the shape \(31,\), not \(32,\)"),
        ({"model.embed_tokens.weight": torch.zeros(300, 32)}, "it embeds 300 tokens, but the tokenizer has 263 with"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], words: str
) -> None:
    state = load_file(folder / "HPSv3.safetensors") | change
    save_file({name: value for name, value in state.items() if value is not None}, tmp_path / "HPSv3.safetensors")
    with pytest.raises(RecastError, match=words) as caught:
        HPSv3(tmp_path, folder, folder / "question.txt", instruction_sha256=None)
    assert "no HPSv3 checkpoint in" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_cut_short_or_absent_are_refused(folder: Path, tmp_path: Path) -> None:
    question = folder / "question.txt"
    content = (folder / "HPSv3.safetensors").read_bytes()
    (tmp_path / "HPSv3.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(RecastError, match="no HPSv3 checkpoint in .*: give a hub name or a path") as caught:
        HPSv3(tmp_path, folder, question, instruction_sha256=None)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecastError, match="no HPSv3 checkpoint in .*the file .* does not exist"):
        HPSv3(tmp_path / "absent" / "HPSv3.safetensors", folder, question, instruction_sha256=None)
    with pytest.raises(RecastError, match="no Qwen2-VL configuration and tokenizer in"):
        HPSv3(folder, tmp_path, question, instruction_sha256=None)
    with pytest.raises(RecastError, match="hpsv3's batch_size must be at least 1, not 0"):
        reward(folder, batch_size=0)
