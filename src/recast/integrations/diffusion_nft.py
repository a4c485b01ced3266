"""W in NVlabs/DiffusionNFT: `recast integrate diffusion_nft --path REPO --apply`, tried at commit 24af555.

Everything is inline in the `main` of scripts/train_nft_sd3.py, so three lines are inserted: this module is imported,
the advantages are replaced by a table (B, T), and after the shuffle of the timesteps every slot takes its own column.
"""

from __future__ import annotations

from recast.integrations.scripts import Peer, Place, after_shuffle
from recast.integrations.tracker import slots, table

__all__ = ["PEER", "slots", "table"]

PEER = Peer(
    name="diffusion_nft",
    script="scripts/train_nft_sd3.py",
    tried="24af5554898d85e93efa492f42b5e9cdf4156e9b",
    slots=Place('shuffles samples["timesteps"] in a loop over keys', after_shuffle),
)
