"""ReCAST: when each reward counts in diffusion fine-tuning. Importing it never imports torch."""

from recast import core, rewards
from recast._version import __version__
from recast.core.curves import GainCurves, compare, remaining
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
