"""The sections of a recipe: typed, frozen settings of every stage."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from recast.core import renyi, sinkhorn
from recast.core.weights import Method

__all__ = [
    "GENERATORS",
    "MIXTURE_REWARDS",
    "EstimateConfig",
    "EvaluateConfig",
    "Generator",
    "PolicyConfig",
    "PromptsConfig",
    "ProposeConfig",
    "RunConfig",
    "Section",
    "SweepConfig",
    "WeighConfig",
    "WorldConfig",
]

MIXTURE_REWARDS = ("mode", "mixed", "fine")
"""The rewards of the exact world."""


_MOST = 10**7
"""The largest count of anything in a recipe, seeds aside."""


class Generator(NamedTuple):
    """Address of an image API, its default model, and the environment variable with its key."""

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
    """Frozen settings that reject an unknown key, a truth value for a number, and counts that no machine can handle."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool) and "bool" not in str(cls.model_fields[name].annotation):
                raise ValueError(f"expected a number or a text, not {str(each).lower()}")
            if isinstance(each, int) and abs(each) > (_MOST if "seed" not in name else 2**53):
                raise ValueError(f"larger than {_MOST:,} is more than any machine can handle")
        return value


class WorldConfig(Section):
    """What curves are measured on: images of a policy, or the exact world with one random Gaussian mixture per prompt.

    All settings but `kind` belong to the exact world.
    """

    kind: Literal["images", "mixture"] = Field("images", description="Images of a policy, or the exact world.")
    dimension: int = Field(32, ge=1, description="Dimension of the mixtures.")
    modes: int = Field(6, ge=1, description="Modes per mixture.")
    prompts: int = Field(20, ge=1, description="Number of mixtures, each of which stands for a prompt.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the mixtures.")


class PolicyConfig(Section):
    """The policy: which model it is, on which device and in which precision it runs, and how it is sampled."""

    model: str = Field(
        "shapes", description="Name on the Hugging Face Hub, local folder, or `shapes` for the embedded model."
    )
    family: str | None = Field(
        None, description="Your own family as `package.module:Object`; by default found from the model's pipeline."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the transformer and the text encoders."
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        "none", description="Quantization of the frozen transformer: int8 by torchao, nf4 by bitsandbytes."
    )
    compile: bool = Field(False, description="Compile the transformer's blocks with torch.compile.")
    attention: str | None = Field(
        None, description="Attention backend of diffusers, e.g. `flash` or `sage`; by default PyTorch's."
    )
    device: str = Field("auto", description="`cuda`, `cuda:1` or `cpu`; `auto` uses a GPU if there is one.")
    guidance: float = Field(
        1.0,
        ge=1,
        allow_inf_nan=False,
        description="Scale of guidance; 1 is none, except in models that take it as an input.",
    )
    lora: str | None = Field(None, description="Folder of a LoRA adapter that is loaded on top of the model.")
    resolution: int | tuple[int, int] | None = Field(
        None, description="Pixels per side, or [height, width]; by default the model's own resolution."
    )
    max_sequence_length: int | None = Field(
        None, ge=1, le=1024, description="Text tokens; by default the family's number, or the tokenizer's limit."
    )
    cached_prompts: int = Field(1024, ge=1, description="Prompt embeddings cached on the CPU; a few MB each.")
    offload_text: bool = Field(False, description="Keep the text encoders on the device only while they encode.")
    vae_batch: int = Field(4, ge=1, description="Images that are encoded or decoded at a time.")

    @field_validator("resolution", mode="before")
    @classmethod
    def _pixels(cls, value: Any) -> Any:
        sides = value if isinstance(value, (list, tuple)) else [value] * 2
        if value is not None and (len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides)):
            raise ValueError("must be a number of pixels or [height, width]")
        return value


class PromptsConfig(Section):
    """The prompts that gain curves are measured on; a prompt that the file repeats is measured once."""

    source: str = Field("shapes:train", description="`shapes:SPLIT`, or the path of a .txt or .jsonl file.")
    count: int | None = Field(None, ge=1, description="Number of prompts; by default all.")
    seed: int | None = Field(
        None, ge=0, lt=2**32, description="Seed of a random choice of prompts; by default the first ones are used."
    )


