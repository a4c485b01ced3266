"""ReCAST: reward credit assignment across timesteps for diffusion fine-tuning.

Importing this package does not import torch.
"""

from recast import core, rewards
from recast._version import __version__
from recast.core.comparison import compare, remaining
from recast.core.curves import GainCurves
from recast.core.weights import WeightMatrix
from recast.errors import ConvergenceWarning, FloorWarning, RecastError
from recast.weigh import weigh as weigh

__all__ = [
    "ConvergenceWarning",
    "FloorWarning",
    "GainCurves",
    "RecastError",
    "WeightMatrix",
    "__version__",
    "compare",
    "core",
    "remaining",
    "rewards",
    "weigh",
]
