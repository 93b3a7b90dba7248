"""Command line of the check."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

DESCRIPTION = """Checks this package on a machine with a GPU: the Triton kernels against their
references, served powers against stock SGLang, and what powers cost and gain. Writes one JSON file,
which is complete after every part."""

EXIT_STATUS = """exit status: 0 all parts passed, 1 a part failed, was refused or was stopped,
2 wrong arguments or missing packages, 3 no GPU"""


def parse(parts: Iterable[str], arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line.

    Args:
        parts: names of all parts.
        arguments: of the command; those of the process by default.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description=DESCRIPTION, epilog=EXIT_STATUS
    )
    names = list(parts)
    parser.add_argument(
        "--parts", default=",".join(names), metavar="NAMES",
        help="parts that are run, in this order, separated by commas (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--systems", default="", metavar="NAMES",
        help="systems whose answers are compared, separated by commas (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=480, metavar="SECONDS",
        help="time of all parts together (default %(default)g); what does not fit is stopped",
    )  # fmt: skip
    parser.add_argument(
        "--json",
        type=Path,
        help="file of the results (default: gpu_check.json in the folder $OUT, else in --out)",
    )
    parser.add_argument(
        "--out", type=Path, default=None,
        help="folder of models and logs (default: build/gpu/out)",
    )  # fmt: skip
    parser.add_argument(
        "--build", action="store_true",
        help="build this package for this Python first (CMake, nanobind and scikit-build-core)",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="tiny sizes and no thresholds, on the CPU if there is no GPU",
    )  # fmt: skip
    parser.add_argument(
        "--attention-backend", default="triton", help="of all servers on a GPU (default triton)"
    )
    parser.add_argument(
        "--layers", type=int, default=32,
        help="layers of the model of Llama-3-8B's shape that is measured (default 32)",
    )  # fmt: skip
    kernels = parser.add_argument_group("parts kernels and bandwidth")
    kernels.add_argument(
        "--cases", type=int, default=40, help="number of random slabs to check (default 40)"
    )
    kernels.add_argument("--seed", type=int, default=0, help="seed of random inputs (default 0)")
    kernels.add_argument("--no-bandwidth", action="store_true", help="leave out part bandwidth")
    kernels.add_argument(
        "--mib", type=int, default=1024, help="MiB moved by each measured call (default 1024)"
    )
    kernels.add_argument("--rounds", type=int, default=11, help="samples of each call (default 11)")
    kernels.add_argument(
        "--sweep", action="store_true", help="also measure tile sizes and numbers of warps"
    )
    kernels.add_argument(
        "--interpret", action="store_true",
        help="only part kernels, on the CPU in Triton's interpreter",
    )  # fmt: skip
    # A part is run by the same command in a process of its own.
    parser.add_argument("--run-part", help=argparse.SUPPRESS)
    parser.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("cases", "mib", "rounds", "layers", "limit"):
        if getattr(options, name) < 1:
            flag = f"--{name}"
            parser.error(f"{flag} {getattr(options, name)}: expected 1 or more")
    options.parts = [name for name in options.parts.split(",") if name]
    if unknown := [name for name in options.parts if name not in names]:
        parser.error(f"--parts {', '.join(unknown)}: expected some of {', '.join(names)}")
    if options.no_bandwidth:
        options.parts = [name for name in options.parts if name != "bandwidth"]
    options.systems = [name for name in options.systems.split(",") if name]
    return options
