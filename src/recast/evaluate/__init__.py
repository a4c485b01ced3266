"""`recast evaluate`: the scores of policies on held-out prompts, written by one stage and read by the later ones."""

from recast.evaluate.scores import Budget, Scores, find, locate

__all__ = ["Budget", "Scores", "find", "locate"]
