"""`recast evaluate`: the scores of a policy on held-out prompts, and how they are read back."""

from recast.evaluate.scores import Budget, Scores, find, locate

__all__ = ["Budget", "Scores", "find", "locate"]
