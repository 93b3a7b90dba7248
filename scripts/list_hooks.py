"""Writes ``sgl_ext/engine/HOOKS.md``, the table of all hooks, from the hooks themselves.

Run it with the Python of the environment after a hook was added, removed or changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sgl_ext.engine.core import scheduler
from sgl_ext.engine.core.hooks import Hook
from sgl_ext.engine.cpu import hicache, hicache_link, packed_linear
from sgl_ext.engine.launch import launcher, server_args

PAGE = Path(__file__).parents[1] / "sgl_ext" / "engine" / "HOOKS.md"
_SGLANG = "sglang.srt."
_ENGINE = "sgl_ext.engine."
_INTRODUCTION = """# Hooks on SGLang

Written by `scripts/list_hooks.py` from the tuples named `HOOKS` and `LAUNCHER_HOOKS`; do not edit
it. Targets are relative to `sglang.srt`, functions to `sgl_ext.engine`. The last column says why
none of SGLang's extension points serves. All hooks are verified at start. On the CPU platform, a
model's process also has the hooks on changes of weights without `--enable-ext`. The programs of
SGLang's frontend get one more hook, when they import `sgl_ext.engine.chunks.frontend`. The table is
that of the newest supported release; `core/releases.py` names the hooks of older ones.
"""


def table(hooks: Iterable[Hook]) -> str:
    """Returns a table of hooks in Markdown, sorted by target."""
    rows = ["| SGLang target | When | Function | Why no seam serves |", "|---|---|---|---|"]
    for hook in sorted(hooks, key=lambda each: each.target):
        target = hook.target.removeprefix(_SGLANG)
        module = hook.function.__module__.removeprefix(_ENGINE)
        function = f"{module}.{hook.function.__name__}"
        rows.append(f"| `{target}` | {hook.when} | `{function}` | {hook.why} |")
    return "\n".join(rows)


def page() -> str:
    """Returns the whole page."""
    parts = [
        ("In the launcher", (*server_args.HOOKS, *launcher.HOOKS)),
        ("In a scheduler", scheduler.HOOKS),
        (
            "On the CPU platform",
            (*packed_linear.HOOKS, *hicache.HOOKS, *hicache_link.HOOKS),
        ),
    ]
    sections = [f"\n## {title} ({len(hooks)})\n\n{table(hooks)}\n" for title, hooks in parts]
    return _INTRODUCTION + "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page())
