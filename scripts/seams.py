"""Reads another SGLang release and says which targets of this package still hold there.

Both releases are parsed, not imported: a release may need packages that are not installed. Exits
with 1 if a hooked function is gone, has another signature, or a member that is used is gone.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sgl_ext.engine.core import scheduler, sglang_types
from sgl_ext.engine.core.hooks import Hook
from sgl_ext.engine.cpu import hicache, hicache_link, packed_linear
from sgl_ext.engine.launch import launcher, server_args

HOOKS: Sequence[Hook] = (
    *server_args.HOOKS, *launcher.HOOKS, *scheduler.HOOKS, *packed_linear.HOOKS, *hicache.HOOKS,
    *hicache_link.HOOKS,
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    """Target that does not hold."""

    target: str
    what: str
    fatal: bool


@cache
def parsed(root: Path, module: str) -> ast.Module | None:
    """Returns the syntax tree of a module of a release; None if it has no such module."""
    for path in (
        root / f"{module.replace('.', '/')}.py",
        root / module.replace(".", "/") / "__init__.py",
    ):
        if path.is_file():
            return ast.parse(path.read_text())
    return None


def function(root: Path, target: str) -> Function | None:
    """Returns the definition of a function or a method; None if the release defines none there."""
    names = target.split(".")
    for split in range(len(names) - 1, 0, -1):
        if (tree := parsed(root, ".".join(names[:split]))) is None:
            continue
        found: Any = tree
        for name in names[split:]:
            found = (
                next(
                    (each for each in ast.walk(found) if getattr(each, "name", None) == name), None
                )
                if found is not None
                else None
            )
        return found if isinstance(found, Function) else None
    return None


def changed_functions(ours: Path, other: Path) -> Iterator[Finding]:
    """Yields the hooked functions that are gone, or differ in signature or body."""
    for target in sorted({hook.target for hook in HOOKS}):
        mine, theirs = function(ours, target), function(other, target)
        if mine is None:
            continue  # defined by a base class or at run time: only the start checks it
        if theirs is None:
            yield Finding(target, "is gone", True)
        elif ast.unparse(mine.args) != ast.unparse(theirs.args):
            before, after = ast.unparse(theirs.args), ast.unparse(mine.args)
            yield Finding(target, f"has other parameters: ({before}), here ({after})", True)
        elif ast.dump(mine) != ast.dump(theirs):
            yield Finding(target, "has the same parameters and another body", False)


def classes(root: Path, names: set[str]) -> dict[str, list[ast.ClassDef]]:
    """Returns the definitions of classes with these names, anywhere in a release."""
    found: dict[str, list[ast.ClassDef]] = {name: [] for name in names}
    for path in (root / "sglang" / "srt").rglob("*.py"):
        text = path.read_text()
        if any(f"class {name}" in text for name in names):
            for each in ast.walk(ast.parse(text)):
                if isinstance(each, ast.ClassDef) and each.name in found:
                    found[each.name].append(each)
    return found


def members(defined: Sequence[ast.ClassDef]) -> set[str]:
    """Returns the methods and attributes that classes of one name define or assign."""
    found = set()
    for each in defined:
        for node in ast.walk(each):
            if isinstance(node, Function):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "self" and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def changed_types(ours: Path, other: Path) -> Iterator[Finding]:
    """Yields the members of SGLang's classes that this package uses and that are gone."""
    used: dict[str, set[str]] = {}
    for name, each in inspect.getmembers(sglang_types, inspect.isclass):
        if Protocol in each.__mro__ and each is not Protocol:
            own = {*vars(each), *each.__annotations__}
            used[name] = {member for member in own if not member.startswith("__")}
    mine, theirs = classes(ours, set(used)), classes(other, set(used))
    for name, wanted in sorted(used.items()):
        gone = (wanted & members(mine[name])) - members(theirs[name])
        for member in sorted(gone):
            yield Finding(f"{name}.{member}", "is gone", True)


def main() -> None:
    """Prints the findings of the release in the folder that is given."""
    other = Path(sys.argv[1])
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        sys.exit("sgl_ext: SGLang is not installed; run scripts/setup.sh")
    ours = Path(spec.origin).parent.parent
    checks: dict[str, Callable[[Path, Path], Iterator[Finding]]] = {
        "hooked functions": changed_functions,
        "members of classes": changed_types,
    }
    fatal = 0
    for title, check in checks.items():
        found = [*check(ours, other)]
        broken = [each for each in found if each.fatal]
        fatal += len(broken)
        print(f"{title}: {len(broken)} do not hold, {len(found) - len(broken)} to look at")
        for each in sorted(found, key=lambda one: not one.fatal):
            target = each.target.removeprefix("sglang.srt.")
            print(f"  {'!' if each.fatal else ' '} {target} {each.what}")
    sys.exit(1 if fatal else 0)


if __name__ == "__main__":
    main()
