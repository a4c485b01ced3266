"""`recast propose`: images of π⁺ for every prompt, and the folder that holds them."""

from recast.propose.store import Store

__all__ = ["Store"]
