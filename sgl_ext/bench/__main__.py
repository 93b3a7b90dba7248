"""Command line of the benchmarks.

``python -m sgl_ext.bench NAME [--quick] [--part PART]… [--out DIR]``
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import requests

from sgl_ext.errors import ExtError
from sgl_ext.progress import say

BENCHES = {
    "attention": "attention",
    "chunks": "chunks.bench",
    "chunks_answers": "chunks.answers",
    "clusters": "clusters.bench",
    "demo": "demo",
    "exactness": "exactness.bench",
    "field": "field.bench",
    "memory": "memory.bench",
    "overhead": "overhead",
    "peer": "peer.bench",
    "restore": "restore.bench",
    "swap": "swap.bench",
    "tiers": "tiers.bench",
    "together": "together.bench",
}
"""Module of each benchmark. The benchmark of a power has the power's name."""

_QUICK_MINUTES = {"chunks": 25, "clusters": 15, "overhead": 5, "peer": 10, "restore": 15}
"""Estimated minutes of ``--quick`` on two cores, rounded up."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_ext.bench",
        description="Compares systems in one interleaved run; writes DIR/NAME.json.",
    )
    parser.add_argument("name", choices=tuple(BENCHES))
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure only a few rounds: up to 5 minutes on 2 cores for most benchmarks, about 10 "
        "for peer, 15 for clusters and restore, 25 for chunks and 42 for together",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR")
    parser.add_argument(
        "--part", action="append", default=[], metavar="PART",
        help="run only this part of a benchmark that has parts; may be repeated",
    )  # fmt: skip
    options, _ = parser.parse_known_args(arguments)
    bench = importlib.import_module(f"sgl_ext.bench.{BENCHES[options.name]}")
    if more := getattr(bench, "add_arguments", None):
        more(parser.add_argument_group(options.name))
    options = parser.parse_args(arguments)
    known = getattr(bench, "PARTS", ())
    if unknown := [part for part in options.part if part not in known]:
        names = ", ".join(known) if known else "none"
        parser.error(f"{options.name} has no part {unknown[0]!r}; its parts: {names}")
    chosen: dict[str, Any] = {"parts": options.part or known} if known else {}
    if more:
        chosen["options"] = options
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # fails before the measurement
        say(_estimate(bench, options))
        report = bench.run(quick=options.quick, out=options.out, **chosen)
        if options.part:
            report.name = "-".join((report.name, *options.part))
        report.print()
        print(f"wrote {report.write(options.out)}")
        if report.failed:
            sys.exit(f"sgl_ext: {report.failed}")
    except ExtError as error:
        sys.exit(f"sgl_ext: {error}")
    except requests.RequestException as error:  # also an OSError
        sys.exit(f"sgl_ext: a server did not answer: {error}")
    except TimeoutError as error:  # also an OSError
        sys.exit(f"sgl_ext: {error or 'timed out'}")
    except OSError as error:
        where = error.filename or options.out
        sys.exit(f"sgl_ext: cannot use {where} ({error.strerror or error}); --out is {options.out}")


def _estimate(bench: ModuleType, options: argparse.Namespace) -> str:
    """Returns a line that estimates how long the benchmark takes."""
    if getattr(options, "dataset", ""):
        return f"bench {options.name}: as long as the data set takes on each server"
    if (own := getattr(bench, "minutes", None)) and (minutes := own(options)):
        return f"bench {options.name}: about {minutes:.0f} minutes"
    if options.quick:
        minutes = _QUICK_MINUTES.get(options.name, 3)
        return f"bench {options.name} --quick: up to about {minutes} minutes on 2 cores"
    return f"bench {options.name}: many minutes to hours; --quick measures only a few rounds"


if __name__ == "__main__":
    main()
