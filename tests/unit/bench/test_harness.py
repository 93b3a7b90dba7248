"""Benchmark harness: start and end of servers, timing of requests, reports and progress."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import until

from sgl_ext import SUPPORTED_SGLANG
from sgl_ext.bench.data import texts as data
from sgl_ext.bench.harness.load_generator import Request, RequestError, run
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved, paired_ratio
from sgl_ext.bench.memory import bench as memory_bench
from sgl_ext.errors import ExtError
from sgl_ext.progress import Progress, steps
from sgl_ext.serving import server
from sgl_ext.serving.http import forget, live, model_info


def test_interleaving_rotates_the_first_sampler() -> None:
    order: list[str] = []
    first, second = interleaved(
        [lambda n: order.append("a") or n, lambda n: order.append("b") or -n], 4
    )
    assert "".join(order) == "abbaabba"
    assert (first, second) == ([0, 1, 2, 3], [0, -1, -2, -3])
    order.clear()
    interleaved([partial(lambda name, _: order.append(name), name) for name in "abc"], 3)
    assert "".join(order) == "abcbcacab"


def test_the_ratio_of_paired_samples_ignores_what_changes_between_rounds() -> None:
    rounds = np.linspace(1, 100, 101)
    ratio = paired_ratio(1.01 * rounds, rounds)
    assert ratio == pytest.approx((1.01, 1.01, 1.01))
    half, low, high = paired_ratio(np.where(rounds < 50, 0.9, 1.1) * rounds, rounds)
    assert (half, low, high) == pytest.approx((1.1, 0.9, 1.1))


def test_a_report_is_written_to_one_complete_file(tmp_path: Path) -> None:
    report = Report("name", {"quick": True}, {"ratio": 1.0}, [{"system": "a", "ms": 1.5}])
    written = json.loads(report.write(tmp_path / "new").read_text())
    assert written["schema"] == 1
    assert written["figures"] == {"ratio": 1.0}
    assert written["runs"] == [{"system": "a", "ms": 1.5}]
    assert written["machine"]["sglang"] in SUPPORTED_SGLANG
    assert written["machine"]["cores"] >= 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["name.json"]
    report.print()


def test_summary_returns_scaled_percentiles() -> None:
    assert summary([], "ms") == {}
    assert summary([0.002], "ms", 1e3) == {"ms_p50": 2.0}
    percentiles = summary([float(n) for n in range(101)], "ms")
    assert percentiles == {"ms_p50": 50.0, "ms_p90": 90.0, "ms_p99": 99.0}


def test_a_server_that_exits_is_reported_with_its_log(model: Path, tmp_path: Path) -> None:
    broken = server.System("broken", ["--no-such-flag"])
    expected = pytest.raises(ExtError, match="unrecognized arguments: --no-such-flag")
    with expected, server.serve([broken], model, tmp_path):
        pass


NEVER_READY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("loading", flush=True)
time.sleep(600)
"""


def test_a_server_that_is_not_ready_in_time_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "sglang" / "launch_server.py"
    stub.parent.mkdir()
    stub.write_text(NEVER_READY)
    (stub.parent / "__init__.py").touch()
    before = set(psutil.Process().children(recursive=True))
    slow = server.System("slow", environment={"PYTHONPATH": str(tmp_path)})
    log = tmp_path / "slow.log"
    ready = server._wait_until_ready

    def wait(one: server.Server, give_up: float) -> None:
        until(lambda: "loading" in log.read_text())  # its child process is running
        assert len(set(psutil.Process().children(recursive=True)) - before) == 2
        ready(one, give_up)

    monkeypatch.setattr(server, "_wait_until_ready", wait)
    expected = pytest.raises(ExtError, match=r"'slow' was not ready in time.*\nloading")
    with expected, server.serve([slow], tmp_path, tmp_path, deadline=1.0):
        pass
    assert set(psutil.Process().children(recursive=True)) <= before


def test_requests_are_timed(extension: server.Server) -> None:
    prompt = data.sharegpt_prompts(1, characters=(400, 2000))[0]
    cold, hot = (run(extension.url, [Request(prompt, 8)])[0] for _ in range(2))
    for timing in (cold, hot):
        assert 0 < timing.ttft < timing.latency
        assert 0 < timing.tpot < timing.latency
    assert hot.cached_tokens > 50


def test_a_failed_request_raises_an_error(extension: server.Server) -> None:
    with pytest.raises(RequestError):
        run(extension.url, [Request([1] * 9000, 1)])  # longer than the model's context
    with pytest.raises(RequestError):
        run(f"http://127.0.0.1:{server.free_port()}", [Request("hello", 1)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "invalid choice: 'speed'"),
        (
            ["restore", "--part", "speed"],
            "no part 'speed'; its parts: alone, batches, arrivals, host",
        ),
        (["tiers", "--part", "host"], "no part 'host'; its parts: none"),
    ],
)
def test_the_command_rejects_unknown_benches_and_parts(arguments: list[str], message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sgl_ext.bench", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert message in result.stderr


def test_sharegpt_conversations_have_several_text_turns() -> None:
    turns = next(data.sharegpt_conversations())
    assert len(turns) >= 2
    assert all(isinstance(turn, str) for turn in turns)


def test_missing_fio_is_reported_before_any_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(*_args: object, **_options: object) -> None:
        raise AssertionError("measured")

    for part in (
        memory_bench.memory_attention,
        memory_bench.memory_transfer,
        memory_bench.memory_granularity,
    ):
        monkeypatch.setattr(part, "measure", measure)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExtError, match=r"fio, which is not installed; .* apt-get install fio"):
        memory_bench.run(quick=True, out=tmp_path)


def test_progress_is_printed_every_ten_seconds_with_remaining_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter(range(0, 1000, 4))
    progress = Progress("answers", 10, now=lambda: float(next(clock)))
    for _ in range(10):
        progress.step()
    assert capsys.readouterr().err.splitlines() == [
        "sgl_ext: answers: 3 of 10, about 28 s left",
        "sgl_ext: answers: 6 of 10, about 16 s left",
        "sgl_ext: answers: 9 of 10, about 4 s left",
    ]


def test_a_loop_yields_all_of_its_steps() -> None:
    assert [*steps(("a", "b"), "letters")] == ["a", "b"]


@pytest.mark.parametrize("ask", [live, forget, model_info])
def test_a_server_that_does_not_answer_is_reported(ask: Callable[[str], object]) -> None:
    with pytest.raises(ExtError, match=r"no answer from http://127.0.0.1:\d+/.*read the log"):
        ask(f"http://127.0.0.1:{server.free_port()}")
