"""Watch over other pipeline stages, which are real processes here."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest

from sgl_ext.tiers.stage_watch import StageWatch

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_stage_that_is_killed_is_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with subprocess.Popen(SLEEP) as one, subprocess.Popen(SLEEP) as other:
        watch = StageWatch({0: one.pid, 2: other.pid})
        other.kill()  # not reaped: SGLang's launcher does not reap its schedulers either
        until = time.monotonic() + 20
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        one.kill()
        watch.close()
    (line,) = lines(caplog)
    assert f"pipeline stage 2 (process {other.pid}) has ended" in line


def test_a_server_that_ends_as_a_whole_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with subprocess.Popen(SLEEP) as other:
        watch = StageWatch({1: other.pid})
        watch.close()
        other.kill()
    with subprocess.Popen(SLEEP) as other:
        other.kill()
    StageWatch({1: other.pid}).close()  # it is gone already, and cannot be watched
    assert lines(caplog) == []
