"""Robust estimates of the seconds of an operation from its features, learnt while serving."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

_FITTED = 64
"""Recent operations that the costs are fitted to."""
_LATELY = 7
"""Recent operations whose median ratio to the fit gives the level of the costs."""
_TRUSTED = 3
"""Operations that costs from a profile count as in the level."""
_OFTEN = 16
"""Operations up to which each one is followed by a fit; later, one of as many is."""
_BELIEF = 0.1
"""Weight of the prior costs of a fit against one operation."""

Features = tuple[float, ...]


class Learner:
    """Estimate of the seconds of an operation: the sum of its features times non-negative costs.

    The first feature is 1, the second one is the size of the operation. The proportions of the
    costs come from a fit to recent operations. Their level is the median ratio of the last few
    operations to the fit: it follows a machine that becomes slower or faster after a few
    operations, and one delayed operation does not change it.

    Args:
        believed: costs from a profile; None if there are none.
        main: feature that durations are attributed to as long as operations differ too little.
    """

    def __init__(self, believed: Features | None = None, main: int = 1) -> None:
        self._believed = believed
        self._main = main
        self._operations: deque[tuple[Features, float]] = deque(maxlen=_FITTED)
        self.count = 0
        """Number of operations so far."""
        self._fit: Features = believed or ()

    def observe(self, features: Features, seconds: float) -> Features:
        """Records an operation.

        Args:
            features: its features; the size is above 0.
            seconds: its duration, above 0.

        Returns:
            Seconds per unit of each feature.
        """
        self._operations.append((features, seconds))
        self.count += 1
        if self.count <= _OFTEN or self.count % _OFTEN == 0:
            self._fit = self._fitted()
        lately = [*self._operations][-_LATELY:]
        ratios = [took / _dot(self._fit, each) for each, took in lately]
        if self._believed is not None and len(ratios) < _LATELY:
            ratios += [1.0] * _TRUSTED
        level = median(ratios)
        return tuple(level * each for each in self._fit)

    def _fitted(self) -> Features:
        features = np.array([each for each, _ in self._operations], float)
        seconds = np.array([took for _, took in self._operations])
        believed = self._believed
        if believed is None:
            rate = float(np.median(seconds / features[:, self._main]))
            believed = tuple(rate * (at == self._main) for at in range(features.shape[1]))
        elif self.count < _LATELY:
            return believed
        return tuple(fit(features, seconds, believed).tolist())


def fit(
    features: NDArray[np.float64],
    seconds: NDArray[np.float64],
    believed: Sequence[float] | None = None,
) -> NDArray[np.float64]:
    """Returns the non-negative costs that explain operations best.

    Minimizes the squared relative errors: a short operation counts as much as a long one, and a
    delayed operation hardly counts.

    Args:
        features: features of each operation, ``[operations, features]``.
        seconds: seconds of each operation, above 0, ``[operations]``.
        believed: prior costs, ``[features]``, which decide what similar operations leave
            undetermined; None for none.

    Returns:
        Seconds per unit of each feature, ``[features]``; that of the size is above 0.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    shares = features / seconds[:, None]
    prior, wanted = np.zeros((0, features.shape[1])), np.zeros(0)
    if believed is not None:
        prior = np.diag(math.sqrt(_BELIEF) * shares.mean(axis=0))
        wanted = prior @ np.array(believed)
    rows, targets = np.concatenate((shares, prior)), np.append(np.ones(len(shares)), wanted)
    costs: NDArray[np.float64] = nnls(rows, targets)[0]
    costs[1] = max(costs[1], 1e-9)
    return costs


def _dot(costs: Features, features: Features) -> float:
    return sum(cost * each for cost, each in zip(costs, features, strict=True))
