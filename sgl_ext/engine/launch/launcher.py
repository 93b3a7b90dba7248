"""Hooks on the process that launches SGLang's other processes."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from sgl_ext import __version__
from sgl_ext.config import SECTIONS
from sgl_ext.engine.core import activation, hooks
from sgl_ext.engine.core.activation import (
    REPORT_KEY,
    carried_by,
    mark_launch,
    refuse,
    report,
)
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.powers import ORDER
from sgl_ext.engine.core.sglang_types import ServerArgs
from sgl_ext.engine.core.unserved import Unserved, require_served
from sgl_ext.engine.front import dispatch, errors
from sgl_ext.engine.launch import run_directory
from sgl_ext.engine.workarounds import embeddings, validation
from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)

_UNVERIFIABLE: Unserved = (
    ("nnodes", lambda value: value > 1, "multiple nodes"),
    ("dp_size", lambda value: value > 1, "data parallelism"),
    ("attn_dp_size", lambda value: value > 1, "data parallelism"),
    ("ep_join_mode", bool, "elastic expert parallelism"),
    ("tokenizer_worker_num", lambda value: value > 1, "multiple tokenizer workers"),
    ("use_ray", bool, "Ray"),
    ("encoder_only", bool, "the encoder-only server"),
    ("smg_grpc_mode", bool, "the gRPC router mode"),
)
"""Options of launch paths whose processes do not report to this launcher and cannot be verified."""


def require_verifiable(server_args: ServerArgs) -> None:
    """Raises ActivationError if the resolved arguments select an unverified launch path."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.environ import envs

    if envs.SGLANG_RUST_SERVER.get():
        raise hooks.ActivationError(
            "--enable-ext does not support SGLang's server in Rust, which runs without the "
            "extension's front end; unset SGLANG_RUST_SERVER, or start without --enable-ext"
        )
    require_served(resolving_view(server_args), "--enable-ext", _UNVERIFIABLE)


