"""Writes the table of section sets in ``README.md``, from the validation of the configuration.

It replaces what is between ``<!-- sets -->`` and ``<!-- end -->``. Run it with the Python of the
environment after a constraint between sections was added, removed or changed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sgl_ext.config import SECTIONS
from sgl_ext.config.sets import PEERS, Sections, maximal, verdict

PAGE = Path(__file__).parents[1] / "README.md"
_BEGIN, _END = "<!-- sets -->", "<!-- end -->"
_ROWS, _COLUMNS = SECTIONS[:3], SECTIONS[3:]
_SERVED = "\N{CHECK MARK}"


def _subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)


def _kinds(names: tuple[str, ...]) -> list[Sections]:
    """Returns the set with each kind of peer; one set if it has none."""
    rest = frozenset(names) - {"peer"}
    return [rest | {kind} for kind in PEERS] if "peer" in names else [rest]


def _title(names: tuple[str, ...], none: str) -> str:
    return " ".join(f"`{name}`" for name in names) or none


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spoken(sections: Sections) -> str:
    """Returns the names of a set, with the kind of its peer."""
    kinds = {"worker": "worker", "master": "master", "layers": "master with layer buffers"}
    names = []
    for name in SECTIONS:
        kind = next((kinds[each] for each in PEERS if each in sections), "")
        if name in sections:
            names.append(f"`{name}`")
        elif name == "peer" and kind:
            names.append(f"`peer` ({kind})")
    return ", ".join(names)


def table() -> str:
    """Returns the table of all sets, the reasons of refusals, and the maximal sets."""
    reasons: dict[str, int] = {}
    served = 0

    def cell(names: tuple[str, ...]) -> str:
        nonlocal served
        if not names:
            return ""
        found = [verdict(each).refusal for each in _kinds(names)]
        numbers = [reasons.setdefault(why, len(reasons) + 1) for why in filter(None, found)]
        served += "" in found
        marks = [_SERVED] if "" in found else []
        return " ".join([*marks, *(f"[{number}]" for number in dict.fromkeys(numbers))])

    columns = [*_subsets(_COLUMNS)]
    lines = [_line(["", *(_title(each, "alone") for each in columns)])]
    lines.append("|---" * (len(columns) + 1) + "|")
    for row in _subsets(_ROWS):
        cells = (cell((*row, *column)) for column in columns)
        lines.append(_line([_title(row, "none of these"), *cells]))
    count = 2 ** len(SECTIONS) - 1
    lines += [
        "",
        f"{served} of the {count} sets are served ({_SERVED}); with a peer as worker and as "
        "master, unless a number gives a reason:",
    ]
    lines += ["", *(f"- [{number}] {why}." for why, number in reasons.items())]
    lines += ["", "Maximal sets:", ""]
    lines += [f"- {_spoken(each)}" for each in maximal()]
    return "\n".join(lines)


def page(text: str) -> str:
    """Returns the page with the table between the markers replaced.

    Raises:
        ValueError: the page does not have the markers once.
    """
    pattern = f"(?<={_BEGIN}\n).*?(?={_END})"
    replaced, count = re.subn(pattern, lambda _: f"\n{table()}\n\n", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE.name} has the markers {_BEGIN} and {_END} {count} times, not once")
    return replaced


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
