"""LoRA adapters in a policy's network: the trained policy, the old policy, and the base without adapters."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn import Parameter

from recast.core import artifact
from recast.errors import RecastError
from recast.flow.sharded import like, whole

__all__ = ["FILE", "Adapters", "Who", "read", "require_finite"]

FILE = "pytorch_lora_weights.safetensors"
"""The file name under which diffusers looks for adapters."""
_DIGEST = "recast.sha256"
"""Among the settings in the metadata, where diffusers ignores it: two keys of metadata are written in random order."""
Who = Literal["default", "old", "base"]
"""The trained adapter, the old policy's adapter, or the base without adapters."""


def require_finite(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise if a tensor of a file has values that are not finite, which would turn into black images."""
    bad = [name for name, each in tensors.items() if each.is_floating_point() and not bool(torch.isfinite(each).all())]
    if bad:
        raise RecastError(
            f"{path}: {len(bad)} of {len(tensors)} tensors have values that are not finite, the first is {bad[0]}: "
            "use a checkpoint from before the training diverged"
        )


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the settings of an adapter file, checked to be finite and, if recast wrote them, undamaged."""
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            settings = json.loads(facts.get(LORA_ADAPTER_METADATA_KEY, "{}"))
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise RecastError(f"{path}: the adapter file cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise RecastError(f"{path}: the adapter file cannot be read: its settings are no mapping")
    require_finite(state, path)
    written = settings.pop(_DIGEST, None)
    lost = any(_DIGEST in text for key, text in facts.items() if key != LORA_ADAPTER_METADATA_KEY)
    lost |= any(isinstance(each, str) and re.fullmatch("[0-9a-f]{64}", each) for each in settings.values())
    if lost or (written is not None and written != _digest(state, settings)):
        raise RecastError(
            f"{path}: the adapter does not have its checksum, it was damaged: train or copy it again, "
            f"or remove {_DIGEST} from its metadata if the change is meant"
        )
    return state, settings


def _digest(state: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> str:
    """SHA-256 of tensors with their names, types and shapes, and of the settings."""
    found = hashlib.sha256(json.dumps(settings, sort_keys=True, default=sorted).encode())
    for name, each in sorted(state.items()):
        found.update(f"{name} {each.dtype} {tuple(each.shape)} ".encode())
        found.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Adapters:
    """Two adapters in one transformer, `default` (trained) and `old`, with a switch between them and the base.

    Both start equal, A Gaussian with standard deviation 1/rank and B zero, so that all three have the base's
    velocity. They are float32 for any dtype of the base. Only `default` requires gradients, whichever is in use.
    A new instance uses `default`.

    Parameters
    ----------
    transformer : Module
        The base, `policy.network`; its parameters are frozen.
    targets : str
        Regular expression of the modules that get adapters, `policy.targets`.
    rank : int, default 32
        Rank of the adapters.
    alpha : int, default 64
        Their scale is alpha / rank.
    seed : int, default 0
        Seed of the initial parameters; the global generators are not changed.

    Raises
    ------
    RecastError
        If the rank or alpha is not positive, or the transformer already has adapters.

    Attributes
    ----------
    parameters, old_parameters : list of Parameter
        Parameters of `default` and of `old`, in the same order.

    Examples
    --------
    >>> from recast import config
    >>> from recast.flow import families
    >>> policy = families.load(config.policy(model="shapes"))
    >>> adapters = Adapters(policy.network, policy.targets, rank=4, alpha=8)
    >>> with adapters.using("old"):
    ...     adapters.active
    'old'
    >>> adapters.active, len(adapters.parameters)
    ('default', 62)
    """

    def __init__(self, transformer: Any, targets: str, rank: int = 32, alpha: int = 64, seed: int = 0) -> None:
        if rank < 1 or alpha <= 0:
            raise RecastError(f"the rank and alpha of LoRA must be above 0, not {rank} and {alpha}")
        if getattr(transformer, "peft_config", None):
            raise RecastError(f"the transformer already has adapters: {', '.join(transformer.peft_config)}")
        self.transformer = transformer.requires_grad_(False)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # the second adapter is intended
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
            for name in ("default", "old"):
                config = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets)
                transformer.add_adapter(config, name)
        self._layers = [module for module in transformer.modules() if isinstance(module, LoraLayer)]
        for layer in self._layers:  # in bfloat16 small updates, and the old policy's average, would be rounded away
            for part in (layer.lora_A, layer.lora_B):
                part.float()
        self.collect()
        self.update_old()
        self.use("default")

    def collect(self) -> None:
        """Collect the parameters again, because FSDP replaces them when it shards a model."""
        self.parameters, self.old_parameters = self._of("default"), self._of("old")

    def _of(self, name: str) -> list[Parameter]:
        """Parameters of an adapter, A and B of each layer, in the order of the model."""
        return [part[name].weight for layer in self._layers for part in (layer.lora_A, layer.lora_B)]

    @property
    def active(self) -> Who:
        """Which of the three is in use."""
        first = self._layers[0]
        return "base" if first.disable_adapters else first.active_adapters[0]

    def use(self, who: Who) -> None:
        """Switch to the trained adapter, the old one, or the base."""
        if who not in get_args(Who):
            raise RecastError(f"unknown adapter {who!r}: choose one of {', '.join(get_args(Who))}")
        for layer in self._layers:
            if who != "base":
                layer.set_adapter(who)
            layer.enable_adapters(who != "base")
        # peft sets `requires_grad` for the active adapter; a switch must not affect training.
        for parameter in self.old_parameters:
            parameter.requires_grad_(False)
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    @contextmanager
    def using(self, who: Who) -> Iterator[None]:
        """Switch for the duration of a `with` block."""
        before = self.active
        self.use(who)
        try:
            yield
        finally:
            self.use(before)

    @torch.no_grad()
    def update_old(self, decay: float = 0.0) -> None:
        """old ← decay · old + (1 − decay) · default; an exact copy for decay 0."""
        if not 0 <= decay <= 1:
            raise RecastError(f"the decay of the old policy must lie in [0, 1], not {decay}")
        for old, new in zip(self.old_parameters, self.parameters, strict=True):
            old.copy_(new) if decay == 0 else old.lerp_(new, 1 - decay)

    def save(self, folder: str | Path, who: Literal["default", "old"] = "default", write: bool = True) -> Path:
        """Write an adapter, atomically, to a file that `pipe.load_lora_weights(folder)` of diffusers reads.

        Alpha is stored in the file's metadata; without it diffusers assumes alpha = rank, which halves the effect of
        the defaults. In a float32 pipeline diffusers produces bit-identical images; in a bfloat16 pipeline it rounds
        the float32 tensors of the file.

        Parameters
        ----------
        folder : str or Path
            Created if necessary.
        who : {"default", "old"}, default "default"
            Which adapter.
        write : bool, default True
            Whether this process writes the file. If the adapter is sharded, all processes call this, one with `write`.

        Returns
        -------
        Path
            The file.
        """
        if who not in ("default", "old"):
            raise RecastError(f"unknown adapter {who!r} to save: choose default or old")
        folder = Path(folder)
        settings = {f"transformer.{key}": value for key, value in self.transformer.peft_config[who].to_dict().items()}
        found = get_peft_model_state_dict(self.transformer, adapter_name=who)
        state = {f"transformer.{key}": whole(tensor).contiguous() for key, tensor in found.items()}
        if not write:
            return folder / FILE
        # `save_lora_weights` adds a second metadata key, and safetensors writes the two in random order.
        settings[_DIGEST] = _digest(state, settings)
        metadata = {LORA_ADAPTER_METADATA_KEY: json.dumps(settings, indent=2, sort_keys=True, default=sorted)}
        return artifact.write_bytes(folder / FILE, save(state, metadata))

    def load(self, folder: str | Path, who: Literal["default", "old"] = "default") -> None:
        """Read an adapter that `save` wrote; its modules, rank and alpha must be those of this transformer."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise RecastError(f"{path}: the adapter file does not exist")
        state, metadata = read(path)
        mine = self.transformer.peft_config[who]
        for key, value in (("r", mine.r), ("lora_alpha", mine.lora_alpha)):
            found = metadata.get(f"transformer.{key}")
            if found != value:
                name = "rank" if key == "r" else "alpha"
                raise RecastError(f"{path}: its {name} is {found}, but this policy's is {value}")
        state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
        expected = get_peft_model_state_dict(self.transformer, adapter_name=who)
        shapes, wanted = ({k: v.shape for k, v in each.items()} for each in (state, expected))
        if shapes != wanted:
            odd = sorted(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
            raise RecastError(
                f"{path}: the adapter is for another transformer: {len(odd)} tensors differ, the first is {odd[0]}"
            )
        state = {name: like(tensor, expected[name]) for name, tensor in state.items()}
        set_peft_model_state_dict(self.transformer, state, adapter_name=who)
