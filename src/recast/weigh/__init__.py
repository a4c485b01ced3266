"""`recast weigh`: from gain curves and a budget to the weight matrix W."""

from recast.core.weights import METHODS, Method
from recast.weigh.stage import static, weigh

__all__ = ["METHODS", "Method", "static", "weigh"]
