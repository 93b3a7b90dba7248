"""Invalid starts are refused with one line on stderr, and stopped servers clean up.

Some tests break a part of SGLang with ``tests/sabotage.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import requests
from conftest import POOL, Launch, refusal, running_in_group
from forked import template

from sgl_ext.engine.core import scheduler
from sgl_ext.engine.kv import install as kv_memory
from sgl_ext.engine.launch import launcher, server_args
from sgl_ext.serving import server

ONE_OF_EACH = [module.HOOKS[0].target for module in (server_args, launcher, scheduler, kv_memory)]


def test_unsupported_sglang_version_is_refused(launch: Launch) -> None:
    message = refusal(launch("--enable-ext", sabotage=["version", "0.5.24"]))
    assert "works with SGLang 0.5.22 and 0.5.23, found 0.5.24" in message
    assert "install sglang==0.5.23" in message


@pytest.mark.parametrize("target", ONE_OF_EACH)
def test_start_is_refused_if_a_hook_did_not_apply(launch: Launch, target: str) -> None:
    result = launch("--enable-ext", sabotage=["hook", target])
    if target.endswith(".add_cli_args"):  # this hook adds the flag to SGLang's parser
        assert result.returncode == 2
        assert "unrecognized arguments: --enable-ext" in result.stderr
        return
    assert f"lacks functions that sgl_ext 0.1.0 requires: {target}" in refusal(result, processes=2)


def test_start_is_refused_if_sglang_lacks_launch_callback(launch: Launch) -> None:
    message = refusal(launch("--enable-ext", sabotage=["seam"]))
    assert "launch_callback of sglang.srt.entrypoints.http_server.launch_server" in message


def test_start_is_refused_if_a_scheduler_runs_another_version(launch: Launch) -> None:
    message = refusal(launch("--enable-ext", sabotage=["report"]))
    assert "scheduler 0 reports {'version': '0.0.0'" in message


def test_unknown_configuration_key_is_refused(launch: Launch) -> None:
    message = refusal(launch("--enable-ext", "--ext-config", '{"teirs": {}}'))
    assert "unknown key 'teirs' (did you mean 'tiers'?)" in message


def test_sglang_serve_accepts_the_flags(launch: Launch) -> None:
    message = refusal(
        launch(
            "--enable-ext", "--ext-config", "/does/not/exist.yaml",
            program=("-c", "from sglang.cli.main import main; main()", "serve"),
        )
    )  # fmt: skip
    assert "cannot read the configuration file /does/not/exist.yaml" in message


def test_engine_accepts_the_flags_as_keyword_arguments(model: Path) -> None:
    program = f"import sglang; sglang.Engine(model_path='{model}', enable_ext=True, ext_config={{}}"
    result = subprocess.run(
        [sys.executable, "-c", program.replace("{}", "{'start_dedline': 1}") + ")"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1  # the engine raises instead of exiting
    assert "ConfigError: ext_config: unknown key 'start_dedline' (did you mean" in result.stderr


def test_configuration_without_enable_ext_is_refused(launch: Launch) -> None:
    assert "a configuration (--ext-config) needs --enable-ext" in refusal(
        launch("--ext-config", "{}")
    )


def test_parser_rejects_enable_ext_if_the_plugin_is_not_selected(launch: Launch) -> None:
    result = launch("--enable-ext", environment={"SGLANG_PLUGINS": "another"})
    assert result.returncode == 2
    assert "unrecognized arguments: --enable-ext" in result.stderr


def test_model_path_without_a_model_is_refused(launch: Launch, tmp_path: Path) -> None:
    message = refusal(launch("--enable-ext", model_path="/does/not/exist"))
    assert "--model-path /does/not/exist does not exist" in message
    message = refusal(launch("--enable-ext", model_path=str(tmp_path)))
    assert f"SGLang cannot start with --model-path {tmp_path}" in message
    assert "config.json" in message


def test_truncated_weights_are_refused(launch: Launch, model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with (model / "model.safetensors").open("rb") as whole:
        (tmp_path / "model.safetensors").write_bytes(whole.read(1 << 20))
    message = refusal(launch("--enable-ext", model_path=str(tmp_path)))
    assert "model.safetensors is incomplete or damaged" in message


def test_refusal_gives_the_reason_of_a_failed_sglang_assertion(launch: Launch) -> None:
    arguments = ("--schedule-policy", "lpm", "--enable-priority-scheduling")
    result = launch("--enable-ext", *arguments)
    assert "and the other arguments: To use priority scheduling" in refusal(result)
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_refused_before_the_model_is_loaded(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        result = launch("--enable-ext", "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in refusal(result)
    assert "Load weight begin" not in result.stderr


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"tiers": {"ssd": {"directories": ["/nope"], "capacity": "1GiB"}}},
            "tiers directory /nope: does not exist: create it",
        ),
        (
            {"tiers": {"host": {"capacity": "64MiB"}}, "restore": {"chunk": 24}},
            "restore.chunk is 24 tokens, which is not a multiple of the page size 16; set it to 32",
        ),
    ],
)
def test_invalid_section_is_refused_before_the_model_is_loaded(
    launch: Launch, config: dict[str, object], reason: str
) -> None:
    result = launch("--enable-ext", "--page-size", "16", "--ext-config", json.dumps(config))
    assert reason in refusal(result)
    assert "Load weight begin" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--dp-size", "2"], "data parallelism (--dp-size)"),
        (["--tp", "2", "--attn-dp-size", "2"], "data parallelism (--attn-dp-size)"),
        (["--tokenizer-worker-num", "2"], "multiple tokenizer workers"),
    ],
)
def test_unsupported_arguments_are_refused(launch: Launch, arguments: list[str], what: str) -> None:
    message = refusal(launch("--enable-ext", *arguments))
    assert f"--enable-ext does not support {what}" in message


def test_sglangs_server_in_rust_is_refused(launch: Launch) -> None:
    message = refusal(launch("--enable-ext", environment={"SGLANG_RUST_SERVER": "1"}))
    assert "does not support SGLang's server in Rust" in message
    assert "unset SGLANG_RUST_SERVER" in message


def test_start_that_exceeds_start_deadline_is_ended(launch: Launch) -> None:
    result = launch("--enable-ext", "--ext-config", '{"start_deadline": "100ms"}')
    assert "not loaded within start_deadline=0.1s" in refusal(result)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_start_leaves_no_process_file_or_shared_memory(
    model: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    program = ["-m", "sglang.launch_server", "--enable-ext", *POOL]
    program += ["--model-path", str(model), "--port", str(server.free_port())]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    read, write = os.pipe()
    if stop == signal.SIGINT:
        process: psutil.Process = psutil.Popen(
            [sys.executable, *program], stderr=write, stdout=subprocess.DEVNULL,
            env=environment, start_new_session=True,
            # A shell starts background processes with SIGINT ignored, and children inherit this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
    else:
        with Path(os.devnull).open("wb") as nothing:
            process = template.start(program, environment, stdout=nothing.fileno(), stderr=write)
    os.close(write)
    with os.fdopen(read) as log:
        for line in log:
            if "Load weight begin" in line:
                break
        assert len(list(tmp_path.glob("sgl_ext-*"))) == 1
        segments = server._shared_memory_of(server._tree(process))
        threading.Thread(target=log.read, daemon=True).start()  # a full pipe would block them
        if stop == signal.SIGINT:
            os.killpg(process.pid, stop)  # a terminal signals the whole process group
        else:
            process.send_signal(stop)
        assert process.wait(60) != 0
    assert running_in_group(process.pid) == []
    assert list(tmp_path.glob("sgl_ext-*")) == []
    assert [segment for segment in segments if segment.exists()] == []


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_server_leaves_no_process_file_or_shared_memory(
    model: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    # The variable keeps the server from being forked: after SIGTERM, each process ends by itself.
    real = {"PYTHONUNBUFFERED": "1"} if stop == signal.SIGTERM else {}
    system = server.System("stopped", (*POOL, "--enable-ext"), real)
    with server.serve([system], model, tmp_path) as (running,):
        scratch = Path(running.process.environ()["TMPDIR"])
        assert len(list(scratch.glob("sgl_ext-*"))) == 1
        segments = server._shared_memory_of(server._tree(running.process))
        assert segments != []
        running.process.send_signal(stop)
        running.process.wait(60)
        assert list(scratch.iterdir()) == []
        assert [segment for segment in segments if segment.exists()] == []
        assert running_in_group(running.process.pid) == []
        assert "still alive" not in running.log.read_text()  # SGLang would have killed a scheduler


def test_extension_is_inactive_without_enable_ext(stock: server.Server) -> None:
    assert "sgl_ext" not in requests.get(f"{stock.url}/server_info", timeout=30).json()
    log = stock.log.read_text()
    assert "sgl_ext 0.1.0 active" not in log
    assert "sgl_ext: ready" not in log
    # SGLang knows the flags, but the modules that activate the extension are not imported.
    program = (
        "import json, sys\n"
        "from sglang.srt.plugins import load_plugins\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "load_plugins()\n"
        f"prepare_server_args(['--model-path', '{stock.system.name}'])\n"
        "print(json.dumps([sorted(HookRegistry._patched), sorted(sys.modules)]))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    patched, modules = json.loads(output.splitlines()[-1])
    assert patched == sorted(hook.target for hook in server_args.HOOKS)
    assert not {"sgl_ext.engine.launch.launcher", "sgl_ext.engine.core.scheduler"} & set(modules)
