"""Tests of ``scripts/serve.sh``, started as in the README."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import requests
from conftest import ROOT, running_in_group

from sgl_ext.packages import cache_dir
from sgl_ext.serving.server import free_port

SERVE = str(ROOT / "scripts" / "serve.sh")


KEY = "not-for-the-log"


@pytest.fixture
def process() -> Iterator[psutil.Popen]:
    """Yields the running script, and kills its process group after the test."""
    process = psutil.Popen(
        [SERVE, "--port", str(free_port()), "--max-total-tokens", "8192", "--api-key", KEY],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_the_script_serves_logs_and_ends_on_ctrl_c(process: psutil.Popen) -> None:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("curl "):
            break
    output = "".join(lines)
    assert lines[-1].startswith("curl "), output[-3000:]
    answer = subprocess.run(
        shlex.split(lines[-1].replace("$API_KEY", KEY)), capture_output=True, text=True, check=True,
        timeout=60,
    ).stdout  # fmt: skip
    assert "Paris" in answer
    url = re.findall(r"http://[^/]+", lines[-1])[0]
    header = {"Authorization": f"Bearer {KEY}"}
    shown = requests.get(f"{url}/server_info", headers=header, timeout=30).text
    assert KEY not in shown
    assert shown.count("<redacted>") >= 2  # among the arguments and in the command
    assert "max_total_num_tokens=8192" in output  # the caller's argument comes last, and prevails
    (log,) = re.findall(rf"log: ({re.escape(str(cache_dir()))}/logs/serve-\S+)", output)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert running_in_group(process.pid) == []
    assert lines[-1] in Path(log).read_text()
    assert KEY not in Path(log).read_text()


REFUSED = {
    "by our flags": (
        ["--ext-config", '{"teirs": {}}'],
        "sgl_ext: inline configuration: unknown key 'teirs'",
    ),
    # Here SGLang kills all children of its process before it prints the reason.
    "while it resolves": (
        ["--ext-config", '{"tiers": {"host": {"capacity": "1MiB"}}}', "--disable-radix-cache"],
        "sgl_ext: tiers does not support a disabled radix cache (--disable-radix-cache)",
    ),
}


@pytest.mark.parametrize("when", REFUSED)
def test_a_refusal_reaches_terminal_and_log(when: str) -> None:
    arguments, reason = REFUSED[when]
    result = subprocess.run(
        [SERVE, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1
    assert reason in result.stdout
    (log,) = re.findall(r"log: (\S+)", result.stderr)
    assert reason in Path(log).read_text()


def test_the_log_is_private_and_complete_after_sigterm() -> None:
    """Checks that the script forwards SIGTERM and waits for the last lines of the log."""
    process = subprocess.Popen(
        [SERVE, "--port", str(free_port())], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        while "log: " not in line:
            line = process.stderr.readline()
        log = Path(line.rpartition("log: ")[2].strip())
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert log.read_text() == output
        assert running_in_group(process.pid) == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
