"""`recast train`: DiffusionNFT with one reward per step, mixed by W."""

from recast.train import advantage, nft
from recast.train.groups import Batches, batches

__all__ = ["Batches", "advantage", "batches", "nft"]
