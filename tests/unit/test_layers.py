"""Import layers: who imports SGLang, and that policy does not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "sgl_ext"
MODULES = sorted(PACKAGE.rglob("*.py"))
POWERS = {"chunks", "restore", "swap", "peer", "clusters"}
POLICY = {"planning", "config"}
POLICY |= {"restore", "swap", "peer", "clusters"}
POLICY |= {f"memory/{module}" for module in ("block_groups", "free_groups")}
"""Modules and packages of policy, whose input and output are plain data."""
PURE = {"memory/tickets", "memory/block_groups", "memory/free_groups"}
PURE |= {f"chunks/{name}" for name in (
    "compose", "composition", "contexts", "divergence", "methods", "split",
)}  # fmt: skip
PURE |= {f"clusters/{name}" for name in ("coverage", "placement", "selection")}
PURE |= {
    f"peer/{name}"
    for name in ("lending", "loan", "master", "need", "regions", "vacating", "waiting", "worker")
}
PURE |= {f"planning/{name}" for name in (
    "agreement", "channels", "choices", "compute_cost", "costs", "decisions", "learner",
    "load_cost", "parts", "plan", "planner", "pointers", "policies", "prefixes", "request",
    "staged_prefixes", "staged_stores", "strategy", "want", "wants",
)}  # fmt: skip
PURE |= {f"restore/{name}" for name in ("boundaries", "host_prefixes")}
PURE |= {f"swap/{name}" for name in ("fairness", "manager", "stopwatch", "victims")}
PURE |= {f"tiers/{name}" for name in (
    "copy_times", "demotion", "holds", "host", "loads", "lower", "slots", "stack", "statistics",
    "stores", "throughput", "tier",
)}  # fmt: skip
"""Policy that a simulator drives: it has no clock, thread or I/O of its own."""
AROUND_SGLANG = {
    f"bench/harness/{name}" for name in ("attention_trial", "load_generator", "prefix_tree")
}
AROUND_SGLANG |= {"bench/field/sglang_client"}
"""Modules of the benchmarks that wrap parts of SGLang."""
_MECHANISM = {
    "asyncio", "concurrent", "multiprocessing", "os", "pathlib", "queue", "select", "selectors",
    "socket", "subprocess", "tempfile", "threading", "time", "zmq",
}  # fmt: skip
_CLOCK_BY_DEFAULT = {"swap/stopwatch"}
"""Pure modules that name a clock of the machine as the default of an argument."""


def imported(path: Path) -> set[str]:
    """Returns the dotted names of all that ``path`` imports, at any nesting depth."""
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


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes except those under ``if TYPE_CHECKING``, which do not run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from executed(node)


def dependencies() -> dict[str, set[str]]:
    """Returns the modules of the package that each module imports, by their dotted names."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in MODULES
    }
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = set()
        for node in executed(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & names.keys()
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    member = f"{node.module}.{alias.name}"
                    found[name] |= {member if member in names else str(node.module)} & names.keys()
    return found


def test_modules_have_no_import_cycles() -> None:
    TopologicalSorter(dependencies()).prepare()  # raises CycleError, which names the cycle


def test_only_the_benchmarks_import_benchmarks() -> None:
    outside = set(MODULES) - set((PACKAGE / "bench").rglob("*.py"))
    importing = [path for path in outside if starts_with(imported(path), "sgl_ext.bench")]
    assert importing == [PACKAGE / "cli" / "servers.py"]  # runs them for ``sgl-ext bench``


def test_only_core_powers_imports_several_powers() -> None:
    """Checks that no other power and no shared module of the engine imports a power's package."""
    for name, imports in dependencies().items():
        _, _, module = name.partition("sgl_ext.engine.")
        if module and module != "core.powers":
            for power in POWERS - {module.partition(".")[0]}:
                for package in (f"sgl_ext.engine.{power}", f"sgl_ext.{power}"):
                    assert not starts_with(imports, package), name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_import_only_lower_layers(path: Path) -> None:
    names = imported(path)
    name = str(path.relative_to(PACKAGE)).removesuffix(".py")
    part = name.partition("/")[0]
    if part != "engine" and name not in AROUND_SGLANG:
        assert not starts_with(names, "sglang")
    if {part, name} & POLICY:
        assert not starts_with(names, "torch") | starts_with(names, "sgl_ext.engine")
    if part in POWERS:
        for other in POWERS - {part}:
            assert not starts_with(names, f"sgl_ext.{other}")


@pytest.mark.parametrize("name", sorted(PURE))
def test_policy_has_no_clock_thread_or_io(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    for module in _MECHANISM - ({"time"} if name in _CLOCK_BY_DEFAULT else set()):
        assert not starts_with(imported(path), module)
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call)]  # fmt: skip
    assert not [call for call in calls if call == "open" or call.startswith("time.")]


def test_cli_imports_neither_torch_nor_sglang() -> None:
    program = "import sys, sgl_ext.cli; print({'torch', 'sglang'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "set()"
