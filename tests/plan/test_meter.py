"""FLOPs by hand and by torch's counter, and bytes beside those of real tensors."""

import torch
from diffusers import SD3Transformer2DModel
from torch.utils.flop_counter import FlopCounterMode

from recast.flow import configurations
from recast.plan.meter import LOWER, Measured, measure

MEDIUM = configurations.transformer("stabilityai/stable-diffusion-3.5-medium")
SIDE, TEXT = 64, 205
"""Latents of 512 pixels, and the tokens of CLIP and T5 in the recipes."""


def transformer(device: str = "meta", **changes: object) -> SD3Transformer2DModel:
    with torch.device(device):
        return SD3Transformer2DModel(**(MEDIUM | changes)).requires_grad_(False)


def inputs(rows: int, side: int = SIDE, text: int = TEXT, device: str = "meta") -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.zeros(rows, 16, side, side, device=device),
        "encoder_hidden_states": torch.zeros(rows, text, 4096, device=device),
        "pooled_projections": torch.zeros(rows, 2048, device=device),
        "timestep": torch.zeros(rows, device=device),
    }


def counted(model: torch.nn.Module, rows: int, **sizes: int) -> Measured:
    given = inputs(rows, **sizes)
    with torch.no_grad():
        return measure(lambda: model(**given), [*model.parameters(), *model.buffers(), *given.values()])


def test_a_joint_block_by_hand() -> None:
    """The difference of two depths is one block of both streams, without the second attention."""
    one, two, three = (counted(transformer(num_layers=k, dual_attention_layers=()), 2).total for k in (1, 2, 3))
    width, image, tokens = 1536, (SIDE // 2) ** 2, (SIDE // 2) ** 2 + TEXT
    projections = 4 * 2 * tokens * width**2  # q, k, v and output, of image and text
    attention = 2 * 2 * tokens**2 * width  # scores, and their sum of values
    feed_forward = 2 * 2 * tokens * width * 4 * width
    modulation = 2 * 2 * width * 6 * width  # six vectors per stream from the time embedding
    assert three - two == two - one == 2 * (projections + attention + feed_forward + modulation)
    dual = counted(transformer(num_layers=3, dual_attention_layers=(0,)), 2).total - three
    # The second attention is of the image alone, and needs three more vectors.
    assert dual == 2 * (4 * 2 * image * width**2 + 2 * 2 * image**2 * width + 2 * width * 3 * width)


def test_flops_are_those_of_torchs_counter() -> None:
    model, given = transformer(num_layers=2, dual_attention_layers=(0,)), inputs(3, 16)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**given)
    assert counted(model, 3, side=16).total == counter.get_total_flops()


def test_fused_attention_holds_no_matrix_of_scores() -> None:
    query = torch.empty(1, 4, 1000, 64, device="meta", dtype=torch.bfloat16)
    found = measure(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query), [query])
    assert query.nbytes <= found.peak < 1.5 * query.nbytes < 2 * 4 * 1000**2


def test_autocast_on_meta_is_that_of_the_cpu() -> None:
    """With the CPU's own list: it keeps normalizations in the lower precision, which a GPU does not."""
    sizes = {"num_layers": 2, "dual_attention_layers": (0,), "attention_head_dim": 8, "num_attention_heads": 4}
    sizes |= {"caption_projection_dim": 32, "pos_embed_max_size": 32}
    found = []
    for device in ("cpu", "meta"):
        model, given = transformer(device, **sizes), inputs(4, 16, 20, device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("attn.to_q" in name)
        known = [*model.parameters(), *model.buffers(), *given.values()]

        def step(
            model: torch.nn.Module = model, given: dict[str, torch.Tensor] = given, real: bool = device == "cpu"
        ) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=real, cache_enabled=False):
                v = model(**given).sample
            v.float().pow(2).mean().backward()

        lower = None if device == "cpu" else torch.bfloat16
        found.append(measure(step, known, lower, (LOWER, frozenset())))
    real, meta = found
    assert meta.flops["bfloat16"] > 0
    assert set(meta.flops) == {"bfloat16"}
    assert abs(meta.saved / real.saved - 1) < 0.1
    assert abs(meta.peak / real.peak - 1) < 0.1


def test_checkpointing_recomputes_a_forward_pass() -> None:
    model, given = transformer(num_layers=4, dual_attention_layers=()), inputs(2, 16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attn.to_q" in name)
    known = [*model.parameters(), *model.buffers(), *given.values()]

    def step() -> Measured:
        for each in model.parameters():
            each.grad = None
        return measure(lambda: model(**given).sample.mean().backward(), known)

    plain = step()
    model.enable_gradient_checkpointing()
    saving = step()
    blocks = counted(transformer(num_layers=4, dual_attention_layers=()), 2, side=16).total
    assert 0.9 * blocks < saving.total - plain.total < blocks
    assert saving.saved < 0.3 * plain.saved
    assert saving.peak < 0.6 * plain.peak
    assert step() == saving
