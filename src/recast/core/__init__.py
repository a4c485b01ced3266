"""The mathematics, on NumPy and SciPy alone; nothing here imports torch."""

from recast.core import bounds, curves, renyi, schedule, sinkhorn, weights

__all__ = ["bounds", "curves", "renyi", "schedule", "sinkhorn", "weights"]
