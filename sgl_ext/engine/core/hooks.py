"""Hooks on SGLang that are verified after they were applied.

SGLang's own registry applies hooks, and logs but swallows every failure. If a hook was not applied,
the server would claim to run the extension and would run stock SGLang. Each hook is therefore
looked up again after it was applied.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal, NamedTuple

from sgl_ext import SUPPORTED_SGLANG, __version__
from sgl_ext.errors import ExtError


class ActivationError(ExtError):
    """Error raised when the extension cannot be active in this process.

    The message says what was asked, what was found and what to do.
    """


Original = Callable[..., Any]
"""SGLang's own function, as a hook around it receives it."""


class Hook(NamedTuple):
    """A hook on one place of SGLang, and why none of SGLang's extension points serves."""

    target: str
    """Dotted path of the function or method."""
    when: Literal["before", "after", "around", "replace"]
    function: Callable[..., Any]
    why: str


class Seam(NamedTuple):
    """An extension point of SGLang that this package relies on without patching it."""

    name: str
    present: Callable[[], bool]


def accepts(target: str, parameter: str) -> Callable[[], bool]:
    """Returns a check that the callable at ``target`` takes ``parameter``."""

    def check() -> bool:
        function = pkgutil.resolve_name(target)
        return parameter in inspect.signature(function).parameters

    return check


def uses(target: str, *names: str) -> Callable[[], bool]:
    """Returns a check that the code of the function at ``target`` looks up all ``names``.

    A name is an attribute or a global that this package replaces where it holds no function that
    could be hooked.
    """

    def check() -> bool:
        function = inspect.unwrap(pkgutil.resolve_name(target))
        return {*names} <= {*function.__code__.co_names}

    return check


def installed_sglang() -> str:
    """Returns the version of the installed SGLang, or "none"."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def require_supported_sglang() -> None:
    """Raises ActivationError unless SGLang has a version that this package supports."""
    found = installed_sglang()
    if found not in SUPPORTED_SGLANG:
        raise ActivationError(
            f"sgl_ext {__version__} works with SGLang {' and '.join(SUPPORTED_SGLANG)}, "
            f"found {found}; install sglang=={SUPPORTED_SGLANG[-1]} or start without --enable-ext"
        )


def register(hooks: Iterable[Hook]) -> None:
    """Registers hooks with SGLang's registry, without applying them.

    SGLang's plugin loader applies them with those of all other plugins.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for hook in hooks:
        when, function, source = _entry(hook)
        HookRegistry.register(hook.target, function, when, source=source)


def _entry(hook: Hook) -> tuple[Any, Callable[..., Any], Any]:
    """Returns a hook in the form of SGLang's registry: type, function and source."""
    from sglang.srt.plugins.hook_registry import HookSource, HookType

    source = HookSource(plugin_name="sgl_ext", dist_name="sgl-ext")
    return HookType(hook.when), hook.function, source


def apply(hooks: Iterable[Hook], seams: Iterable[Seam] = ()) -> None:
    """Applies hooks around what other plugins have made of their targets, and verifies them.

    Call it after SGLang has loaded all plugins. Hooks that are in place are not applied again.

    Raises:
        ActivationError: names every seam and target that is missing.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = list(hooks)
    with one_search():
        for hook in hooks:
            # The registry applies each target once, and silently skips hooks that are registered
            # later. Hooks that are not registered are not skipped.
            if not _applied(hook):
                with suppress(AttributeError, ImportError):  # reported below, with all others
                    HookRegistry._apply_target(hook.target, [_entry(hook)])
    verify(hooks, seams)


@contextmanager
def one_search() -> Iterator[None]:
    """Lets SGLang's registry search the modules once for all hooked functions.

    The registry replaces a hooked function in every module that has imported it by name, for which
    it visits each name of each module. That takes a tenth of a second and more, so it is done once
    at the end. Methods are not searched for: modules import functions.
    """
    from sglang.srt.plugins import hook_registry

    search = hook_registry._propagate_patch
    replaced: dict[int, tuple[object, object]] = {}

    def propagate(original: object, wrapped: object, owner: object) -> int:
        if not isinstance(owner, type):
            replaced[id(original)] = original, wrapped
        return 0

    hook_registry._propagate_patch = propagate
    try:
        yield
    finally:
        hook_registry._propagate_patch = search
        _replace(replaced)


def _replace(functions: Mapping[int, tuple[object, object]]) -> None:
    """Replaces functions in all modules.

    Args:
        functions: a function and its replacement, by the function's id.
    """
    if not functions:
        return
    modules: list[object] = [*sys.modules.values()]  # may hold None and objects of any type
    for module in modules:
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)
        if not functions.keys().isdisjoint(map(id, names.values())):  # at the speed of C
            for name, value in list(names.items()):
                if id(value) in functions:
                    setattr(module, name, functions[id(value)][1])


def verify(hooks: Iterable[Hook], seams: Iterable[Seam] = ()) -> None:
    """Raises ActivationError that names every seam and target that is missing."""
    missing = [seam.name for seam in seams if not _present(seam)]
    missing += [hook.target for hook in hooks if not _applied(hook)]
    if missing:
        raise ActivationError(
            f"SGLang {installed_sglang()} lacks functions that sgl_ext {__version__} requires: "
            f"{', '.join(missing)}; install an unmodified sglang=={SUPPORTED_SGLANG[-1]} or start "
            "without --enable-ext"
        )


def _present(seam: Seam) -> bool:
    try:
        return seam.present()
    except (AttributeError, ImportError, ValueError):
        return False


def _applied(hook: Hook) -> bool:
    """Returns whether the live attribute is a wrapper around the hook's function.

    SGLang's record of patched targets does not say which functions were applied.
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
