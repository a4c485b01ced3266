"""The sections of a recipe: typed, frozen settings of every stage."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from recast.core import renyi, sinkhorn
from recast.core.weights import Method

MIXTURE_REWARDS = ("mode", "mixed", "fine")
"""The rewards of the exact world."""


class Generator(NamedTuple):
    """Where an image API is, its default model, and the environment variable that holds its key."""

    base_url: str
    model: str
    key_variable: str


GENERATORS = {
    "openai": Generator("https://api.openai.com/v1", "gpt-image-1.5", "OPENAI_API_KEY"),
    "gemini": Generator(
        "https://generativelanguage.googleapis.com/v1beta", "gemini-3-pro-image-preview", "GEMINI_API_KEY"
    ),
}
"""The two image APIs of the paper."""


class Section(BaseModel):
    """Frozen settings that reject an unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class WorldConfig(Section):
    """Images of a policy, or the exact world: one random Gaussian mixture per prompt."""

    kind: Literal["images", "mixture"] = "images"
    dimension: int = Field(32, ge=1)
    modes: int = Field(6, ge=1)
    prompts: int = Field(20, ge=1)
    seed: int = Field(0, ge=0, lt=2**32)


class PolicyConfig(Section):
    """Which model is the policy, where it lives and how it is asked."""

    model: str = Field("shapes", description="a hub name, a local folder, or shapes, the embedded world's base")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="the transformer's and encoders'")
    device: str = Field("auto", description="cuda, cuda:1, cpu; auto takes a GPU where there is one")
    guidance: float = Field(1.0, ge=1, allow_inf_nan=False, description="classifier-free guidance; 1 is none")
    lora: str | None = Field(None, description="a folder with an adapter on top of the model")
    resolution: int | None = Field(None, ge=1, description="pixels a side; the model's own unless told")
    max_sequence_length: int | None = Field(
        None, ge=1, le=512, description="T5's tokens; 256 unless told, or fewer where its tokenizer has fewer"
    )
    cached_prompts: int = Field(
        1024, ge=1, description="prompt embeddings that are kept on the CPU; SD3.5-M's are 2.7 MB each in bfloat16"
    )
    offload_text: bool = Field(False, description="text encoders are on the device only while they encode")
    vae_batch: int = Field(4, ge=1, description="images that are encoded or decoded at a time")


class PromptsConfig(Section):
    """Which prompts the curves are measured on."""

    source: str = Field("shapes:train", description="shapes:SPLIT, or a .txt or .jsonl file")
    count: int | None = Field(None, ge=1, description="how many of them; all unless told")
    seed: int | None = Field(None, ge=0, lt=2**32, description="choose at random; the first ones unless told")


class ProposeConfig(Section):
    """Where the proposals, π⁺'s images, come from; how many a prompt is estimate.samples."""

    source: Literal["renderer", "policy", "folder", "openai", "gemini"] = "renderer"
    folder: str | None = Field(None, description="a folder with images and manifest.jsonl (folder)")
    model: str | None = Field(None, description="the generator's name (openai, gemini)")
    base_url: str | None = Field(None, description="another server with the same interface (openai, gemini)")
    size: str = Field("1024x1024", description="of the images asked for (openai)")
    quality: str | None = Field(None, description="of the images asked for (openai)")
    concurrency: int = Field(4, ge=1, le=256, description="requests on their way at once")
    retries: int = Field(6, ge=0, description="tries after the first, on 429, 5xx and timeouts")
    backoff: float = Field(1.0, ge=0, description="seconds before the first retry; doubles each time")
    timeout: float = Field(180.0, gt=0, description="seconds to wait for an image")
    cap: int | None = Field(None, ge=1, description="images that may be paid for in this folder, ever")
    smallest: int = Field(64, ge=1, description="pixels a side that an image must have")
    seed: int = Field(0, ge=0, lt=2**32, description="of the images made here (renderer, policy)")

    @model_validator(mode="after")
    def _folder_is_named(self) -> ProposeConfig:
        if (self.source == "folder") != (self.folder is not None):
            raise ValueError("a folder is given exactly where the source is folder")
        return self

    @property
    def endpoint(self) -> Generator | None:
        """The image API that the proposals come from, if any."""
        return GENERATORS.get(self.source)


