"""Which pages of host memory a lower tier should get: those that will be used again often enough.

A page that is used again saves the difference between computing it and loading it, and storing a
page takes about as long as loading it. A page that was used ``n`` times should therefore be stored
if the share of such pages that is used once more, times what that saves, exceeds one load.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgl_ext.planning.costs import COMPUTE, Costs

_MOST = 4
"""Uses after which a page is stored in any case: shares of pages with many uses are hardly known,
and estimates that a tier gave once have to be measured again."""
_UNKNOWN = 2
"""Uses after which a page is stored while costs are unknown."""
_WINDOW = 1 << 16
"""Pages after which old observations count half."""


class Reuse:
    """Share of the pages that are used again, by their number of uses so far.

    Until pages are observed, half of those with any number of uses count as used again.
    """

    def __init__(self) -> None:
        self._reached = [0.0] * (_MOST + 1)
        """Pages that were used so often, by the number of uses."""

    def used(self, before: NDArray[np.unsignedinteger], after: NDArray[np.unsignedinteger]) -> None:
        """Records uses of pages.

        Args:
            before, after: number of uses of each page, ``[pages]``.
        """
        for uses in range(1, _MOST + 1):
            self._reached[uses] += np.count_nonzero((before < uses) & (uses <= after))
        if self._reached[1] > _WINDOW:
            self._reached = [each / 2 for each in self._reached]

    def again(self, uses: int) -> float:
        """Returns the share of the pages with ``uses`` uses that are used again."""
        return min((self._reached[uses + 1] + 1) / (self._reached[uses] + 2), 1.0)


def store_after(costs: Costs, reuse: Reuse, tier: str) -> int:
    """Returns the number of uses after which pages of host memory should be stored in a tier."""
    if not (costs.known(COMPUTE) and costs.known(tier)):
        return _UNKNOWN
    load = costs.per_loaded(tier)
    saved = costs.computing(0, costs.chunk) / costs.chunk - load
    worth = (uses for uses in range(1, _MOST) if reuse.again(uses) * saved > load)
    after = next(worth, _MOST)
    return int(costs.decisions.chose("store_after", str(after), {str(after): load}, tier))
