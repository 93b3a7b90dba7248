"""How right answers are: SQuAD's measures, and how sure their mean is."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Interval(NamedTuple):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and repeated blanks (SQuAD v1.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of an answer's words, for the best of ``right``."""
    return max(_f1(_words(answer), _words(each)) for each in right)


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 if the answer is one of ``right`` after :func:`normalised`, else 0."""
    return float(normalised(answer) in map(normalised, right))


def _words(text: str) -> Counter[str]:
    return Counter(normalised(text).split())


def _f1(words: Counter[str], right: Counter[str]) -> float:
    if not words or not right:
        return float(words == right)
    return 2 * (words & right).total() / (words.total() + right.total())


def mean_interval(scores: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Mean of scores and its bootstrap interval by percentiles.

    For two systems that answered the same questions give the differences of their scores: the
    questions differ more than the systems.

    Raises:
        ValueError: fewer than two scores.
    """
    values = np.asarray(scores, np.float64)
    # By percentiles, because the corrected methods are undefined where all scores are equal.
    found = stats.bootstrap(
        (values,), np.mean, confidence_level=confidence, method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(float(values.mean()), float(found.low), float(found.high))
