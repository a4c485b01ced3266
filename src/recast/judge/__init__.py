"""`recast judge`: pairwise verdicts of a multimodal language model, written by one stage and read by the report."""

from recast.judge.verdicts import ASPECTS, OVERALL, SUBSCORES, Verdicts, interval, load, mean_rate

__all__ = ["ASPECTS", "OVERALL", "SUBSCORES", "Verdicts", "interval", "load", "mean_rate"]
