"""``--enable-ext`` and ``--ext-config`` on SGLang's command lines and on ``sgl.Engine``.

These hooks are in place whenever the package is installed: without them SGLang could not know the
flags. They do nothing until ``--enable-ext`` (or ``enable_ext=True``) is given.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sgl_ext.config import ConfigError, ExtConfig, load
from sgl_ext.engine import activation, hooks
from sgl_ext.engine.activation import (
    CARRIED,
    Carried,
    carried_by,
    in_worker,
    refuse,
    require_available,
)

_ENGINE_MODULE = "sglang.srt.entrypoints.engine"

_requested: ExtConfig | None = None
"""What this process's command line asked for. Programs that parse ``ServerArgs`` and rebuild it
from its fields (SGLang's offline benchmarks) lose the record's attribute, not the request."""


def _add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sgl_ext")
    group.add_argument(
        "--enable-ext",
        action="store_true",
        help="Activate sgl_ext: KV cache as a resource of the whole machine.",
    )
    group.add_argument(
        "--ext-config",
        metavar="FILE|JSON",
        help="Configuration of sgl_ext: a YAML or JSON file, or inline JSON.",
    )


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    global _requested
    record = original(cls, args)
    # Some SGLang tools build the namespace themselves, without our flags.
    enabled, source = getattr(args, "enable_ext", False), getattr(args, "ext_config", None)
    activation.commanded |= enabled or source is not None
    if (config := requested_config(enabled, source)) is not None:
        _requested = config
        setattr(record, CARRIED, Carried(config))
    return record


def requested_config(enabled: bool, source: str | Mapping[str, object] | None) -> ExtConfig | None:
    """Validates a request; does not return from one that cannot be served."""
    if not enabled:
        if source is not None:
            refuse(ConfigError("a configuration (--ext-config) needs --enable-ext; add it"))
        return None
    try:
        hooks.require_supported_sglang()
        config = load(source)
        require_available(config)
    except (ConfigError, hooks.ActivationError) as error:
        refuse(error)
    return config


def _resolve_once(original: Callable[..., None], server_args: Any) -> None:
    """Activates the launcher: its arguments are complete, and no process is launched yet."""
    if in_worker():
        return original(server_args)
    if carried_by(server_args) is None and _requested is not None:
        setattr(server_args, CARRIED, Carried(_requested))
    if carried_by(server_args) is None:
        return original(server_args)
    from sgl_ext.engine import launcher

    try:
        launcher.require_servable(server_args)
        # Resolution reads the environment that SGLang's modules are imported under, so nothing
        # of SGLang is hooked, and thereby imported, before it is over.
        with launcher.one_sentence_about_the_model(server_args):
            original(server_args)
        launcher.activate()
    except hooks.ActivationError as error:
        refuse(error)
    return None


class _EngineServerArgs:
    """Stands where ``sgl.Engine`` looks for its ``ServerArgs`` class; takes our keywords out."""

    def __init__(self, server_args_class: Callable[..., Any]) -> None:
        self._server_args_class = server_args_class

    def __call__(
        self,
        *args: Any,
        enable_ext: bool = False,
        ext_config: str | Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> Any:
        record = self._server_args_class(*args, **kwargs)
        if (config := requested_config(enable_ext, ext_config)) is not None:
            setattr(record, CARRIED, Carried(config))
        return record


HOOKS = (
    hooks.Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "after",
        _add_flags,
        "SGLang's parser is built from a fixed record and takes no further flags",
    ),
    hooks.Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "around",
        _from_cli_args,
        "the record is made from declared fields only; ours travel as bookkeeping",
    ),
    hooks.Hook(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        "around",
        _resolve_once,
        "the one step every launcher takes between parsing and spawning",
    ),
)

SEAMS = (
    hooks.Seam(
        "server_args_class of sglang.srt.entrypoints.engine.Engine",
        lambda: hasattr(pkgutil.resolve_name(f"{_ENGINE_MODULE}.Engine"), "server_args_class"),
    ),
)


def register() -> None:
    """Registers the flags; SGLang's plugin loader calls this once per process."""
    hooks.apply(HOOKS)
    # Engine.__init__ loads plugins, so where an Engine is made its module is imported by now;
    # importing it elsewhere would run SGLang's modules before it has resolved its arguments.
    if (module := sys.modules.get(_ENGINE_MODULE)) is not None:
        engine = module.Engine
        if not isinstance(engine.server_args_class, _EngineServerArgs):
            engine.server_args_class = _EngineServerArgs(engine.server_args_class)
