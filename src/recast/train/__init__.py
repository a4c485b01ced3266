"""`recast train`: DiffusionNFT with one reward per step, mixed by W."""

from recast.train import advantage, groups, nft

__all__ = ["advantage", "groups", "nft"]
