"""The section `train` of a recipe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from recast.config.sections import Section

__all__ = ["TrainConfig"]


class TrainConfig(Section):
    """How the policy is trained with DiffusionNFT; the defaults are those of the paper (App. E.2)."""

    prompts: str = Field("shapes:train", description="`shapes:SPLIT`, or the path of a .txt or .jsonl file.")
    lora: str | None = Field(
        None, description="Folder of the adapter that a fresh training starts from; by default `policy.lora`."
    )
    resume_from: str | None = Field(
        None,
        description="Finished run, or checkpoint, whose adapters, optimizer and step count training continues with; "
        "with `lora`, only its optimizer and step count.",
    )
    epochs: int = Field(120, ge=1, description="Number of epochs.")
    prompts_per_epoch: int = Field(48, ge=1, description="Prompts per epoch, each with a group of images.")
    images_per_prompt: int = Field(24, ge=2, description="Images per prompt and epoch.")
    batch: int = Field(1152, ge=1, description="Images per optimizer step, over all processes.")
    steps: int | None = Field(None, ge=1, description="Sampling steps T; by default the steps of W.")
    fraction: float = Field(
        1.0, gt=0, le=1, description="Fraction of the T levels of an image that are trained, rounded down."
    )
    sample_batch: int = Field(24, ge=1, description="Images sampled at a time, per process.")
    micro_batch: int = Field(24, ge=1, description="Maximum (image, level) pairs per call of the transformer.")
    rank: int = Field(32, ge=1, description="Rank of the LoRA adapter.")
    alpha: int = Field(64, ge=1, description="Alpha of the LoRA adapter.")
    optimizer: Literal["adamw", "adamw8bit"] = Field(
        "adamw", description="AdamW, or bitsandbytes' AdamW with moments in 8 bits."
    )
    learning_rate: float = Field(3e-4, gt=0, allow_inf_nan=False, description="Learning rate of AdamW.")
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine"] = Field(
        "constant", description="Schedule of the learning rate."
    )
    warmup: int = Field(0, ge=0, description="Optimizer steps of warmup.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Coefficients β1 and β2 of AdamW.")
    epsilon: float = Field(1e-8, gt=0, allow_inf_nan=False, description="Epsilon of AdamW.")
    weight_decay: float = Field(1e-4, ge=0, allow_inf_nan=False, description="Weight decay of AdamW.")
    clip_norm: float = Field(1.0, gt=0, allow_inf_nan=False, description="Maximum norm of the gradient.")
    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="Strength β of DiffusionNFT's implicit policies.")
    form: Literal["x0", "velocity"] = Field(
        "x0", description="DiffusionNFT's own form of the loss, or Eq. (nft-loss) as printed."
    )
    kl_weight: float = Field(
        1e-4, ge=0, allow_inf_nan=False, description="Weight of the KL term towards the base model; 0 turns it off."
    )
    kl_every: int = Field(
        1, ge=1, description="Compute the KL term for every n-th (image, level) pair, weighted for the others."
    )
    normalize: Literal["step", "shared", "reward"] = Field(
        "step", description="Standardize the mixed reward per step, over all steps, or each reward before mixing."
    )
    spread: Literal["batch", "group"] = Field(
        "batch", description="Take standard deviations over all images of an epoch, or within each prompt's group."
    )
    advantage_clip: float = Field(5.0, gt=0, allow_inf_nan=False, description="Maximum absolute advantage.")
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = Field(
        "all",
        description="DiffusionNFT's adv_mode: all advantages, the positive or the negative ones only, 1 for positive "
        "ones, or their signs.",
    )
    integer_timesteps: bool = Field(
        False,
        description="Sample with timesteps truncated to integers, as DiffusionNFT's sampler does.",
    )
    decay: Literal[0, 1, 2] = Field(1, description="DiffusionNFT's decay_type of the old policy.")
    ema: float = Field(0.9, ge=0, lt=1, description="Decay of the averaged adapter, which is evaluated.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of autocast; float16 needs a GPU."
    )
    checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory for about a third more time."
    )
    offload_rewards: bool = Field(
        False, description="Keep those rewards that can be offloaded on the device only while they score."
    )
    reweigh_every: int = Field(0, ge=0, description="Epochs between new estimates of the curves and W; 0 is never.")
    save_every: int = Field(1, ge=1, description="Epochs between checkpoints.")
    keep: int = Field(3, ge=1, description="Number of checkpoints that are kept.")
    preview_every: int = Field(10, ge=0, description="Epochs between sheets of sample images; 0 is never.")
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        ["tensorboard"], description="Experiment trackers."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of training.")

    @field_validator("betas")
    @classmethod
    def _decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= each < 1 for each in value):
            raise ValueError("both must lie in [0, 1)")
        return value

    def levels(self, steps: int) -> int:
        """Number of the T levels at which an image is trained; DiffusionNFT's rounding."""
        return max(1, int(self.fraction * steps))

    def used(self) -> dict[str, Any]:
        """The settings that decide the trained adapters; a checkpoint of other settings is refused."""
        idle = {"save_every", "keep", "preview_every", "trackers", "steps"}  # the steps are those of W
        # These change rounding only, and must be free to change after an out-of-memory error.
        idle |= {"micro_batch", "sample_batch", "checkpointing", "offload_rewards"}
        added = {"optimizer": "adamw", "kl_every": 1, "adv_mode": "all", "integer_timesteps": False}
        idle |= {key for key, value in added.items() if getattr(self, key) == value}  # not in earlier releases
        if self.schedule in ("constant", "constant_with_warmup"):
            idle.add("epochs")  # training may be extended
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in idle}
