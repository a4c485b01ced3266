"""W inside other people's trainers: one module per trainer, and `Mixer` for a training loop of one's own.

Nothing here imports a trainer, or torch, before it is used. The guide is docs/guides/integrate.md.
"""

from recast.integrations.mixer import Mixer

__all__ = ["Mixer"]
