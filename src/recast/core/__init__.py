"""The mathematics as pure functions on arrays, with NumPy and SciPy only; nothing here imports torch."""

from recast.core import bounds, comparison, curves, renyi, schedule, sinkhorn, weights

__all__ = ["bounds", "comparison", "curves", "renyi", "schedule", "sinkhorn", "weights"]
