"""The shapes world: a renderer, a prompt grammar, rewards, and a tiny pretrained Stable Diffusion 3 pipeline."""

__all__: list[str] = []
