"""Programs that run SGLang's engines in a process of their own, and what they print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forked import template

CHECKED = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""An environment in which SGLang checks its memory after every step."""


def retracting(every: int) -> dict[str, str]:
    """An environment in which SGLang retracts a request every so many steps."""
    return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(every)}


def run_program(
    folder: Path, program: str, arguments: object, *, timeout: float = 550, **environment: str
) -> tuple[list[Any], str]:
    """Runs a program and returns the JSON objects that it printed, and its log.

    Args:
        program: its text; schedulers import it, too.
        arguments: are in JSON in the file that its first argument names.
    """
    path, file = folder / "program.py", folder / "arguments.json"
    path.write_text(program)
    file.write_text(json.dumps(arguments))
    result = template.run(
        [str(path), str(file)], {**os.environ, **environment}, timeout=timeout, folder=folder
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"], (
        result.stderr
    )
