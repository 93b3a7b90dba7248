"""``python -m sgl_ext.bench NAME [--quick] [--out DIR]``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from sgl_ext.errors import ExtError

BENCHES = (
    "attention",
    "exactness",
    "link",
    "link_answers",
    "memory",
    "overhead",
    "restore",
    "tiers",
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_ext.bench",
        description="Compares systems in one interleaved run; writes DIR/NAME.json.",
    )
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--quick", action="store_true", help="under 3 minutes on 2 cores")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR")
    options = parser.parse_args(arguments)
    bench = importlib.import_module(f"sgl_ext.bench.{options.name}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # before minutes of measuring, not after
        report = bench.run(quick=options.quick, out=options.out)
        report.print()
        print(f"wrote {report.write(options.out)}")
    except ExtError as error:
        sys.exit(f"sgl_ext: {error}")
    except OSError as error:
        sys.exit(f"sgl_ext: cannot write {options.out} ({error.strerror}); choose another --out")


if __name__ == "__main__":
    main()
