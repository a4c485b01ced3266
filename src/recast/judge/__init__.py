"""`recast judge`: pairwise verdicts by a multimodal model, and how they are read back."""

from recast.judge.verdicts import ASPECTS, OVERALL, SUBSCORES, Verdicts, interval, load, mean_rate

__all__ = ["ASPECTS", "OVERALL", "SUBSCORES", "Verdicts", "interval", "load", "mean_rate"]
