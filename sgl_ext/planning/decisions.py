"""Decisions between alternatives: how often each was chosen, and how good the predictions are.

``wait_for_tier``: wait for a lower tier, or compute. ``load_or_compute``: only load a prefix from
host memory, or compute a part of it. ``tokens_or_layers``: which part. ``compute_or_give_way``:
compute a part of a prompt that loads, or other prompts. ``swap_in_or_recompute``,
``wait_or_overlap``: how a swapped request resumes. ``leave``: whether a preempted request keeps its
KV. ``store_after``: after how many uses a lower tier stores a page. ``link_or_compute``: link
chunks, or compute them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median

_RECENT = 256
"""Recent predictions of each kind that the error is computed from."""
_PENDING = 1024
"""Decisions of all kinds whose outcome is awaited."""


@dataclass
class Choice:
    """Decisions of one kind for one alternative, since the start."""

    count: int = 0
    predicted_seconds: float = 0.0
    """Sum of the predictions for this alternative."""
    ended: int = 0
    """Decisions whose duration was measured."""
    measured_seconds: float = 0.0
    """Sum of the measured durations."""


@dataclass
class Kind:
    """Decisions and predictions of one kind."""

    choices: dict[str, Choice] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    """Predictions of the last decision, in seconds by alternative."""
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Recent predictions and measurements, in seconds."""
    compared: int = 0
    """Number of predictions that were compared with a measurement."""

    @property
    def error(self) -> float | None:
        """Median of the recent absolute relative errors; None before the first measurement."""
        pairs = self.recent.copy()  # another thread may add to it
        errors = [abs(predicted - took) / took for predicted, took in pairs]
        return median(errors) if errors else None


class Decisions:
    """Counts of decisions by kind, and errors of predictions by kind.

    Any thread may record predictions, each kind in one thread; only the scheduler's thread decides.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self._pending: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()
        """Choice and prediction of decisions whose outcome is awaited, by kind and key."""

    def chose(
        self, kind: str, choice: str, seconds: Mapping[str, float], key: str | None = None
    ) -> str:
        """Counts a decision, and returns the choice.

        Args:
            seconds: prediction for each alternative.
            key: name by which :meth:`ended` finds the decision. While it is pending, the same
                choice for the same key is not counted again.
        """
        found = self._kinds.setdefault(kind, Kind())
        found.last = dict(seconds)
        before = None if key is None else self._pending.pop((kind, key), None)
        if key is not None:
            self._pending[kind, key] = choice, seconds[choice]
            if len(self._pending) > _PENDING:
                self._pending.popitem(last=False)
        if before is None or before[0] != choice:
            counted = found.choices.setdefault(choice, Choice())
            counted.count += 1
            counted.predicted_seconds += seconds[choice]
        return choice

    def least(self, kind: str, seconds: Mapping[str, float], key: str | None = None) -> str:
        """Counts a decision for the alternative with the smallest prediction, and returns it.

        The first alternative is preferred to equal ones.
        """
        return self.chose(kind, min(seconds, key=seconds.__getitem__), seconds, key)

    def ended(self, kind: str, key: str, seconds: float | None) -> None:
        """Records the duration of a pending decision; does nothing if there is none.

        Args:
            seconds: measured duration; None if it is not known.
        """
        if (pending := self._pending.pop((kind, key), None)) is None or not seconds:
            return
        choice, predicted = pending
        counted = self._kinds[kind].choices[choice]
        counted.ended += 1
        counted.measured_seconds += seconds
        self.observed(kind, predicted, seconds)

    def observed(self, kind: str, predicted: float, seconds: float) -> None:
        """Records a prediction and what was measured."""
        if seconds > 0:
            found = self._kinds.setdefault(kind, Kind())
            found.recent.append((predicted, seconds))
            found.compared += 1

    def count(self, kind: str) -> int:
        """Returns the number of decisions of a kind."""
        found = self._kinds.get(kind)
        return 0 if found is None else sum(each.count for each in found.choices.values())

    def kinds(self) -> list[tuple[str, Kind]]:
        """Returns all kinds with their names."""
        return [*self._kinds.items()]

    def describe(self) -> dict[str, dict[str, object]]:
        """Returns choices, last predictions, error and its basis by kind, for ``/server_info``."""
        return {
            kind: {
                "choices": {name: asdict(choice) for name, choice in found.choices.items()},
                "last": found.last,
                "error": found.error,
                "compared": found.compared,
            }
            for kind, found in self.kinds()
        }

    def check_integrity(self) -> None:
        """Checks the counts against each other.

        Raises:
            AssertionError: more decisions are pending than are kept or were counted, or more have
                ended than were counted.
        """
        if len(self._pending) > _PENDING:
            raise AssertionError(f"{len(self._pending)} decisions are pending")
        for kind, _ in self._pending:
            if kind not in self._kinds:
                raise AssertionError(f"a decision {kind} is pending, and none was counted")
        for kind, found in self._kinds.items():
            for name, choice in found.choices.items():
                if not 0 <= choice.ended <= choice.count:
                    raise AssertionError(f"{kind}: {name} was chosen and measured: {choice}")
