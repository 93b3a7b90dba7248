"""Hooks on SGLang that verify themselves.

SGLang's own registry applies hooks and logs, but swallows, every failure. A hook that did not
apply would leave a server that looks like ours and runs stock, so after applying, each one is
looked up again.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

from sgl_ext import SUPPORTED_SGLANG, __version__
from sgl_ext.errors import ExtError


class ActivationError(ExtError):
    """The extension cannot be active here: what was asked, what was found, what to do."""


Original = Callable[..., Any]
"""SGLang's own function, as a hook around it gets it."""


class Hook(NamedTuple):
    """One place where SGLang calls us, and why none of its seams serves."""

    target: str
    """Dotted path of the function or method."""
    when: Literal["before", "after", "around", "replace"]
    function: Callable[..., Any]
    why: str


class Seam(NamedTuple):
    """Something of SGLang's own interface that we rely on without patching it."""

    name: str
    present: Callable[[], bool]


def accepts(target: str, parameter: str) -> Callable[[], bool]:
    """A check that the callable at ``target`` takes ``parameter``."""

    def check() -> bool:
        function = pkgutil.resolve_name(target)
        return parameter in inspect.signature(function).parameters

    return check


def installed_sglang() -> str:
    """The version of the installed SGLang, or "none"."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def require_supported_sglang() -> None:
    """Raises ActivationError unless the installed SGLang is the one this package is for."""
    found = installed_sglang()
    if found != SUPPORTED_SGLANG:
        raise ActivationError(
            f"sgl_ext {__version__} works with SGLang {SUPPORTED_SGLANG}, found {found}; "
            f"install sglang=={SUPPORTED_SGLANG} or start without --enable-ext"
        )


def register(hooks: Iterable[Hook]) -> None:
    """Hands hooks to SGLang's registry; its plugin loader applies them with all other plugins'."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name="sgl_ext", dist_name="sgl-ext")
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.when), source=source)


def apply(hooks: Iterable[Hook], seams: Iterable[Seam] = ()) -> None:
    """Applies hooks now, around whatever other plugins have made of their targets; verifies them.

    For use after SGLang has loaded all plugins. Hooks that are in place are left alone.

    Raises:
        ActivationError: naming every seam and target that is missing.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = list(hooks)
    new = [hook for hook in hooks if not _applied(hook)]
    # The registry applies a target once, silently skipping what comes later. So that ours are
    # applied, and the earlier ones not again, it forgets these targets for a moment.
    earlier = {hook.target: HookRegistry._hooks.pop(hook.target, []) for hook in new}
    HookRegistry._patched -= set(earlier)
    register(new)
    HookRegistry.apply_hooks()
    for target, theirs in earlier.items():
        HookRegistry._hooks[target] = theirs + HookRegistry._hooks[target]
    verify(hooks, seams)


def verify(hooks: Iterable[Hook], seams: Iterable[Seam] = ()) -> None:
    """Raises ActivationError naming every seam and target that is missing."""
    missing = [seam.name for seam in seams if not _present(seam)]
    missing += [hook.target for hook in hooks if not _applied(hook)]
    if missing:
        raise ActivationError(
            f"SGLang {installed_sglang()} lacks what sgl_ext {__version__} builds on: "
            f"{', '.join(missing)}; install an unmodified sglang=={SUPPORTED_SGLANG} "
            "or start without --enable-ext"
        )


def _present(seam: Seam) -> bool:
    try:
        return seam.present()
    except (AttributeError, ImportError, ValueError):
        return False


def _applied(hook: Hook) -> bool:
    """Whether the live attribute is a wrapper around our function.

    SGLang's own record of patched targets proves nothing about ours.
    """
    try:
        live = pkgutil.resolve_name(hook.target)
    except (AttributeError, ImportError):
        return False
    while live is not None:
        cells = getattr(live, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        live = getattr(live, "__wrapped__", None)
    return False
