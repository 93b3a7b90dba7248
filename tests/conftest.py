"""Fixtures, hooks and helpers of all tests, with two servers that a session shares."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest
from forked import forkable, template
from skips import unexpected
from tier_kit import usable_backends

from sgl_ext.memory.transfer import Lane, TransferEngine
from sgl_ext.models import SMOLLM2, prepare, shortened
from sgl_ext.serving import quick_start
from sgl_ext.serving import server as servers
from sgl_ext.serving.server import Server, System, serve

# OpenMP threads that spin while they wait for each other take the cores from other engines: two
# engines on the same cores would be up to twenty times slower than one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A quick start saves seconds for each of the dozens of servers and engines that tests start.
os.environ.update(quick_start.environment())

ROOT = Path(__file__).parent.parent
POOL = ("--max-total-tokens", "16384")


LONGEST = (
    "start", "swaps", "exactness", "triton_backend", "powers_on_faked_cuda", "all_together",
    "cpu_serving", "peer_servers", "peers_on_faked_cuda", "serving", "all_sections", "tiers",
    "tier_server", "native_sanitizers", "links", "cluster_server", "layouts", "other_pools",
    "remote_servers", "faked_cuda", "serve_script", "engine", "chunk_server",
    "clusters_on_faked_cuda", "swap_server", "device_scenarios", "beams", "restores", "setup",
    "pipeline", "verify_server", "demo_server", "restore_stages", "rows", "packed_linear", "remote",
    "offline", "loan",
)  # fmt: skip
"""Names of test files that take half a minute or more, the longest one first"""


SLOW = (
    "block_groups", "chaos", "cluster_fuzz", "device_scenarios", "device_sides", "doctor",
    "faked_device", "followers_on_device", "fuzz", "harness", "kv_allocator", "loan", "races",
    "remote", "secrets", "ssd_crash", "ssd_stalls", "ssd_start", "staged", "torchvision_bridge",
    "triton_compile", "triton_kernels", "triton_log_sums", "triton_rotate", "unserved",
)  # fmt: skip
"""Names of unit test files that take seconds or more"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the files of :data:`LONGEST` to the front, and marks the tests of :data:`SLOW`."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)


def _unexpected_skips(config: pytest.Config) -> list[str]:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or terminal is None:  # workers have no terminal reporter
        return []
    return unexpected([report.longrepr[2] for report in terminal.stats.get("skipped", ())])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a session in CI if a test was skipped for a reason that ``skips.py`` does not allow."""
    if _unexpected_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for reason in _unexpected_skips(config):
        line = f"FAILED: skipped in CI, and not in tests/skips.py: {reason}"
        terminalreporter.write_line(line, red=True)


@pytest.fixture(scope="session", autouse=True)
def _quick_starts() -> Iterator[None]:
    """Forks the servers of tests from a process that has imported SGLang, where possible."""
    real = servers._start

    def start(
        command: Sequence[str], environment: Mapping[str, str], sink: IO[bytes]
    ) -> psutil.Popen:
        if not forkable(environment):
            return real(command, environment, sink)
        program = command[command.index(sys.executable) + 1 :]
        return template.start(program, environment, stdout=sink.fileno(), stderr=sink.fileno())

    servers._start = start
    yield
    servers._start = real
    template.close()


@pytest.fixture(scope="session")
def trained_model() -> Path:
    """Path of the complete model, for tests that need meaningful answers."""
    return prepare(SMOLLM2)


@pytest.fixture(scope="session")
def model() -> Path:
    """Path of the model cut to its first six layers.

    Its answers are deterministic but make little sense.
    """
    return shortened(SMOLLM2, 6)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def extension(trained_model: Path, logs: Path) -> Iterator[Server]:
    """SGLang server with ``--enable-ext``, every section off, and strict memory checks."""
    strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with serve([System("extension", (*POOL, "--enable-ext"), strict)], trained_model, logs) as (
        server,
    ):
        yield server


@pytest.fixture(scope="session")
def stock(model: Path, logs: Path) -> Iterator[Server]:
    """SGLang server without ``--enable-ext``, on the same platform."""
    with serve([System("stock", POOL)], model, logs) as (server,):
        yield server


@pytest.fixture
def no_garbage() -> None:
    """Closes files of other tests' garbage, which a collection would close during the test."""
    gc.collect()


@pytest.fixture(params=usable_backends())
def backend(request: pytest.FixtureRequest) -> str:
    """Backend of file lanes; a test runs once for each that this machine supports."""
    name: str = request.param
    return name


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    """Transfer engine that is closed after the test."""
    with TransferEngine() as engine:
        yield engine


@pytest.fixture
def host(engine: TransferEngine) -> Lane:
    return engine.host_lane(2, piece_bytes=4096)


@pytest.fixture
def slow(engine: TransferEngine, host: Lane) -> Lane:
    """Lane that copies one piece of 4 KiB in about 40 s, so that queued copies stay queued."""
    return engine.throttled_lane(host, bytes_per_second=100, piece_bytes=4096)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Empty file system of 64 MiB; the test is skipped where it cannot be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def until(condition: Callable[[], object], within: float = 30.0) -> None:
    """Waits until ``condition`` is true; fails the test after ``within`` seconds."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Function that runs ``sglang.launch_server`` until it exits, for starts that must fail."""

    def run(
        *arguments: str,
        model_path: str | None = None,
        program: Sequence[str] = ("-m", "sglang.launch_server"),
        sabotage: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **(environment or {})}
        if sabotage:
            env["SABOTAGE"] = " ".join(sabotage)
        command = [*program, *POOL, "--model-path", model_path or str(model), *arguments]
        return template.run(command, env, timeout=240, folder=tmp_path_factory.mktemp("launch"))

    return run


def refusal(result: subprocess.CompletedProcess[str], *, processes: int = 1) -> str:
    """Returns the extension's error message of a start, which must have failed.

    Args:
        processes: number of processes that may print the message. The extension is activated in
            each process that has imported SGLang's scheduler, including a forked detokenizer.
    """
    assert result.returncode != 0, result.stdout[-2000:]
    lines = [line for line in result.stderr.splitlines() if line.startswith("sgl_ext: ")]
    assert 1 <= len(lines) <= processes, result.stderr[-3000:]
    assert len({*lines}) == 1, result.stderr[-3000:]
    return lines[0]


def running_in_group(group: int) -> list[str]:
    """Returns the names of the running processes of a process group.

    A zombie that waits for init to reap it does not count as running.
    """
    names = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                names.append(process.name())
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return names
