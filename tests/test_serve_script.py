"""``scripts/serve.sh``, as the README starts it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from conftest import ROOT, running_in_group

from sgl_ext.bench.server import free_port
from sgl_ext.packages import cache_dir

SERVE = str(ROOT / "scripts" / "serve.sh")


@pytest.fixture
def process() -> Iterator[psutil.Popen]:
    """The script, serving; nothing of it outlives the test."""
    process = psutil.Popen(
        [SERVE, "--port", str(free_port()), "--max-total-tokens", "8192"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_it_serves_logs_and_goes_at_ctrl_c(process: psutil.Popen) -> None:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("curl "):
            break
    output = "".join(lines)
    assert lines[-1].startswith("curl "), output[-3000:]
    answer = subprocess.run(
        shlex.split(lines[-1]), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "Paris" in answer
    assert "max_total_num_tokens=8192" in output  # our arguments come last and win
    (log,) = re.findall(rf"log: ({re.escape(str(cache_dir()))}/logs/serve-\S+)", output)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert running_in_group(process.pid) == []
    with open(log) as file:  # noqa: PTH123
        assert lines[-1] in file.read()


def test_a_refusal_passes_through() -> None:
    arguments = ["--model-impl", "auto", "--ext-config", '{"teirs": {}}']
    result = subprocess.run(
        [SERVE, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1
    assert "sgl_ext: inline configuration: unknown key 'teirs'" in result.stdout
