"""Reward models behind one interface: (images, prompts, metadata=None) to one score per image."""

from recast.rewards.base import NAMES, Reward, find, load, positive, score

__all__ = ["NAMES", "Reward", "find", "load", "positive", "score"]
