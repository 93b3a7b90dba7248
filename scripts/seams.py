"""Reports which targets of this package another SGLang release lacks or has changed.

Both releases are parsed, not imported: a release may need packages that are not installed. Exits
with 1 if a hooked function is missing or has parameters that its hook does not pass on, or if a
name, a member, an argument or an option that this package uses is missing. Equal names do not prove
equal behaviour: review functions with another body by hand.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import sgl_ext
from sgl_ext.engine.core import scheduler, sglang_types
from sgl_ext.engine.core.hooks import Hook
from sgl_ext.engine.core.powers import ORDER
from sgl_ext.engine.cpu import hicache, hicache_link, packed_linear
from sgl_ext.engine.launch import launcher, server_args

HOOKS: Sequence[Hook] = (
    *server_args.HOOKS, *launcher.HOOKS, *scheduler.HOOKS, *packed_linear.HOOKS, *hicache.HOOKS,
    *hicache_link.HOOKS,
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    """Target that is missing or has changed."""

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


def positional(definition: Function) -> list[str]:
    """Returns the names of the parameters that can be passed by position."""
    return [each.arg for each in (*definition.args.posonlyargs, *definition.args.args)]


def named(definition: Function) -> set[str]:
    """Returns the names of the parameters that can be passed by name."""
    return {each.arg for each in (*definition.args.args, *definition.args.kwonlyargs)}


def passes_on(hook: Hook, mine: Function, theirs: Function) -> bool:
    """Returns whether a hook passes the parameters that differ on without naming them."""
    own = [*inspect.signature(hook.function).parameters.values()]
    own = own[hook.when in ("after", "around") :]  # SGLang's result or function comes first
    kinds = [each.kind for each in own]
    if not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= {*kinds}:
        return False
    read = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    by_name = {each.name for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY}
    return positional(mine)[:read] == positional(theirs)[:read] and by_name <= (
        named(mine) & named(theirs)
    )


def elsewhere(root: Path, target: str) -> list[str]:
    """Returns where a release defines functions with the name of a target that is gone."""
    name = target.rpartition(".")[2]
    found = []
    for path in sorted((root / "sglang" / "srt").rglob("*.py")):
        text = path.read_text()
        if f"def {name}(" not in text:
            continue
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function) and node.name == name:
                found.append(f"{module.removeprefix('sglang.srt.')}:{node.lineno}")
    return found


def not_compared(ours: Path) -> list[str]:
    """Returns the hooked functions that a base class or a decorator defines, or the start makes.

    Only the start of a server checks them.
    """
    targets = sorted({hook.target for hook in HOOKS})
    return [each for each in targets if function(ours, each) is None]


def changed_functions(ours: Path, other: Path) -> Iterator[Finding]:
    """Yields the hooked functions that are gone, or differ in signature or body."""
    hooks: dict[str, list[Hook]] = {}
    for hook in HOOKS:
        hooks.setdefault(hook.target, []).append(hook)
    for target in sorted(hooks):
        mine, theirs = function(ours, target), function(other, target)
        if mine is None:
            continue  # see not_compared
        if theirs is None:
            places = elsewhere(other, target)
            moved = f"; functions of this name: {', '.join(places)}" if places else ""
            yield Finding(target, f"is gone{moved}", True)
        elif ast.unparse(mine.args) != ast.unparse(theirs.args):
            before, after = ast.unparse(theirs.args), ast.unparse(mine.args)
            passed = all(passes_on(hook, mine, theirs) for hook in hooks[target])
            what = f"has other parameters: ({before}), here ({after})"
            yield Finding(
                target, what + (", which the hook passes on" if passed else ""), not passed
            )
        elif ast.dump(mine) != ast.dump(theirs):
            yield Finding(target, "has the same parameters and another body", False)


def is_module(root: Path, name: str) -> bool:
    return parsed(root, name) is not None or (root / name.replace(".", "/")).is_dir()


@cache
def names(root: Path, module: str) -> set[str]:
    """Returns the names that a module defines, assigns or imports; empty without such a module."""
    found: set[str] = set()
    for node in ast.walk(parsed(root, module) or ast.Module([], [])):
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    return found


class Use(NamedTuple):
    """Name of one of SGLang's modules that a source file of this package uses."""

    module: str
    name: str
    keywords: frozenset[str] = frozenset()
    """Arguments by name, if the use is a call."""


