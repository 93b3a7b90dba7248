"""Published figures: README's are in RESULTS.md, and recorded sections match committed results."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT

BENCH = ROOT / "sgl_ext" / "bench"
RESULTS = (BENCH / "RESULTS.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", RESULTS, re.S | re.M))
RECORDED = {
    title: re.findall(r"<!-- results/(\S+) -->", text)
    for title, text in SECTIONS.items()
    if "<!-- results/" in text
}
"""Files of results by section."""
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> list[str]:
    """Returns the numbers of a text without its code, links and comments."""
    plain = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.S)
    return [found.rstrip(",") for found in _NUMBER.findall(plain)]


def leaves(found: Any) -> Iterator[float]:
    """Yields all numbers of a JSON value, also those in texts."""
    if isinstance(found, dict):
        found = [*found.values(), *found]
    if isinstance(found, list):
        for each in found:
            yield from leaves(each)
    elif isinstance(found, str):
        yield from (float(each.replace(",", "")) for each in _NUMBER.findall(found))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield float(found)


def shows(number: str, values: list[float]) -> bool:
    """Returns whether a number is one of the values, rounded, perhaps in another unit."""
    decimals = len(number.partition(".")[2])
    wanted = float(number.replace(",", ""))
    scaled = (value * scale for value in values for scale in (1, 100, 1e3, 1e6, 1e-3))
    return any(abs(round(each, decimals) - wanted) < 1e-9 for each in scaled)


def test_every_section_is_recorded() -> None:
    assert RECORDED.keys() == SECTIONS.keys()


@pytest.mark.parametrize("section", sorted(RECORDED))
def test_recorded_sections_show_committed_results(section: str) -> None:
    kept = [json.loads((BENCH / "results" / name).read_text()) for name in RECORDED[section]]
    values = [*leaves(kept)]
    # test_tables_are_up_to_date compares the tables, which also have ratios of these values.
    text = re.sub(r"<!-- table .*?<!-- end -->", "", SECTIONS[section], flags=re.S)
    missing = [each for each in numbers(text) if not shows(each, values)]
    assert missing == [], f"{section}: no committed result has these"


def test_tables_are_up_to_date() -> None:
    """Compares the tables with the results; ``scripts/results.py`` writes them."""
    assert runpy.run_path(str(ROOT / "scripts" / "results.py"))["rendered"](RESULTS) == RESULTS


def test_committed_results_are_quoted() -> None:
    quoted = {name for names in RECORDED.values() for name in names}
    assert quoted == {path.name for path in (BENCH / "results").glob("*.json")}


def test_figures_of_the_readme_are_in_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    _, _, part = readme.partition("\n## Which power for which problem")
    _, _, demos = readme.partition("\nTTFT speedups of the demonstrations ")
    shown = numbers(part.partition("\n## ")[0] + demos.partition("\n\n")[0])
    assert demos and len(shown) > 25
    known = [float(each.replace(",", "")) for each in numbers(RESULTS)]
    assert [each for each in shown if not shows(each, known)] == []


def test_a_number_that_no_result_has_is_found() -> None:
    values = [*leaves({"figures": {"ratio": 1.0149}, "config": {"rounds": {"ttft": 40}}})]
    assert shows("1.01", values)
    assert shows("101", values)  # per cent
    assert shows("40", values)
    assert not shows("1.02", values)
    assert not shows("41", values)
