"""`recast weigh`: from gain curves and a budget to the weight matrix W."""

from recast.core.weights import METHODS, Method
from recast.weigh.stage import columns_of, effects_of, masses, order_of, static, weigh, weigh_recipe

__all__ = [
    "METHODS",
    "Method",
    "columns_of",
    "effects_of",
    "masses",
    "order_of",
    "static",
    "weigh",
    "weigh_recipe",
]
