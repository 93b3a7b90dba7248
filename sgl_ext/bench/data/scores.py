"""Scores of answers: SQuAD's measures, and the confidence interval of their mean."""

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
    """Mean and its confidence interval."""

    mean: float
    low: float
    high: float


def normalised(text: str) -> str:
    """Returns lower-case text without punctuation, articles and repeated blanks (SQuAD v1.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, right: Sequence[str]) -> float:
    """Returns the F1 of an answer's words: the harmonic mean of precision and recall.

    Takes the best match of ``right``.
    """
    return max(_f1(_words(answer), _words(each)) for each in right)


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Returns 1 if the answer equals one of ``right`` after :func:`normalised`, else 0."""
    return float(normalised(answer) in map(normalised, right))


def _words(text: str) -> Counter[str]:
    return Counter(normalised(text).split())


def _f1(words: Counter[str], right: Counter[str]) -> float:
    if not words or not right:
        return float(words == right)
    return 2 * (words & right).total() / (words.total() + right.total())


def mean_interval(scores: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Returns the mean of scores and its bootstrap percentile interval.

    To compare two systems that answered the same questions, pass the differences of their scores:
    the questions differ more than the systems do.

    Raises:
        ValueError: there are fewer than two scores.
    """
    values = np.asarray(scores, np.float64)
    # Percentiles, because the corrected methods are undefined if all scores are equal.
    found = stats.bootstrap(
        (values,), np.mean, confidence_level=confidence, method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(float(values.mean()), float(found.low), float(found.high))
