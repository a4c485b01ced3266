"""The embedded world: a renderer, a grammar, rewards, and a tiny pretrained Stable Diffusion 3 pipeline."""
