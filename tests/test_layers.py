"""Arrows point down: only ``sgl_ext.engine`` imports SGLang, and policy imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "sgl_ext"
MODULES = sorted(PACKAGE.rglob("*.py"))
POWERS = {"chunks", "restore", "swap", "peer", "clusters"}
POLICY = {"plan", "config", "config_source", "config_values"}
POLICY |= {"restore", "swap", "peer", "clusters"}
POLICY |= {f"memory/{module}" for module in ("block_groups", "free_groups")}
"""Modules and packages that decide: plain data in, plain data out."""


def imported(path: Path) -> set[str]:
    """Dotted names of everything ``path`` imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def starts_with(names: set[str], prefix: str) -> set[str]:
    return {name for name in names if name == prefix or name.startswith(prefix + ".")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_layers(path: Path) -> None:
    names = imported(path)
    name = str(path.relative_to(PACKAGE)).removesuffix(".py")
    part = name.partition("/")[0]
    if part != "engine":
        assert not starts_with(names, "sglang")
    if {part, name} & POLICY:
        assert not starts_with(names, "torch") | starts_with(names, "sgl_ext.engine")
    if part in POWERS:
        for other in POWERS - {part}:
            assert not starts_with(names, f"sgl_ext.{other}")


def test_looking_imports_neither_torch_nor_sglang() -> None:
    program = "import sys, sgl_ext.cli; print({'torch', 'sglang'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "set()"
