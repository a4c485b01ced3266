"""ReCAST: reward credit assignment across timesteps for diffusion fine-tuning.

Importing this package does not import torch.
"""

from recast import _start

_start.prepare()  # before the imports below, which take most of the time

from recast import core, rewards  # noqa: E402
from recast._version import __version__  # noqa: E402
from recast.core.comparison import compare, remaining  # noqa: E402
from recast.core.curves import GainCurves  # noqa: E402
from recast.core.weights import WeightMatrix  # noqa: E402
from recast.errors import ConvergenceWarning, FloorWarning, RecastError  # noqa: E402
from recast.weigh import weigh as weigh  # noqa: E402

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