class EstimateConfig(Section):
    """How gain curves are measured."""

    estimator: Literal["coupled", "paper"] = "coupled"
    steps: int = Field(25, ge=1, description="T, the number of denoising steps")
    shift: float = Field(3.0, gt=0, allow_inf_nan=False, description="shift of the scheduler's grid")
    samples: int = Field(8, ge=1, description="N, proposals per prompt")
    noisings: int = Field(4, ge=1, description="noisings of each proposal (coupled)")
    rollouts: int = Field(1, ge=1, description="K, rollouts from each noised proposal")
    spacing: float = Field(0.8, ge=0.01, le=10, description="log-SNR between the levels rollouts visit (coupled)")
    sampler: Literal["euler", "dpm2", "sde", "ancestral", "ancestral2"] | None = Field(
        None, description="the rollouts' sampler (paper); ancestral unless told"
    )
    memory: float = Field(4.0, gt=0, allow_inf_nan=False, description="GiB that the activations of one call may take")
    alpha: float = 2.0
    aggregate: renyi.Aggregation = "prompt-mean"
    seed: int = Field(0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _no_idle_sampler(self) -> EstimateConfig:
        if self.estimator == "coupled" and self.sampler is not None:
            raise ValueError("sampler belongs to estimator: paper; coupled rollouts have a sampler of their own")
        return self

    def used(self) -> dict[str, Any]:
        """The settings that decide the chosen estimator's numbers, for provenance."""
        idle = {"memory", "sampler"} if self.estimator == "coupled" else {"memory", "noisings", "spacing"}
        return {key: value for key, value in self.model_dump().items() if key not in idle}

    @field_validator("alpha")
    @classmethod
    def _usable(cls, value: float) -> float:
        return renyi.check_alpha(value)


class WeighConfig(Section):
    """How W is made from the curves; an empty budget counts every reward alike."""

    budget: dict[str, float] = Field(default_factory=dict)
    method: Method = "sinkhorn"
    tau: float = Field(1.0, gt=0, allow_inf_nan=False)
    shrink: bool = Field(False, description="draw unreliable curves towards static weights")
    seed: int = Field(0, ge=0, lt=2**32)

    @field_validator("budget")
    @classmethod
    def _spendable(cls, value: dict[str, float]) -> dict[str, float]:
        if value:
            sinkhorn.simplex(list(value.values()), len(value), "budget")
        return value


class TrainConfig(Section):
    """How the policy is trained; the defaults are the paper's (App. E.2)."""

    prompts: str = Field("shapes:train", description="shapes:SPLIT, or a .txt or .jsonl file")
    lora: str | None = Field(None, description="the adapter that training starts from; policy.lora unless told")
    epochs: int = Field(120, ge=1)
    prompts_per_epoch: int = Field(48, ge=1, description="prompts sampled per epoch, each with a group of images")
    images_per_prompt: int = Field(24, ge=2, description="images per group")
    batch: int = Field(1152, ge=1, description="images behind one optimizer step, over all processes")
    steps: int | None = Field(None, ge=1, description="T, sampling steps; those of W unless told")
    fraction: float = Field(1.0, gt=0, le=1, description="of an image's T levels that are trained, at random")
    sample_batch: int = Field(24, ge=1, description="images sampled at a time, on one process")
    micro_batch: int = Field(24, ge=1, description="(image, level) pairs a call of the transformer, at most")
    rank: int = Field(32, ge=1, description="of the LoRA")
    alpha: int = Field(64, ge=1, description="of the LoRA")
    learning_rate: float = Field(3e-4, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    warmup: int = Field(0, ge=0, description="optimizer steps of the schedule's warmup")
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = Field(1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(1e-4, ge=0, allow_inf_nan=False)
    clip_norm: float = Field(1.0, gt=0, allow_inf_nan=False, description="largest norm of a gradient")
    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="strength of DiffusionNFT's implicit policies")
    form: Literal["x0", "velocity"] = Field("x0", description="DiffusionNFT's loss, or Eq. (nft-loss) as it stands")
    kl_weight: float = Field(1e-4, ge=0, allow_inf_nan=False, description="weight of the distance to the base; 0: none")
    normalize: Literal["step", "shared", "reward"] = Field("step", description="how rewards get one scale")
    spread: Literal["batch", "group"] = Field("batch", description="whose standard deviation")
    advantage_clip: float = Field(5.0, gt=0, allow_inf_nan=False)
    decay: Literal[0, 1, 2] = Field(1, description="DiffusionNFT's decay_type of the old policy")
    ema: float = Field(0.9, ge=0, lt=1, description="of the adapter that is evaluated")
    precision: Literal["float32", "bfloat16", "float16"] = Field("float32", description="autocast; float16 needs a GPU")
    checkpointing: bool = Field(False, description="recompute activations: less memory, a third more time")
    reweigh_every: int = Field(0, ge=0, description="epochs after which curves and W are made anew; 0: never")
    save_every: int = Field(1, ge=1, description="epochs between checkpoints")
    keep: int = Field(3, ge=1, description="checkpoints that are kept")
    preview_every: int = Field(10, ge=0, description="epochs between sample sheets; 0: none")
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = ["tensorboard"]
    seed: int = Field(0, ge=0, lt=2**32)

    @field_validator("betas")
    @classmethod
    def _decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= each < 1 for each in value):
            raise ValueError("both must lie in [0, 1)")
        return value

    def used(self) -> dict[str, Any]:
        """The settings that decide the trained adapters; a checkpoint of others is refused."""
        idle = {"save_every", "keep", "preview_every", "trackers", "steps"}  # W has the steps
        # They change rounding only, and must change after an error of memory.
        idle |= {"micro_batch", "sample_batch", "checkpointing"}
        if self.schedule in ("constant", "constant_with_warmup"):
            idle.add("epochs")  # training may go on for longer
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in idle}


