"""Faults of a server, planted when its processes import the modules that they are in.

Each is active while a file of its name exists in the folder ``$SGLEXT_PLANTED``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ["SGLEXT_PLANTED"])


def wrong_page(module: Any) -> None:
    """Makes loads from SSDs return the first page in place of one in the middle."""
    load = module.SsdTier.load

    def wrong(tier: Any, keys: Any, pages: Any) -> Any:
        good = load(tier, keys, pages)
        if len(pages) > 2 and (FOLDER / "page").exists():
            memory = tier._arena.memory
            memory[pages[len(pages) // 2]] = memory[pages[0]]
        return good

    module.SsdTier.load = wrong


def wrong_copy(module: Any) -> None:
    """Makes loads of prefixes copy the first page in place of one in the middle."""
    _plant_copy(module.DeviceCopies, "load", "copy")


def wrong_resumed(module: Any) -> None:
    """Makes loads of preempted requests copy the first page in place of one in the middle."""
    _plant_copy(module.Holds, "begin_fill", "resumed")


def _plant_copy(kind: Any, method: str, fault: str) -> None:
    right = getattr(kind, method)

    def wrong(of: Any, pages: Any, *args: Any, **kw: Any) -> Any:
        if len(pages) > 2 and (FOLDER / fault).exists():
            pages = pages.copy()
            pages[len(pages) // 2] = pages[0]
        return right(of, pages, *args, **kw)

    setattr(kind, method, wrong)


def wrong_attention(module: Any) -> None:
    """Makes the attention of prompts return a tenth more than it should."""
    extend = module.CpuAttnBackend.forward_extend

    def wrong(*args: Any, **kw: Any) -> Any:
        out = extend(*args, **kw)
        return out * 1.1 if (FOLDER / "attention").exists() else out

    module.CpuAttnBackend.forward_extend = wrong


FAULTS: dict[str, Callable[[Any], None]] = {
    "sgl_ext.tiers.ssd": wrong_page,
    "sgl_ext.tiers.copies": wrong_copy,
    "sgl_ext.tiers.holds": wrong_resumed,
    "sgl_ext.engine.cpu.attention": wrong_attention,
}


class Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder that plants a fault into a module when it has been executed."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name not in FAULTS:
            return None
        sys.meta_path.remove(self)
        try:
            self._real = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert self._real is not None
        spec = importlib.util.spec_from_loader(name, self, origin=self._real.origin)
        assert spec is not None
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        assert self._real is not None and self._real.loader is not None
        self._real.loader.exec_module(module)
        FAULTS[module.__name__](module)


sys.meta_path.insert(0, Planter())
