"""Tables of the state that schedulers report, for terminals of 80 columns and more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group
from rich.markup import escape
from rich.table import Table

State = Mapping[str, Any]
"""State of the powers that one scheduler reports."""


class Scheduler(NamedTuple):
    """Scheduler of a server, and its state."""

    name: str
    """Name of its server."""
    state: State
    before: State
    """State that it reported earlier."""
    seconds: float
    """Time between both, over which rates are means."""


def tables(now: Sequence[Scheduler]) -> Group:
    """Returns the tables of some schedulers."""
    made = [_tiers(now), _powers(now), _peers(now), _decisions(now)]
    return Group(*(table for table in made if table.row_count))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        name, right, _ = column.partition(">")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _tiers(now: Sequence[Scheduler]) -> Table:
    table = _table(
        "server", "tier", "full>", "hit tokens>", "hit rate>", "saved s>", "in MB/s>", "out MB/s>",
        "failures",
    )  # fmt: skip
    for name, state, before, seconds in now:
        for tier, found in state.get("tiers", {}).items():
            first = before.get("tiers", {}).get(tier, found)

            def rate(
                field: str, found: State = found, first: State = first, seconds: float = seconds
            ) -> str:
                moved = max(found[field] - first[field], 0)  # counters restart with a server
                return f"{moved / seconds / 1e6:,.0f}"

            capacity, failures = found["capacity_pages"], found["failures"]
            table.add_row(
                escape(name),
                tier if found["available"] else f"[red]{tier} (off)[/]",
                f"{found['pages'] / capacity:.0%}" if capacity else "",
                f"{found['hit_tokens']:,}",
                _share(found["hit_tokens"], found["missed_tokens"]),
                _saved(state, found["hit_tokens"]),
                rate("loaded_bytes"),
                rate("stored_bytes"),
                escape(", ".join(f"{why} {count:,}" for why, count in failures.items())),
            )
    return table


def _share(part: int, rest: int) -> str:
    return f"{part / (part + rest):.0%}" if part + rest else ""


def _saved(state: State, tokens: int) -> str:
    """Returns the seconds of computing that tokens which were not computed have saved at least.

    The part of the cost that grows with the square of a prompt's length is left out: the report
    does not tell where in their prompts these tokens were.
    """
    costs = state.get("planning", {}).get("costs", {})
    if "compute" not in costs.get("known", ()):
        return ""
    return f"{tokens * costs['compute']['per_token']:,.1f}"


def _powers(now: Sequence[Scheduler]) -> Table:
    table = _table("server", "power", "since the start")
    for name, state, *_ in now:
        for power, shown in _SHOWN.items():
            if (found := state.get(power)) is not None:
                table.add_row(escape(name), power, escape(shown(found, state)))
    return table


def _chunks(found: State, state: State) -> str:
    linked, saved = found["linked"], _saved(state, found["linked"])
    share = _share(linked, found["missing"] + found["computed"])
    parts = [f"{found['requests']:,} prompts", f"{linked:,} tokens linked"]
    if share:
        parts[-1] += f" ({share}" + (f", {saved} s saved)" if saved else ")")
    parts += [f"{found[key]:,} {key}" for key in ("recomputed", "missing", "computed")]
    return ", ".join(parts)


def _restore(found: State, _state: State) -> str:
    tokens = [
        f"{count:,} computed during loading" if source == "computed" else f"{count:,} from {source}"
        for source, count in found["tokens"].items()
    ]
    return (
        f"{found['prompts']:,} prompts restored"
        + (f": {', '.join(tokens)} (tokens)" if tokens else "")
        + f"; {found['interrupted']:,} preempted by other restorations"
    )


def _swap(found: State, _state: State) -> str:
    return (
        f"{found['swapped_out']:,} requests swapped out, {found['swapped_in']:,} resumed, "
        f"{found['swapped']:,} currently swapped out; {found['recomputed']:,} recomputed "
        f"({found['recomputed_tokens']:,} tokens); {found['stored_bytes'] / 1e6:,.0f} MB copied to "
        "host memory"
    )


def _clusters(found: State, _state: State) -> str:
    opened = found["open"].values()
    read = {
        what: sum(each[what] for each in opened) for what in ("fetched", "prefetched", "in_memory")
    }
    total = sum(read.values())
    blocks = ", ".join(f"{count / total:.0%} {what}" for what, count in read.items() if total)
    lost = sum(len(each["lost"]) for each in opened)
    return (
        f"{len(opened)} contexts open, {found['followed']} requests using them"
        + (f"; blocks: {blocks.replace('_', ' ')}" if blocks else "")
        + (f"; {lost} devices lost" if lost else "")
    )


_SHOWN = {"chunks": _chunks, "restore": _restore, "swap": _swap, "clusters": _clusters}


def _peers(now: Sequence[Scheduler]) -> Table:
    table = _table(
        "server", "peer", "lent MiB>", "used>", "lendable>", "reclaimed>", "unit or blocks",
        "remarks",
    )  # fmt: skip
    for name, state, *_ in now:
        for row in _peers_of(state.get("peer")):
            table.add_row(escape(name), *row)
    return table


def _peers_of(peer: State | None) -> Iterator[Sequence[str]]:
    def mib(size: int) -> str:
        return f"{size / 2**20:,.1f}"

    if peer is None:
        return
    if peer["role"] == "worker":
        unit = peer["unit"] or {"bytes": 0, "whole": False}
        units = peer["lent_bytes"] // max(unit["bytes"], 1)
        kind = f"{units:,} {'units' if unit['whole'] else 'pages'} of {unit['bytes']:,} B"
        lost = f"memory replaced {peer['replaced']} times" if peer["replaced"] else ""
        yield (
            "worker", mib(peer["lent_bytes"]), mib(peer["used_bytes"]), mib(peer["lendable_bytes"]),
            mib(peer["reclaimed"]), kind, lost or escape(peer["refused"]),
        )  # fmt: skip
        return
    for worker in peer["workers"]:
        yield (
            f"master of {worker['pid']}", mib(worker["lent_bytes"]), mib(worker["used_bytes"]), "",
            "", f"{worker['blocks']:,} blocks", escape(worker["refused"]),
        )  # fmt: skip
    if not peer["workers"]:
        yield "master", "", "", "", "", "", "no worker"


def _decisions(now: Sequence[Scheduler]) -> Table:
    """Returns the decisions of the cost model with their mean durations, and its errors."""
    table = _table("server", "decision or cost", "choices", "predicted>", "measured>", "error>")
    for name, state, *_ in now:
        for kind, found in state.get("planning", {}).get("decisions", {}).items():
            choices = found["choices"]
            table.add_row(
                escape(name),
                escape(kind),
                escape(
                    ", ".join(f"{choice} {each['count']:,}" for choice, each in choices.items())
                ),
                _mean_ms(choices, "predicted_seconds", "count"),
                _mean_ms(choices, "measured_seconds", "ended"),
                "" if found["error"] is None else f"{found['error']:.0%}",
            )
    return table


def _mean_ms(choices: Mapping[str, State], what: str, of: str) -> str:
    count = sum(each[of] for each in choices.values())
    total = sum(each[what] for each in choices.values())
    return f"{1e3 * total / count:,.1f} ms" if count else ""