class EvaluateConfig(Section):
    """How a trained policy is looked at; the defaults are the paper's for SD3.5-Medium."""

    prompts: str = Field("shapes:test", description="held-out ones: shapes:SPLIT, or a .txt or .jsonl file")
    count: int | None = Field(None, ge=1, description="how many of them; all unless told")
    repeats: int = Field(1, ge=1, description="images a prompt")
    steps: int = Field(40, ge=1)
    guidance: float = Field(4.5, ge=1, allow_inf_nan=False, description="classifier-free guidance; 1 is none")
    solver: Literal["euler", "dpm2"] = "dpm2"
    seed: int = Field(42, ge=0, lt=2**31, description="of the first image; the others count up")
    batch: int = Field(16, ge=1, description="images made at a time, in multiples of 16")
    held_out: dict[str, dict[str, Any] | None] = Field(
        default_factory=dict, description="held-out rewards, each with its options, beside the trained ones"
    )


class RunConfig(Section):
    """What `recast run` trains and compares at the recipe's budget; without methods it ends with W."""

    methods: list[Method] = []
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field([0], min_length=1)


class SweepConfig(Section):
    """What `recast sweep` compares: every method at every budget and seed."""

    methods: list[Method] = Field(["static", "sinkhorn"], min_length=1)
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field([0, 1, 2], min_length=1)
    budgets: list[dict[str, float]] = Field(
        default_factory=list, description="the paper's unless told: all alike, then each reward doubled in turn"
    )
