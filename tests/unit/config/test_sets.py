"""Sets of sections: validation, names, maximal sets, and the table in README.md."""

from __future__ import annotations

import runpy

import pytest
from conftest import ROOT

from sgl_ext.config import SECTIONS, load, whole
from sgl_ext.config.sets import PEERS, maximal, minimal, parse, verdict, verdicts, written
from sgl_ext.config.source import ConfigError

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "list_sets.py"))


def test_every_set_has_a_verdict() -> None:
    found = [each.sections for each in verdicts()]
    assert len(set(found)) == len(found)
    powers = {frozenset("peer" if name in PEERS else name for name in each) for each in found}
    assert len(powers) == 2 ** len(SECTIONS) - 1


@pytest.mark.parametrize("name", [*SECTIONS[:4], *PEERS, "clusters"])
def test_a_minimal_section_is_on(name: str) -> None:
    needed = frozenset({"restore", "tiers"} if name == "restore" else {name})
    on = load(minimal(needed)).sections()
    assert ("peer" if name in PEERS else name) in on


def test_refusals_are_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(frozenset({"restore"})).refusal == (
        "restore requires a tiers section to restore from; add one"
    )
    assert verdict(frozenset({"restore", "tiers"})).refusal == ""
    monkeypatch.setitem(whole.EXAMPLES, "chunks", '{"limit": 1}')
    assert "'chunks.limit'" in verdict(frozenset({"chunks"})).refusal


def test_maximal_sets_cover_all_accepted_ones() -> None:
    largest = maximal()
    accepted = [each.sections for each in verdicts() if not each.refusal]
    assert all(any(each <= one for one in largest) for each in accepted)
    assert all(each in accepted for each in largest)
    assert not any(one < other for one in largest for other in largest)
    assert [len(each) for each in largest] == sorted(map(len, largest), reverse=True)


def test_names_of_sets_are_read_back() -> None:
    for each in verdicts():
        assert parse(written(each.sections)) == each.sections
    assert parse("swap+tiers") == parse("tiers+swap")
    with pytest.raises(ConfigError, match=r"names the section 'peer'; name some of tiers, chunks"):
        parse("tiers+peer")
    with pytest.raises(ConfigError, match="several kinds of peers"):
        parse("worker+master")


def test_the_table_of_sets_is_up_to_date() -> None:
    """Compares README.md with the validation; ``scripts/list_sets.py`` writes the table."""
    page = (ROOT / "README.md").read_text()
    assert SCRIPT["page"](page) == page


def test_the_table_has_a_cell_for_every_set() -> None:
    rows = [line for line in SCRIPT["table"]().splitlines() if line.startswith("| ")][1:]
    cells = [cell.strip() for row in rows for cell in row.split("|")[2:-1]]
    assert len(cells) == 2 ** len(SECTIONS)
    assert [at for at, cell in enumerate(cells) if not cell] == [0]
    with pytest.raises(ValueError, match="0 times, not once"):
        SCRIPT["page"]("no markers")
