"""W in yifan123/flow_grpo: `recast integrate flow_grpo --path REPO --apply`, tried at commit ac4c86e.

Everything is inline in the `main` of scripts/train_sd3.py, so three lines are inserted: this module is imported, the
advantages are replaced by a table (B, T), and every slot takes its own column. Slots run from the noisiest step to the
cleanest, W's columns the other way.
"""

from __future__ import annotations

from recast.integrations.scripts import Peer, Place, after_advantages
from recast.integrations.tracker import slots, table

__all__ = ["PEER", "slots", "table"]

PEER = Peer(
    name="flow_grpo",
    script="scripts/train_sd3.py",
    tried="ac4c86e8cae021841f1fde853d340e0db67690dd",
    slots=Place('assigns samples["advantages"]', after_advantages),
)
