"""Tables of ``sgl_ext/bench/RESULTS.md``, by name."""

from __future__ import annotations

from tables import chunks, clusters, others, peer, restore, swap
from tables.forms import Figures, Table

TABLES: dict[str, Table | Figures] = {
    **chunks.TABLES,
    **clusters.TABLES,
    **others.TABLES,
    **peer.TABLES,
    **restore.TABLES,
    **swap.TABLES,
}
