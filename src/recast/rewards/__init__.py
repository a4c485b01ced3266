"""Reward models behind one call: (images, prompts, metadata=None) to a score for each image."""

from recast.rewards.base import NAMES, Reward, load, score

__all__ = ["NAMES", "Reward", "load", "score"]
