"""The proposed change of SGLang's hook registry, applied to the installed one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT
from sglang.srt.plugins import hook_registry

PATCH = ROOT / "scripts" / "proposals" / "hook_registry.patch"
_TARGET = "registry_patch_target"


@pytest.fixture
def patched(tmp_path: Path) -> Any:
    """Returns a copy of SGLang's registry with the patch."""
    copy = tmp_path / "python" / "sglang" / "srt" / "plugins" / "hook_registry.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(Path(str(hook_registry.__file__)).read_bytes())
    # Outside of a repository, and not below one: git would skip the files.
    found = subprocess.run(
        ["git", "apply", str(PATCH)], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"GIT_CEILING_DIRECTORIES": str(tmp_path), "PATH": "/usr/bin:/bin:/usr/local/bin"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    spec = importlib.util.spec_from_file_location("patched_registry", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType(_TARGET)
    module.double = lambda number: 2 * number
    monkeypatch.setitem(sys.modules, _TARGET, module)
    return module


def test_hooks_that_are_in_effect_are_accepted(patched: Any, target: Any) -> None:
    registry, kinds = patched.HookRegistry, patched.HookType
    source = patched.HookSource("one", "dist-one")
    registry.register(f"{_TARGET}.double", lambda found, _: found + 1, kinds.AFTER, source=source)
    with pytest.raises(patched.HookError, match="not applied"):
        registry.require_hooks()
    registry.apply_hooks()
    registry.require_hooks()
    registry.require_hooks("one")
    assert target.double(3) == 7


def test_later_hooks_are_applied_around_those_in_place(patched: Any, target: Any) -> None:
    registry, kinds = patched.HookRegistry, patched.HookType
    registry.register(f"{_TARGET}.double", lambda found, _: found + 1, kinds.AFTER)
    registry.apply_hooks()
    registry.register(f"{_TARGET}.double", lambda of, number: 10 * of(number), kinds.AROUND)
    registry.apply_hooks()
    registry.apply_hooks()
    registry.require_hooks()
    assert target.double(3) == 70


def test_missing_targets_and_replaced_functions_are_named(patched: Any, target: Any) -> None:
    registry, kinds = patched.HookRegistry, patched.HookType
    one, two = patched.HookSource("one", None), patched.HookSource("two", None)
    registry.register(f"{_TARGET}.absent", lambda *_: None, kinds.BEFORE, source=one)
    registry.register(f"{_TARGET}.double", lambda *_: None, kinds.BEFORE, source=two)
    registry.apply_hooks()
    registry.require_hooks("two")
    with pytest.raises(patched.HookError, match=r"absent \[plugin=one\]: .*no attribute 'absent'"):
        registry.require_hooks()
    target.absent = lambda: "found"
    registry.apply_hooks()
    registry.require_hooks()
    target.double = lambda number: number  # another program's patch
    with pytest.raises(patched.HookError, match=r"double \[plugin=two\]: it was replaced"):
        registry.require_hooks("two")
