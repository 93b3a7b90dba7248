"""Applying hooks and proving it, against a stand-in for SGLang's functions."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_ext.engine.core.hooks import ActivationError, Hook, Seam, accepts, apply, register, verify


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
    """A fresh module ``sgl_ext_test_host`` and a registry that forgets what the test did."""
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


def test_methods_of_every_kind(host: types.ModuleType) -> None:
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


def test_ours_goes_around_what_another_plugin_patched_first(host: types.ModuleType) -> None:
    """SGLang's registry alone would skip a target it has patched before, silently."""
    HookRegistry.register(hook("method").target, lambda result, *_: result + 10, HookType.AFTER)
    HookRegistry.apply_hooks()
    apply([hook("method")])
    assert host.Host().method(1) == (2 + 10) * 2
    HookRegistry.apply_hooks()
    assert host.Host().method(1) == (2 + 10) * 2


def test_registering_leaves_applying_to_sglang(host: types.ModuleType) -> None:
    """Applied early, ours would shut out every plugin that is loaded later."""
    register([hook("method")])
    assert host.Host().method(1) == 2
    with pytest.raises(ActivationError, match=r"Host\.method"):
        verify([hook("method")])
    HookRegistry.register(hook("method").target, lambda result, *_: result + 10, HookType.AFTER)
    HookRegistry.apply_hooks()
    verify([hook("method")])
    assert host.Host().method(1) == 2 * 2 + 10


def test_a_patched_target_without_our_function_is_not_taken_for_ours() -> None:
    HookRegistry.register(hook("method").target, lambda result, *_: result, HookType.AFTER)
    HookRegistry.apply_hooks()
    with pytest.raises(ActivationError, match=r"Host\.method"):
        verify([hook("method")])


def test_accepts_looks_at_the_signature() -> None:
    assert accepts("sgl_ext_test_host.Host.method", "x")()
    assert not accepts("sgl_ext_test_host.Host.method", "y")()
