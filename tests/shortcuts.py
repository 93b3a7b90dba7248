"""Shortcuts of SGLang processes that are forked for tests: a loaded tokenizer, and a quick end."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from typing import Any, NoReturn

_POLL_S = 0.1
_OPTIONS = {
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
    "revision": None,
    "tokenizer_backend": "huggingface",
}
"""Arguments with which every process of a server loads the tokenizer, unless it is configured."""


def prepare_models() -> set[str]:
    """Creates the tests' models, and returns their paths.

    Call it first in a process that does not fork: torch computes with several threads here, and a
    forked process would wait for threads that it does not have.
    """
    from sgl_ext.models import SMOLLM2, prepare, shortened, untrained

    return {str(path) for path in (prepare(SMOLLM2), shortened(SMOLLM2, 6), untrained())}


def install() -> None:
    """Prepares a process that has imported SGLang, before it forks others."""
    _load_tokenizer()
    _poll_for_the_end()
    _search_once()


def _load_tokenizer() -> None:
    """Loads the tokenizer of the tests' models, which is the same for all of them.

    Each process of a server loads the tokenizer, a scheduler twice, and each time from its file
    three times. This takes most of the start of a server that is forked.
    """
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer as original

    paths = prepare_models()
    tokenizer = original(min(paths), **_OPTIONS)

    def get_tokenizer(name: str, *args: Any, **options: Any) -> Any:
        if name in paths and not args and options == _OPTIONS:
            return tokenizer
        return original(name, *args, **options)

    for module in list(sys.modules.values()):
        if vars(module).get("get_tokenizer") is original:
            module.get_tokenizer = get_tokenizer  # type: ignore[attr-defined]


def _poll_for_the_end() -> None:
    """Lets a server notice SIGTERM at once; SGLang looks for it every five seconds."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    original = TokenizerManager.sigterm_watchdog

    async def sigterm_watchdog(manager: Any) -> None:
        while not manager.gracefully_exit:
            await asyncio.sleep(_POLL_S)
        await original(manager)

    TokenizerManager.sigterm_watchdog = sigterm_watchdog


def _search_once() -> None:
    """Lets SGLang's plugin registry search all modules once for the functions that it hooks.

    The extension does so for its own hooks. Here it serves the plugin loader as well, which each
    process calls.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_ext.engine.core.hooks import one_search

    original = HookRegistry.apply_hooks

    def apply_hooks() -> None:
        with one_search():
            original()

    HookRegistry.apply_hooks = apply_hooks


def end(code: object) -> NoReturn:
    """Ends the process as ``sys.exit`` does, but leaves its memory to the kernel.

    To free the objects of all modules one by one takes seconds, because each page is copied.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
