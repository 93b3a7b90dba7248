"""Entry point of ``scripts/gpu_check.sh``."""

from __future__ import annotations

import argparse
import os
import tarfile
import time
from pathlib import Path
from typing import Any

from gpu.check import environment, parts
from gpu.check.options import parse
from gpu.check.outcome import Outcome, write_json

_SCHEMA = 2


def main(arguments: list[str] | None = None) -> int:
    """Runs the check; returns its exit status."""
    options = parse(parts.PARTS, arguments)
    options.out = (options.out or environment.ROOT / "build" / "gpu" / "out").absolute()
    if options.run_part:
        environment.set_paths()
        parts.run_here(options)
        return 0
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton's own functions read it on import
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        print(f"gpu_check: {error}: needs a Python with torch and Triton; set PYTHON to it")
        return 2
    if options.interpret:
        return _interpret(options)
    if not torch.cuda.is_available() and not options.dry_run:
        print("gpu_check: no GPU that torch can use; nothing was checked")
        return 3
    return _check(options)


def _interpret(options: argparse.Namespace) -> int:
    """Checks the kernels in this process."""
    environment.set_paths()
    from gpu.check import kernels

    outcome = Outcome()
    kernels.run(options, outcome)
    passed, count = len(outcome.rows) - len(outcome.failed), len(outcome.rows)
    print(f"gpu_check: {passed} of {count} checks passed")
    return 1 if outcome.failed else 0


def _check(options: argparse.Namespace) -> int:
    options.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    results = Path(os.environ.get("OUT") or options.out)
    file = options.json or results / "gpu_check.json"
    begin = time.monotonic()
    environment.prepare(build=options.build)
    machine = environment.describe()
    print("\n".join(f"{name:<18} {what}" for name, what in machine.items()), flush=True)
    hidden = ("out", "json", "outcome", "run_part")
    shown = {name: value for name, value in vars(options).items() if name not in hidden}
    record: dict[str, Any] = {
        "schema": _SCHEMA, "name": "gpu_check", "machine": machine, "config": shown,
        "prepared": round(time.monotonic() - begin, 1), "figures": {}, "parts": {},
    }  # fmt: skip
    write_json(file, record)

    def say(name: str, found: dict[str, Any]) -> None:
        record["parts"][name] = found
        record["figures"] |= found["figures"]
        write_json(file, record)
        _pack(options.out / "logs", results / "gpu_check_logs.tar.gz")
        print(f"{name}: {found['status']} ({found['took']} s)", flush=True)

    parts.run_all(options, say)
    summary = {name: found["status"] for name, found in record["parts"].items()}
    for name, found in record["parts"].items():
        for line in (*found["failed"], *(f"{k} refused: {v}" for k, v in found["refused"].items())):
            print(f"{name}: {line}")
    passed = sum(status in ("passed", "left out") for status in summary.values())
    print(f"gpu_check: {passed} of {len(summary)} parts passed; {file}", flush=True)
    return 0 if passed == len(summary) else 1


def _pack(logs: Path, archive: Path) -> None:
    """Replaces an archive of the logs of all servers so far."""
    if logs.is_dir():
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(logs, arcname=logs.name)
