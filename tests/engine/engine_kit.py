"""Runs programs that start SGLang engines in a separate process, and parses their output."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forked import Template, template

CHECKED = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""Environment variables that make SGLang check its memory after every step."""


def retracting(every: int) -> dict[str, str]:
    """Environment variables that make SGLang retract a request every ``every`` steps."""
    return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(every)}


def run_program(
    folder: Path,
    program: str,
    arguments: object,
    *,
    timeout: float = 550,
    template: Template = template,
    environment: Mapping[str, str] | None = None,
) -> tuple[list[Any], str]:
    """Runs a program; returns the JSON objects that it printed, one per line, and its stderr.

    Args:
        program: source of the program; scheduler processes import it, too.
        arguments: written as JSON to the file that the program's first argument names.
        environment: variables beside those of this process.
        template: process from which the program is forked, if its environment allows it.
    """
    path, file = folder / "program.py", folder / "arguments.json"
    path.write_text(program)
    file.write_text(json.dumps(arguments))
    variables = {**os.environ, **(environment or {})}
    result = template.run([str(path), str(file)], variables, timeout=timeout, folder=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"], (
        result.stderr
    )
