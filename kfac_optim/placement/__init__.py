"""What lies on which rank: who decomposes and preconditions a layer, who keeps its factors, where its shards go.

Where to look::

    ranks.py            the ranks of a run, and who does what among them
    factor_owners.py    factors that a single rank keeps: what the others know, and how they move
    shard_routing.py    which shards of FSDP2 go to their gradient workers alone
"""

from .factor_owners import known_spectra, whole_state
from .ranks import Ranks, decomposed_bytes
from .shard_routing import exchanged_blocks, gathered_vectors

__all__ = ["Ranks", "decomposed_bytes", "exchanged_blocks", "gathered_vectors", "known_spectra", "whole_state"]
