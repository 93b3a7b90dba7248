"""Options ``--enable-ext`` and ``--ext-config`` of SGLang's command lines and of ``sgl.Engine``.

These hooks are in place whenever the package is installed, because SGLang could not know the
options otherwise. They have no effect until ``--enable-ext`` (or ``enable_ext=True``) is given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sgl_ext.config import ExtConfig, load
from sgl_ext.config.source import ConfigError
from sgl_ext.engine.core import activation, arrival, hooks
from sgl_ext.engine.core.activation import (
    carried_by,
    in_worker,
    refuse,
)
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import ServerArgs
from sgl_ext.engine.workarounds import secrets

_ENGINE_MODULE = "sglang.srt.entrypoints.engine"

_requested: ExtConfig | None = None
"""Configuration that this process's command line asked for.

A program that parses ``ServerArgs`` and rebuilds the record from its fields loses the record's
attribute. It must not run stock SGLang because of that.
"""


def _add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    try:
        # Without all hooks no flag is added: SGLang would accept --enable-ext and run stock.
        hooks.verify(HOOKS)
    except hooks.ActivationError as error:
        if "--enable-ext" in sys.argv:
            activation.commanded = True
            refuse(error)
        return
    group = parser.add_argument_group("sgl_ext")
    group.add_argument(
        "--enable-ext",
        action="store_true",
        help="Enable sgl_ext, which manages the KV cache as a resource of the whole machine.",
    )
    group.add_argument(
        "--ext-config",
        metavar="FILE|JSON",
        help="Configuration of sgl_ext: a YAML or JSON file, or inline JSON.",
    )


def _from_cli_args(original: Original, cls: type, args: argparse.Namespace) -> object:
    global _requested
    record = original(cls, args)
    # Some SGLang tools build the namespace themselves, without the flags of this package.
    enabled, source = getattr(args, "enable_ext", False), getattr(args, "ext_config", None)
    activation.commanded |= enabled or source is not None
    if (config := requested_config(enabled, source)) is not None:
        _requested = config
        arrival.carry(record, config)
    return record


def requested_config(enabled: bool, source: str | Mapping[str, object] | None) -> ExtConfig | None:
    """Returns the validated configuration that was asked for; None if the extension is not enabled.

    Does not return if the configuration cannot be served.
    """
    if not enabled:
        if source is not None:
            refuse(ConfigError("a configuration (--ext-config) needs --enable-ext; add it"))
        return None
    try:
        hooks.require_supported_sglang()
        config = load(source)
    except (ConfigError, hooks.ActivationError) as error:
        refuse(error)
    return config


def _resolve_once(original: Original, server_args: ServerArgs) -> None:
    """Activates the launcher: its arguments are complete, and no process is launched yet."""
    if in_worker():
        return original(server_args)
    if (config := carried_by(server_args)) is None:
        config = _requested or _beside_a_record()
        if config is None:
            return original(server_args)
        arrival.carry(server_args, config)
    from sgl_ext.engine.core.powers import powers_of
    from sgl_ext.engine.launch import launcher, start_checks

    secrets.mask_command(server_args)
    try:
        start_checks.require_startable(server_args, config)
        for power in powers_of(config):
            power.declare(server_args)
        # SGLang's modules read the environment that resolution sets. A hook imports the module of
        # its target, so SGLang is hooked only after resolution.
        with launcher.one_sentence_about(server_args):
            original(server_args)
        launcher.require_verifiable(server_args)
        start_checks.require_resolved(server_args, config)
        launcher.activate()
    except hooks.ActivationError as error:
        refuse(error)
    return None


def _mask(result: dict[str, object], server_args: ServerArgs) -> dict[str, object]:
    if carried_by(server_args) is None and _requested is None:
        return result
    return secrets.masked(result)


def _beside_a_record() -> ExtConfig | None:
    """Returns the configuration that ``Engine(server_args=record, enable_ext=True)`` asks for.

    Given a record, the engine ignores every other keyword. The call of a process's first engine
    cannot be hooked, because that engine loads the plugins. The launch runs below the engine's
    frame, so that the keywords are read from that frame.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_qualname == "Engine.__init__":
            keywords = frame.f_locals.get("kwargs", {})
            if "server_args" not in keywords:
                return None  # _EngineServerArgs has taken the keywords
            return requested_config(keywords.get("enable_ext", False), keywords.get("ext_config"))
        frame = frame.f_back
    return None


class _EngineServerArgs:
    """Replacement of ``sgl.Engine``'s ``ServerArgs`` class that removes the keywords of sgl_ext."""

    def __init__(self, server_args_class: Callable[..., Any]) -> None:
        self._server_args_class = server_args_class

    def __call__(
        self,
        *args: object,
        enable_ext: bool = False,
        ext_config: str | Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> object:
        if enable_ext:
            hooks.verify(HOOKS)
        record = self._server_args_class(*args, **kwargs)
        if (config := requested_config(enable_ext, ext_config)) is not None:
            arrival.carry(record, config)
        return record


HOOKS = (
    hooks.Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "after",
        _add_flags,
        "SGLang's parser is built from a fixed record and does not accept additional flags",
    ),
    hooks.Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "around",
        _from_cli_args,
        "the record is built from declared fields only; the fields of sgl_ext are carried as "
        "bookkeeping",
    ),
    hooks.Hook(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        "around",
        _resolve_once,
        "this is the only step that every launcher takes between parsing and spawning",
    ),
    hooks.Hook(
        "sglang.srt.server_args.ServerArgs.resolved_dict",
        "after",
        _mask,
        "SGLang logs the result and shows it in /server_info, and masks only the keys of its "
        "watermark",
    ),
)


def _engine_class() -> Any:
    """Returns SGLang's ``Engine`` if its module is imported.

    Importing it here would run SGLang's modules before SGLang has resolved its arguments.
    """
    module = sys.modules.get(_ENGINE_MODULE)
    return module and module.Engine


def register() -> None:
    """Registers the options; SGLang's plugin loader calls this function once per process."""
    hooks.register(HOOKS)
    # Engine.__init__ loads plugins, so that its module is imported by now if an Engine is made.
    engine = _engine_class()
    if engine is not None and not isinstance(engine.server_args_class, _EngineServerArgs):
        engine.server_args_class = _EngineServerArgs(engine.server_args_class)