class ProposeConfig(Section):
    """Where the proposals, images of the stronger generator π⁺, come from.

    The number of proposals per prompt is `estimate.samples`.
    """

    source: Literal["renderer", "policy", "folder", "openai", "gemini"] = Field(
        "renderer",
        description="The renderer of the shapes world, the policy itself, a folder of images, or an image API.",
    )
    folder: str | None = Field(None, description="Folder with images and manifest.jsonl (`folder`).")
    model: str | None = Field(
        None, description="Model of the image API (`openai`, `gemini`); by default gpt-image-1.5 or Gemini 3 Pro Image."
    )
    base_url: str | None = Field(
        None, description="Address of another server with the same API (`openai`, `gemini`); by default the vendor's."
    )
    size: str = Field("1024x1024", description="Size of the requested images (`openai`).")
    quality: str | None = Field(
        None, description="Quality of the requested images (`openai`); by default the API's default."
    )
    concurrency: int = Field(4, ge=1, le=256, description="Concurrent requests.")
    retries: int = Field(6, ge=0, description="Retries per image after status 429, 5xx or a timeout.")
    backoff: float = Field(1.0, ge=0, description="Seconds before the first retry; doubles with every retry.")
    timeout: float = Field(180.0, gt=0, description="Seconds to wait for an image.")
    cap: int | None = Field(
        None, ge=1, description="Maximum number of images paid for in this folder, over all runs; by default no limit."
    )
    smallest: int = Field(64, ge=1, description="Minimum pixels per side of a proposal.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of images made locally (`renderer`, `policy`).")

    @model_validator(mode="after")
    def _folder_is_named(self) -> ProposeConfig:
        if (self.source == "folder") != (self.folder is not None):
            raise ValueError("propose.folder must be set if, and only if, propose.source is folder")
        return self

    @property
    def endpoint(self) -> Generator | None:
        """The image API that the proposals come from, if any."""
        return GENERATORS.get(self.source)


