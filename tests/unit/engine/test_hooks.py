"""Application and verification of hooks, on a stand-in for SGLang's functions."""

from __future__ import annotations

import pkgutil
import runpy
import sys
import types
from collections.abc import Iterator

import pytest
from conftest import ROOT
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_ext.engine.core.hooks import (
    ActivationError,
    Hook,
    Seam,
    accepts,
    apply,
    register,
    uses,
    verify,
)


class Host:
    def method(self, x: int) -> int:
        return x + 1

    @classmethod
    def make(cls, x: int) -> int:
        return x + 2

    @staticmethod
    def static(x: int) -> int:
        return x + 3


@pytest.fixture(autouse=True)
def host() -> Iterator[types.ModuleType]:
    """Yields a fresh module ``sgl_ext_test_host``; restores SGLang's registry afterwards."""
    module = types.ModuleType("sgl_ext_test_host")
    namespace = dict(vars(Host))
    for name in ("__dict__", "__weakref__"):
        namespace.pop(name)
    module.Host = type("Host", (), namespace)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    hooks, patched = dict(HookRegistry._hooks), set(HookRegistry._patched)
    yield module
    del sys.modules[module.__name__]
    HookRegistry._hooks.clear()
    HookRegistry._hooks.update(hooks)
    HookRegistry._patched.clear()
    HookRegistry._patched.update(patched)


def doubling(result: int, *_args: object) -> int:
    return result * 2


def hook(name: str) -> Hook:
    return Hook(f"sgl_ext_test_host.Host.{name}", "after", doubling, "a test")


def test_hooks_apply_to_methods_classmethods_and_staticmethods(host: types.ModuleType) -> None:
    apply([hook("method"), hook("make"), hook("static")])
    assert (host.Host().method(1), host.Host.make(1), host.Host.static(1)) == (4, 6, 8)


def test_applying_twice_changes_nothing(host: types.ModuleType) -> None:
    apply([hook("method")])
    apply([hook("method")])
    assert host.Host().method(1) == 4


def test_missing_targets_and_seams_are_all_named() -> None:
    seams = [Seam("a seam that raises", lambda: [][1]), Seam("a seam", lambda: False)]
    seams[0] = Seam("a seam that raises", lambda: getattr(object(), "missing"))  # noqa: B009
    with pytest.raises(ActivationError) as caught:
        apply([hook("method"), hook("absent")], seams)
    message = str(caught.value)
    for name in ("a seam that raises", "a seam", "sgl_ext_test_host.Host.absent"):
        assert name in message
    assert "Host.method" not in message


def test_apply_wraps_a_target_that_another_plugin_has_patched(host: types.ModuleType) -> None:
    """Hooks a target that is already patched; SGLang's registry alone would skip it silently."""
    HookRegistry.register(hook("method").target, lambda result, *_: result + 10, HookType.AFTER)
    HookRegistry.apply_hooks()
    apply([hook("method")])
    assert host.Host().method(1) == (2 + 10) * 2
    HookRegistry.apply_hooks()
    assert host.Host().method(1) == (2 + 10) * 2


def test_register_leaves_applying_to_sglang(host: types.ModuleType) -> None:
    """Checks that hooks are not applied early, which would shut out plugins loaded later."""
    register([hook("method")])
    assert host.Host().method(1) == 2
    with pytest.raises(ActivationError, match=r"Host\.method"):
        verify([hook("method")])
    HookRegistry.register(hook("method").target, lambda result, *_: result + 10, HookType.AFTER)
    HookRegistry.apply_hooks()
    verify([hook("method")])
    assert host.Host().method(1) == 2 * 2 + 10


def test_verify_refuses_a_target_patched_only_by_another_plugin() -> None:
    HookRegistry.register(hook("method").target, lambda result, *_: result, HookType.AFTER)
    HookRegistry.apply_hooks()
    with pytest.raises(ActivationError, match=r"Host\.method"):
        verify([hook("method")])


def test_accepts_checks_the_signature() -> None:
    assert accepts("sgl_ext_test_host.Host.method", "x")()
    assert not accepts("sgl_ext_test_host.Host.method", "y")()


def test_uses_checks_the_names_in_the_code_below_other_hooks(host: types.ModuleType) -> None:
    host.Host.load = lambda self: self.pool.copy(host)
    apply([Hook("sgl_ext_test_host.Host.load", "after", doubling, "a test")])
    assert uses("sgl_ext_test_host.Host.load", "pool", "copy")()
    assert not uses("sgl_ext_test_host.Host.load", "pool", "move")()


def test_hooks_leave_targets_to_plugins_that_are_loaded_later(host: types.ModuleType) -> None:
    apply([hook("method")])
    HookRegistry.register(hook("method").target, lambda result, *_: result + 10, HookType.AFTER)
    HookRegistry.apply_hooks()
    assert host.Host().method(1) == 2 * 2 + 10
    verify([hook("method")])


def test_hooked_functions_are_replaced_where_they_were_imported(host: types.ModuleType) -> None:
    host.function = lambda x: x + 4  # type: ignore[attr-defined]
    importer = types.ModuleType("sgl_ext_test_importer")
    importer.alias = host.function  # type: ignore[attr-defined]
    sys.modules[importer.__name__] = importer
    try:
        apply([Hook("sgl_ext_test_host.function", "after", doubling, "a test")])
        assert importer.alias(1) == 10
    finally:
        del sys.modules[importer.__name__]


def test_no_module_of_sglang_holds_a_hooked_method() -> None:
    """Shows that :func:`apply` need not search for methods."""
    from sgl_ext.engine.core import scheduler
    from sgl_ext.engine.cpu import hicache, hicache_link, packed_linear
    from sgl_ext.engine.launch import launcher, server_args

    methods = {}
    platform = (*packed_linear.HOOKS, *hicache.HOOKS, *hicache_link.HOOKS)
    for each in (*scheduler.HOOKS, *launcher.HOOKS, *server_args.HOOKS, *platform):
        owner = pkgutil.resolve_name(each.target.rpartition(".")[0])
        if isinstance(owner, type):
            methods[id(getattr(owner, each.target.rpartition(".")[2]))] = each.target
    assert len(methods) > 50
    held = [
        (name, methods[id(value)])
        for name, module in list(sys.modules.items())
        if name.startswith("sglang.") and isinstance(module, types.ModuleType)
        for value in list(vars(module).values())
        if id(value) in methods
    ]
    assert held == []


def test_the_table_of_hooks_is_up_to_date() -> None:
    """Compares ``HOOKS.md`` with the hooks; ``scripts/list_hooks.py`` writes it."""
    page = runpy.run_path(str(ROOT / "scripts" / "list_hooks.py"))["page"]()
    assert (ROOT / "sgl_ext" / "engine" / "HOOKS.md").read_text() == page
