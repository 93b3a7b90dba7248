"""Tests of the names of link methods."""

from __future__ import annotations

import pytest

from sgl_ext.chunks.methods import LinkMethod, Preparation, Recompute, link_method
from sgl_ext.errors import ExtError


@pytest.mark.parametrize(
    ("name", "preparation", "recompute", "amount"),
    [
        ("full", Preparation.BARE, Recompute.ALL, 0),
        ("naive", Preparation.BARE, Recompute.NOTHING, 0),
        ("lego-0", Preparation.BOS, Recompute.NOTHING, 0),
        ("lego-16", Preparation.BARE, Recompute.HEAD, 16),
        ("blend-15", Preparation.BARE, Recompute.BLEND, 15),
        ("primed", Preparation.PRIMED, Recompute.NOTHING, 0),
        ("primed+head-8", Preparation.PRIMED, Recompute.HEAD, 8),
        ("query-15", Preparation.BARE, Recompute.QUERY, 15),
        ("primed+offline-16", Preparation.PRIMED, Recompute.OFFLINE, 16),
        ("primed+query-5", Preparation.PRIMED, Recompute.QUERY, 5),
    ],
)
def test_names_are_parsed_and_printed(
    name: str, preparation: Preparation, recompute: Recompute, amount: int
) -> None:
    method = link_method(name)
    assert method == LinkMethod(preparation, recompute, amount)
    assert str(method) == name


@pytest.mark.parametrize("name", ["", "lego", "lego--1", "lego-016", "blend-0", "Full"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ExtError, match=r"unknown link method .*primed\+offline-K"):
        link_method(name)
