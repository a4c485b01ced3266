"""How far apart two computations of the same number may be: from the precision of floats, never from one machine."""

import math

import torch


def tolerance(terms: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference between two results of size `scale`, each of which adds up `terms` products.

    A rounding changes a partial sum by up to half of ε. In any order of the additions, the roundings are about as good
    as independent, so both results have an error of about ε·√terms. Three times that is allowed, since the layers of a
    network may amplify errors. Products of bfloat16 are added up in float32: there, the terms are the rounded layers.
    """
    return 3 * torch.finfo(dtype).eps * math.sqrt(terms) * scale