def activate() -> None:
    """Hooks the launch. Repeating the call changes nothing.

    The hooks act only on launches whose record carries a configuration, because a process may
    launch others too.

    Raises:
        ActivationError: a hook cannot be applied, or a seam is missing.
    """
    hooks.apply(HOOKS, SEAMS)
    if activation.commanded and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # Until its HTTP server runs, SGLang exits on this signal without removing anything.
        with suppress(ValueError):  # not in the main thread: the program decides
            signal.signal(signal.SIGTERM, _terminate)


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the removal
    raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def one_sentence_about(server_args: ServerArgs) -> Iterator[None]:
    """Turns errors about SGLang's arguments or model into an ActivationError of one sentence."""
    try:
        yield
    except (OSError, ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
        logger.debug("SGLang refuses its arguments", exc_info=True)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise hooks.ActivationError(
            f"SGLang cannot start with --model-path {server_args.model_path} and the other "
            f"arguments: {reason}"
        ) from error


def _require_free_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            refuse(
                hooks.ActivationError(
                    f"cannot listen on {host}:{port} ({reason}); choose another port with --port, "
                    "or stop the process that uses it"
                )
            )


def _launch_server(
    original: Original, server_args: ServerArgs, *args: object, **kwargs: Any
) -> object:
    """Checks the port before a model is loaded, and prints an example when the server is ready."""
    if carried_by(server_args) is None:
        return original(server_args, *args, **kwargs)
    _require_free_port(server_args.host or "127.0.0.1", server_args.port)
    theirs = kwargs.pop("launch_callback", None)

    def greet() -> None:
        if theirs is not None:
            theirs()
        key = '-H "Authorization: Bearer $API_KEY" ' if server_args.api_key else ""
        print(
            "\nsgl_ext: ready. Try:\n\n"
            f"curl -s {server_args.url()}/v1/chat/completions {key}"
            "-H 'Content-Type: application/json' -d '"
            '{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
            '"temperature": 0}\'\n',
            flush=True,
        )

    return original(server_args, *args, launch_callback=greet, **kwargs)


def _check_arguments(original: Original, server_args: ServerArgs) -> None:
    if carried_by(server_args) is None:
        return original(server_args)
    try:
        with one_sentence_about(server_args):
            original(server_args)
    except hooks.ActivationError as error:
        refuse(error)
    return None


def _port_args(
    original: Original, server_args: ServerArgs, *args: object, **kwargs: object
) -> object:
    """Puts SGLang's sockets into a private directory that is removed when the launcher exits."""
    if carried_by(server_args) is None:
        return original(server_args, *args, **kwargs)
    try:
        with run_directory.as_temporary_directory():
            ports = original(server_args, *args, **kwargs)
    except (ExtError, ValueError) as error:
        refuse(error)
    run_directory.remember_instance(ports.instance_id)
    mark_launch(server_args)
    return ports


def _wait_for_schedulers(
    original: Callable[..., list[dict[str, Any]]], readers: Any, processes: Any
) -> list[dict[str, object]]:
    """Limits the wait for the model, and checks that every scheduler reports the configuration."""
    from sglang.srt.runtime_context import get_context

    config = carried_by(get_context().server_args)
    if config is None:
        return original(readers, processes)
    for process in processes:
        run_directory.remember_worker(process.pid)
    with _deadline(config.start_deadline, processes):
        infos = original(readers, processes)
    expected = report(config)
    for rank, info in enumerate(infos):
        found = info.get(REPORT_KEY) or {}
        if {key: found.get(key) for key in expected} != expected:
            for process in processes:
                process.kill()
            refuse(
                hooks.ActivationError(
                    f"scheduler {rank} reports {found or 'no active extension'}, expected "
                    f"{expected}; reinstall sgl_ext so that every process loads the same one"
                )
            )
    on = ", ".join(config.sections()) or "none"
    off = ", ".join(name for name in SECTIONS if name not in config.sections()) or "none"
    logger.info(
        "sgl_ext %s active on SGLang %s, platform %s: %s; sections on: %s; off: %s",
        __version__, hooks.installed_sglang(), _platform(), _memory(infos[0]), on, off,
    )  # fmt: skip
    return infos


@contextmanager
def _deadline(seconds: float, processes: Any) -> Iterator[None]:
    """Kills ``processes`` if the block takes longer; SGLang then reports a dead scheduler."""

    def expire() -> None:
        # A progress bar of the load may have left the cursor within a line.
        print(
            f"\nsgl_ext: the model was not loaded within start_deadline={seconds:g}s; "
            "raise start_deadline in the configuration, or load a smaller model",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        for process in processes:
            process.kill()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _memory(info: dict[str, Any]) -> str:
    """Returns the layout of the KV pool that the first scheduler reports, in words."""
    memory = info[REPORT_KEY]["memory"]
    if memory["layout"] == "layer_major":
        return f"layer-major KV ({memory['because']})"
    blocks, page = memory["blocks"], memory["page"]
    return f"block-major KV, {blocks} blocks of {page} token{'s' if page > 1 else ''}"


def _platform() -> str:
    from sglang.srt.platforms import current_platform

    return type(current_platform).__name__


HOOKS = (
    hooks.Hook(
        "sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
        "around",
        _wait_for_schedulers,
        "the launcher waits without a deadline, and does not check a ready scheduler",
    ),
    hooks.Hook(
        "sglang.srt.entrypoints.http_server.launch_server",
        "around",
        _launch_server,
        "launch_callback can print a greeting, but only the caller of launch_server can pass one",
    ),
    hooks.Hook(
        "sglang.srt.server_args.ServerArgs.check_server_args",
        "around",
        _check_arguments,
        "SGLang rejects unsupported arguments here with assertions, which end in a traceback",
    ),
    hooks.Hook(
        "sglang.srt.server_args.PortArgs.init_new",
        "around",
        _port_args,
        "SGLang creates socket paths in the global temporary directory and does not remove them",
    ),
    *dispatch.LAUNCHER_HOOKS,
    *errors.LAUNCHER_HOOKS,
    *validation.LAUNCHER_HOOKS,
    *embeddings.LAUNCHER_HOOKS,
    *(hook for kind in ORDER for hook in kind.launcher_hooks),
)

SEAMS = (
    hooks.Seam(
        "launch_callback of sglang.srt.entrypoints.http_server.launch_server",
        hooks.accepts("sglang.srt.entrypoints.http_server.launch_server", "launch_callback"),
    ),
)
