"""The shapes world: a renderer, a prompt grammar, rewards, and a tiny pretrained Stable Diffusion 3 pipeline."""

__all__ = ["VERSION"]

VERSION = 2
"""Of the embedded pipeline and its rewards: results of different versions are not compared."""
