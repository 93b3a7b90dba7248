"""Parts of the check, and the processes that run them one after the other."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpu.check.environment import ROOT, stand_in
from gpu.check.outcome import Outcome
from gpu.check.setup import Setup

_KILL_S = 10.0
_DRY = 5
"""Factor of the deadlines of a dry run, which may take place on few cores."""
_LEAST_S = 20.0
"""A part is not started with less time than this."""


class Part(NamedTuple):
    """A part of the check: ``run(setup, outcome)`` of a module of this package."""

    module: str
    deadline: float
    """Seconds after which it is stopped."""
    served: bool = True
    """Whether it starts servers, which needs SGLang and the compiled modules."""


PARTS = {
    "lanes": Part("lanes", 60),
    "equal": Part("equal", 180),
    "peer": Part("peers", 120),
    "follower": Part("followers", 100),
    "speed": Part("speed", 150),
    "memory": Part("host_memory", 170),
    "smollm2": Part("smollm2", 150),
    "kernels": Part("kernels", 150, served=False),
    "bandwidth": Part("bandwidth", 150, served=False),
}
"""All parts by name, in the order in which they run."""
OWN_DEVICE = ("kernels", "bandwidth")
"""Parts that take the options instead of a setup."""


def run_here(options: argparse.Namespace) -> None:
    """Runs one part in this process, and writes its outcome."""
    part = PARTS[options.run_part]
    outcome = Outcome(options.outcome, thresholds=not options.dry_run)
    module = importlib.import_module(f"gpu.check.{part.module}")
    with outcome.step("all"):
        if options.run_part in OWN_DEVICE:
            module.run(options, outcome)
        else:
            module.run(setup_of(options), outcome)


def setup_of(options: argparse.Namespace) -> Setup:
    """Returns the setup of this process."""
    import torch

    return Setup(options, options.out, torch.cuda.is_available(), stand_in())


def run_apart(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Runs a part in a process of its own, and stops what is left of it after ``seconds``.

    Returns:
        Its outcome; with ``"status": "no time"`` if it did not end.
    """
    outcome = Path(options.out) / f"{name}.json"
    outcome.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *forwarded(options)]
    command += ["--run-part", name, "--outcome", str(outcome)]
    begin = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        stop(process)
    found: dict[str, Any] = Outcome().content() | {"status": "failed"}
    with suppress(OSError, ValueError):
        found = json.loads(outcome.read_text())
    if code is None:
        found["status"] = "no time"
        found["failed"].append(f"stopped after {seconds:.0f} s")
    elif code:
        found["status"] = "failed"
        found["failed"].append(f"its process ended with code {code}")
    return found | {"deadline": seconds, "took": round(time.monotonic() - begin, 1)}


def forwarded(options: argparse.Namespace) -> list[str]:
    """Returns the arguments of a part's process."""
    given = ["--out", str(options.out), "--systems", ",".join(options.systems)]
    for name in ("attention_backend", "layers", "cases", "seed", "mib", "rounds"):
        given += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    given += [
        f"--{flag.replace('_', '-')}" for flag in ("dry_run", "sweep") if getattr(options, flag)
    ]
    return given


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops a part's process and all processes that descend from it."""
    left = _descendants(process.pid)
    for kill in (signal.SIGTERM, signal.SIGKILL):
        for pid in (process.pid, *left):
            with suppress(ProcessLookupError):
                os.kill(pid, kill)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        if not left:
            return


def _descendants(pid: int) -> list[int]:
    try:
        import psutil

        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except Exception:  # it has ended, or there is no psutil
        return []


def run_all(options: argparse.Namespace, say: Callable[[str, dict[str, Any]], None]) -> None:
    """Runs parts one after the other, as far as the time limit allows.

    Args:
        say: called with the name and the outcome of each part.
    """
    # Ends through the clean-up of the part in progress.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    end = time.monotonic() + options.limit
    for name in options.parts:
        left = end - time.monotonic()
        if left < _LEAST_S:
            say(name, Outcome().content() | {"status": "no time", "took": 0.0})
            continue
        print(f"\n== {name} ({left:.0f} s left)", flush=True)
        slower = _DRY if options.dry_run else 1
        say(name, run_apart(name, options, min(left, slower * PARTS[name].deadline)))