class EstimateConfig(Section):
    """How gain curves are measured: the estimator, its cost, and the Rényi order of the curves."""

    estimator: Literal["coupled", "paper"] = Field(
        "coupled", description="Coupled rollouts that share their noise, or Alg. 1 of the paper."
    )
    steps: int = Field(25, ge=1, description="Number of denoising steps T.")
    shift: float = Field(
        3.0, gt=0, allow_inf_nan=False, description="Shift of the grid in the exact world; a policy has its own grid."
    )
    samples: int = Field(8, ge=1, description="Proposals per prompt, N.")
    noisings: int = Field(4, ge=1, description="Noisings per proposal (`coupled`).")
    rollouts: int = Field(1, ge=1, description="Rollouts per noised proposal, K; use at least 4 if alpha is not 2.")
    spacing: float = Field(
        0.8, ge=0.01, le=10, description="Log-SNR between the levels that rollouts visit (`coupled`)."
    )
    sampler: Literal["euler", "dpm2", "sde", "ancestral", "ancestral2"] | None = Field(
        None, description="Sampler of the rollouts (`paper`); by default `ancestral`."
    )
    memory: float = Field(
        4.0, gt=0, allow_inf_nan=False, description="Memory in GiB for the activations of one velocity call."
    )
    alpha: float = Field(2.0, description="Rényi order α > 0, α ≠ 1.")
    aggregate: renyi.Aggregation = Field(
        "prompt-mean", description="Mean of the prompts' D (Alg. 1), or D of the moment pooled over prompts."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the rollouts' noise.")

    @model_validator(mode="after")
    def _no_idle_sampler(self) -> EstimateConfig:
        if self.estimator == "coupled" and self.sampler is not None:
            raise ValueError("estimate.sampler belongs to estimator: paper; coupled rollouts always use ancestral2")
        return self

    def used(self) -> dict[str, Any]:
        """The settings that decide the numbers of the chosen estimator, for provenance."""
        idle = {"memory", "sampler"} if self.estimator == "coupled" else {"memory", "noisings", "spacing"}
        return {key: value for key, value in self.model_dump().items() if key not in idle}

    @field_validator("alpha")
    @classmethod
    def _usable(cls, value: float) -> float:
        return renyi.check_alpha(value)


class WeighConfig(Section):
    """How the weight matrix W is made from the gain curves."""

    budget: dict[str, float] = Field(
        default_factory=dict,
        description="Weight λ of every reward on any positive scale; by default all rewards equal.",
    )
    method: Method = Field("sinkhorn", description="Method that turns gain curves into W.")
    columns: Literal["uniform", "effect"] | list[float] = Field(
        "uniform",
        description="Mass ν of each step: equal, proportional to its measured effect on the policy "
        "(`recast doctor --gradients`), or one number per step, the cleanest first.",
    )
    tau: float = Field(1.0, gt=0, allow_inf_nan=False, description="Temperature τ of the Sinkhorn kernel.")
    shrink: bool = Field(False, description="Shrink unreliable curves towards static weights.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the order of shuffled steps.")

    @field_validator("budget")
    @classmethod
    def _spendable(cls, value: dict[str, float]) -> dict[str, float]:
        if value:
            sinkhorn.simplex(list(value.values()), len(value), "budget")
        return value

    @field_validator("columns", mode="before")
    @classmethod
    def _masses(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value:
            if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in value):
                raise ValueError("a list must have one number per step")
            sinkhorn.simplex(value, len(value), "the list")
            return list(value)
        if value not in ("uniform", "effect"):
            raise ValueError("must be uniform, effect or a list of one number per step")
        return value

    def used(self) -> dict[str, Any]:
        """The settings that decide W; uniform columns are left out, as earlier releases did not record them."""
        return {key: value for key, value in self.model_dump().items() if (key, value) != ("columns", "uniform")}


class EvaluateConfig(Section):
    """How a trained policy is evaluated; the defaults are those of the paper."""

    prompts: str = Field(
        "shapes:test", description="Held-out prompts: `shapes:SPLIT`, or the path of a .txt or .jsonl file."
    )
    count: int | None = Field(None, ge=1, description="Number of prompts; by default all.")
    repeats: int = Field(1, ge=1, description="Images per prompt.")
    steps: int = Field(40, ge=1, description="Sampling steps.")
    guidance: float = Field(4.5, ge=1, allow_inf_nan=False, description="Scale of guidance, as in `policy.guidance`.")
    solver: Literal["euler", "dpm2"] = Field("dpm2", description="Solver of the flow ODE.")
    seed: int = Field(42, ge=0, lt=2**31, description="Seed of the first image; image k uses seed + k.")
    batch: int = Field(16, ge=1, description="Images generated at a time, in multiples of 16.")
    held_out: dict[str, dict[str, Any] | None] = Field(
        default_factory=dict, description="Held-out rewards with their options, scored beside the trained rewards."
    )


class RunConfig(Section):
    """What `recast run` trains and compares at the recipe's budget; without methods it ends with W."""

    methods: list[Method] = Field([], description="Methods to train and compare.")
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field([0], min_length=1, description="Seeds of training.")


class SweepConfig(Section):
    """What `recast sweep` compares: every method at every budget and seed."""

    methods: list[Method] = Field(["static", "sinkhorn"], min_length=1, description="Methods to train and compare.")
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(
        [0, 1, 2], min_length=1, description="Seeds of training."
    )
    budgets: list[dict[str, float]] = Field(
        default_factory=list,
        description="Budgets; by default the paper's: all rewards equal, then each reward doubled in turn.",
    )

    @field_validator("budgets")
    @classmethod
    def _spendable(cls, value: list[dict[str, float]]) -> list[dict[str, float]]:
        for budget in value:
            sinkhorn.simplex(list(budget.values()), len(budget), "a budget")
        return value

    warmup: list[str] = Field(
        default_factory=list,
        description="Recipe, or list of recipes, that are trained before, for every seed; its policies resume from it.",
    )

    @field_validator("warmup", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value
