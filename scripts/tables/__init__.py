"""Tables of ``sgl_ext/bench/RESULTS.md``, by name."""

from __future__ import annotations

from tables import chunks, clusters, field, others, peer, restore, swap
from tables.forms import Figures, Table

TABLES: dict[str, Table | Figures] = {
    **chunks.TABLES,
    **clusters.TABLES,
    **field.TABLES,
    **others.TABLES,
    **peer.TABLES,
    **restore.TABLES,
    **swap.TABLES,
}
