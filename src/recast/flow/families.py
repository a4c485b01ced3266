"""Which policy belongs to a model: one module per family of diffusers pipelines."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from recast import device, objects
from recast.config import PolicyConfig
from recast.errors import RecastError
from recast.flow import loading
from recast.flow.policy import Policy
from recast.quiet import quiet

__all__ = ["FAMILIES", "find", "load"]

FAMILIES = {
    "StableDiffusion3Pipeline": "recast.flow.sd3:SD3Policy",
    "FluxPipeline": "recast.flow.flux:FluxPolicy",
    "Flux2KleinPipeline": "recast.flow.flux2:Flux2KleinPolicy",
    "QwenImagePipeline": "recast.flow.qwen:QwenImagePolicy",
    "SanaPipeline": "recast.flow.sana:SanaPolicy",
    "ZImagePipeline": "recast.flow.zimage:ZImagePolicy",
}
"""The class of a pipeline, as `model_index.json` names it, and the policy for it."""


def load(config: PolicyConfig) -> Policy:
    """The policy that a recipe's section `policy` describes.

    Parameters
    ----------
    config : PolicyConfig
        Its `model` is a name on the Hugging Face Hub, a local folder, or `shapes`, the embedded model. Use
        `recast.config.policy` to create one from keyword arguments.

    Returns
    -------
    Policy
        The policy on its device, with the adapter of `config.lora` if one is set.

    Raises
    ------
    RecastError
        If the model, its family, the adapter or the device is not available.

    Examples
    --------
    >>> from recast import config
    >>> policy = load(config.policy(model="shapes", guidance=2.0))
    >>> policy.condition(["a red circle", "a blue square"]).guidance
    2.0
    """
    where = device.pick(config.device)
    source = str(files("recast.shapes").joinpath("data/pipeline")) if config.model == "shapes" else config.model
    with quiet():
        family = find(source, config.family)
    policy: Policy = family.load(source, config, where)
    return policy


def find(source: str, name: str | None = None) -> Any:
    """The class of the family: `name`, a `package.module:Object`, or the one for the pipeline's `model_index.json`."""
    if name is not None:
        return objects.find(name, "policy.family", needs="load")
    pipeline = loading.pipeline_class(source)
    if pipeline not in FAMILIES:
        raise RecastError(
            f"the model {source!r} is a {pipeline}, which no family supports: use a model with one of "
            f"{', '.join(FAMILIES)}, or name your own family in policy.family as package.module:Object"
        )
    return objects.find(FAMILIES[pipeline], "policy.family", needs="load")