def uses(source: ast.Module, root: Path) -> Iterator[Use]:
    """Yields the names of SGLang's modules that a source file imports, looks up or calls."""
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            for each in node.names:
                imported[each.asname or each.name] = str(node.module), each.name
                yield Use(str(node.module), each.name)

    def used(node: ast.expr) -> tuple[str, str] | None:
        if isinstance(node, ast.Name):
            return imported.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = ".".join(imported.get(node.value.id, ()))
            return (module, node.attr) if module and is_module(root, module) else None
        return None

    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and (found := used(node)):
            yield Use(*found)
        elif isinstance(node, ast.Call) and (found := used(node.func)):
            yield Use(*found, frozenset(each.arg for each in node.keywords if each.arg))


def sources() -> Iterator[ast.Module]:
    """Yields the parsed source files of this package, but not the differences between releases."""
    for path in sorted(Path(sgl_ext.__file__).parent.rglob("*.py")):
        if path.name != "releases.py":
            yield ast.parse(path.read_text())


def changed_names(ours: Path, other: Path) -> Iterator[Finding]:
    """Yields the imported names that are gone, and calls with arguments that are gone."""
    found = set()
    for use in {use for source in sources() for use in uses(source, ours)}:
        target = f"{use.module}.{use.name}"
        if is_module(ours, target):
            if not is_module(other, target):
                found.add(Finding(target, "is gone", True))
            continue
        if use.name not in names(ours, use.module):
            continue  # imported with *
        if use.name not in names(other, use.module):
            found.add(Finding(target, "is gone", True))
        elif use.keywords and (mine := function(ours, target)) is not None:
            theirs = function(other, target)
            if theirs is not None and theirs.args.kwarg is None:
                for gone in sorted((use.keywords & named(mine)) - named(theirs)):
                    found.add(Finding(target, f"has no parameter {gone}", True))
    yield from sorted(found)


def fields(root: Path) -> set[str]:
    """Returns the options of SGLang's launcher, by their names in ``ServerArgs``."""
    modules = (root / "sglang" / "srt" / "arg_groups" / "fields").glob("*.py")
    return {
        node.target.id
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def changed_options(ours: Path, other: Path) -> Iterator[Finding]:
    """Yields the options that are read, refused or set, and that are gone."""
    used = {*sglang_types.ServerArgs.__annotations__}
    used |= {field for kind in ORDER for field, *_ in kind.unserved}
    for source in sources():
        for use in uses(source, ours):
            if use.name == "declare_resolution":
                used |= use.keywords
    for gone in sorted((used & fields(ours)) - fields(other)):
        yield Finding(f"ServerArgs.{gone}", "is gone", True)


def classes(root: Path, wanted: Iterable[str]) -> Mapping[str, list[ast.ClassDef]]:
    """Returns the definitions of classes with the wanted names, anywhere in a release."""
    found: dict[str, list[ast.ClassDef]] = {name: [] for name in wanted}
    for path in (root / "sglang" / "srt").rglob("*.py"):
        text = path.read_text()
        if any(f"class {name}" in text for name in found):
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
    mine, theirs = classes(ours, used), classes(other, used)
    for name, wanted in sorted(used.items()):
        gone = (wanted & members(mine[name])) - members(theirs[name])
        for member in sorted(gone):
            yield Finding(f"{name}.{member}", "is gone", True)


CHECKS: Mapping[str, Callable[[Path, Path], Iterator[Finding]]] = {
    "hooked functions": changed_functions,
    "imported names": changed_names,
    "members of classes": changed_types,
    "options": changed_options,
}


def installed() -> Path:
    """Returns the folder that has the installed release."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        sys.exit("sgl_ext: SGLang is not installed; run scripts/setup.sh")
    return Path(spec.origin).parent.parent


def main() -> None:
    """Prints the findings of the release in the folder that is given."""
    ours, other = installed(), Path(sys.argv[1])
    fatal = 0
    for title, check in CHECKS.items():
        found = [*check(ours, other)]
        broken = [each for each in found if each.fatal]
        fatal += len(broken)
        print(f"{title}: {len(broken)} incompatible, {len(found) - len(broken)} to review")
        for each in sorted(found, key=lambda one: not one.fatal):
            target = each.target.removeprefix("sglang.srt.")
            print(f"  {'!' if each.fatal else ' '} {target} {each.what}")
    if rest := not_compared(ours):
        names = ", ".join(each.removeprefix("sglang.srt.") for each in rest)
        print(f"checked at the start of a server only: {names}")
    sys.exit(1 if fatal else 0)


if __name__ == "__main__":
    main()
